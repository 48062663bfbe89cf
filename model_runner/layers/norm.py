"""Normalization with its weight."""

from __future__ import annotations

import torch

from kvrelay.model_runner.layers.elementwise import Elementwise


class Norm:
    """Root mean square normalization: Zhang and Sennrich (arXiv 1910.07467)."""

    def __init__(self, elementwise: Elementwise, weight: torch.Tensor, eps: float) -> None:
        self._elementwise = elementwise
        self._weight = weight
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, N]`` to ``[T, N]``."""
        return self._elementwise.rms_norm(x, self._weight, self._eps)
