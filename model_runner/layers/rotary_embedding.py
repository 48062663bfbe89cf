"""Positions of a batch turned into the cosines and sines that rotate its heads."""

from __future__ import annotations

import torch

from kvrelay.model_runner.config.rope import Rope


class RotaryEmbedding:
    """Cosines and sines of positions, computed once a forward and shared by its layers."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device) -> None:
        self._inv_freq = rope.inv_freq(head_dim).to(device)
        self._attention_factor = rope.attention_factor

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T]`` positions to cosines and sines, each ``[T, head_dim / 2]`` float32."""
        angles = positions[:, None].to(torch.float32) * self._inv_freq
        return angles.cos() * self._attention_factor, angles.sin() * self._attention_factor
