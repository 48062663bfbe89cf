"""The cosines and sines of a batch's positions, which rotate its heads."""

from __future__ import annotations

import torch

from kvrelay.model_runner.config.rope import Rope
from kvrelay.model_runner.layers.elementwise import Rotation


class RotaryEmbedding:
    """Cosines and sines of positions, computed once a forward and shared by its layers."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device) -> None:
        self._inv_freq = rope.inv_freq(head_dim).to(device)
        self._attention_factor = rope.attention_factor

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """Turn ``[T]`` positions into their cosines and sines."""
        angles = positions[:, None].to(torch.float32) * self._inv_freq
        cos, sin = (one * self._attention_factor for one in (angles.cos(), angles.sin()))
        return Rotation(cos, sin)
