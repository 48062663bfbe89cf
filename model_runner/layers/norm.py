"""Normalization with its weight."""

from __future__ import annotations

import torch

from kvrelay.model_runner.layers.elementwise import Elementwise, HeadNormWeights, NormWeight
from kvrelay.model_runner.layers.hidden import Hidden


class Norm:
    """Root mean square normalization: Zhang and Sennrich (arXiv 1910.07467)."""

    def __init__(self, elementwise: Elementwise, weight: NormWeight, eps: float) -> None:
        self._elementwise = elementwise
        self._weight = weight
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, N]`` to ``[T, N]``."""
        return self._elementwise.rms_norm(x, self._weight, self._eps)

    def add(self, hidden: Hidden) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of `hidden`, ``[T, N]``, and its sum; do not use `hidden` afterwards."""
        if hidden.addend is None:
            return self(hidden.residual), hidden.residual
        weight, eps = self._weight, self._eps
        return self._elementwise.add_rms_norm(hidden.addend, hidden.residual, weight, eps)


class NoNorm:
    """The place of a `Norm` where an architecture has none."""

    def add(self, hidden: Hidden) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of `hidden`, ``[T, N]``, twice; do not use `hidden` afterwards."""
        addend = hidden.addend
        total = hidden.residual if addend is None else hidden.residual + addend
        return total, total


class HeadNorm:
    """Root mean square normalization for each head of queries and keys."""

    def __init__(self, elementwise: Elementwise, weights: HeadNormWeights, eps: float) -> None:
        self._elementwise = elementwise
        self._weights = weights
        self._eps = eps

    def __call__(self, heads: torch.Tensor) -> None:
        """Normalize query and key heads of ``heads [T, heads, D]`` in place; others follow."""
        self._elementwise.rms_norm_heads(heads, self._weights, self._eps)


class TokenNorm:
    """Root mean square normalization of all query heads of a token as one, and of its key heads."""

    def __init__(self, query: Norm, key: Norm, query_heads: int, key_heads: int) -> None:
        self._query = query
        self._key = key
        self._counts = [query_heads, key_heads]

    def __call__(self, heads: torch.Tensor) -> None:
        """Normalize query and key heads of ``heads [T, heads, D]`` in place; others follow."""
        queries, keys = torch.split(heads[:, : sum(self._counts)], self._counts, dim=1)
        for norm, part in ((self._query, queries), (self._key, keys)):
            part.copy_(norm(part.flatten(1).contiguous()).view(part.shape))
