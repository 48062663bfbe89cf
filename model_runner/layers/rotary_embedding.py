"""The cosines and sines of a batch's positions, which rotate its heads."""

from __future__ import annotations

import torch

from kvrelay.model_runner.config.rope import Rope
from kvrelay.model_runner.layers.elementwise import Elementwise, Rotation


class RotaryEmbedding:
    """Cosines and sines of positions, computed once a forward and shared by its layers."""

    def __init__(
        self, rope: Rope, head_dim: int, device: torch.device, elementwise: Elementwise
    ) -> None:
        self._elementwise = elementwise
        self._inv_freq = rope.inv_freq(head_dim).to(device)
        self._attention_factor = rope.attention_factor

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """``[T]`` positions to their cosines and sines."""
        return self._elementwise.find_rotation(positions, self._inv_freq, self._attention_factor)
