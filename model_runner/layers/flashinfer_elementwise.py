"""Normalization, rotation and activation by FlashInfer's kernels, on CUDA devices.

Each kernel rounds once, at its end. Shapes that a kernel does not allow are computed in plain
torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch

from kvrelay.model_runner.layers.elementwise import (
    HeadNormWeights,
    NormWeight,
    Rotation,
    TorchElementwise,
)

ROTATED_DIMS = (64, 128, 256, 512)
"""The dimensions of heads that have their own kernel for rotation.

As many of a longer head may rotate: each half of them is whole vectors of a thread.
"""
VECTOR_BYTES: Final = 16
"""The bytes that a thread reads at once; rows must be multiples of it.

An activation multiplies by the second half of a row. If a row is no multiple, older kernels even
read beside that half.
"""


class FlashInferElementwise(TorchElementwise):
    """The operations in bfloat16 and float16.

    Args:
        package: the flashinfer package.
    """

    adds_in_norms = True

    def __init__(self, package: Any) -> None:
        self._package = package

    def rms_norm(self, x: torch.Tensor, weight: NormWeight, eps: float) -> torch.Tensor:
        """``x [T, N]`` scaled to unit mean square, times the weight: ``[T, N]``."""
        if not _fills_vectors(x, x.shape[1]):
            return super().rms_norm(x, weight, eps)
        package = self._package
        norm = package.gemma_rmsnorm if weight.has_unit_offset else package.rmsnorm
        normed: torch.Tensor = norm(x, weight.stored, eps)
        return normed

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: NormWeight, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of ``residual + x``, ``[T, N]`` each, and that sum. Overwrites both."""
        if not _fills_vectors(x, x.shape[1]):
            return super().add_rms_norm(x, residual, weight, eps)
        package, offset = self._package, weight.has_unit_offset
        norm = package.gemma_fused_add_rmsnorm if offset else package.fused_add_rmsnorm
        norm(x, residual, weight.stored, eps)
        return x, residual

    def rms_norm_heads(self, heads: torch.Tensor, weights: HeadNormWeights, eps: float) -> None:
        """Normalize each query and key head of ``heads [T, heads, D]`` in place."""
        if not _fills_vectors(heads, heads.shape[2]):
            super().rms_norm_heads(heads, weights, eps)
            return
        queries, end = weights.query_heads, weights.query_heads + weights.key_heads
        self._norm_heads(heads[:, :queries], weights.query, eps)
        self._norm_heads(heads[:, queries:end], weights.key, eps)

    def prepare(self, rotation: Rotation) -> Rotation:
        """The rotation with the table of cosines and sines that kernels read, one row a token."""
        cos, sin = rotation.cos, rotation.sin
        if 2 * cos.shape[1] not in ROTATED_DIMS:
            return rotation
        rows = torch.arange(len(cos), dtype=torch.int32, device=cos.device)
        return replace(rotation, table=torch.cat((cos, sin), dim=1), rows=rows)

    def rotate(self, heads: torch.Tensor, count: int, rotation: Rotation) -> None:
        """Rotate the first `count` heads of ``heads [T, heads, D]`` in place."""
        # A kernel takes queries and keys, at least one head of each.
        if rotation.table is None or count < 2 or heads.shape[2] not in ROTATED_DIMS:
            super().rotate(heads, count, rotation)
            return
        self._package.apply_rope_with_cos_sin_cache_inplace(
            rotation.rows,
            heads[:, : count - 1].view(len(heads), -1),
            heads[:, count - 1],
            heads.shape[2],
            rotation.table,
            is_neox=True,
        )

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of ``[T, 2 * N]``: ``[T, N]``."""
        if not _fills_vectors(gate_up, gate_up.shape[1] // 2):
            return super().silu_mul(gate_up)
        product: torch.Tensor = self._package.silu_and_mul(gate_up)
        return product

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``gelu(gate) * up`` of ``[T, 2 * N]``: ``[T, N]``; gelu is approximated by tanh."""
        if not _fills_vectors(gate_up, gate_up.shape[1] // 2):
            return super().gelu_mul(gate_up)
        product: torch.Tensor = self._package.gelu_tanh_and_mul(gate_up)
        return product

    def _norm_heads(self, heads: torch.Tensor, weight: NormWeight, eps: float) -> None:
        """Normalize ``heads [T, n, D]`` in place."""
        if not weight.has_unit_offset:
            self._package.rmsnorm(heads, weight.stored, eps, out=heads)
            return
        # The kernel is documented for rows alone.
        normed = self._package.gemma_rmsnorm(heads.flatten(0, 1), weight.stored, eps)
        heads.copy_(normed.view(heads.shape))


def _fills_vectors(x: torch.Tensor, size: int) -> bool:
    return size * x.dtype.itemsize % VECTOR_BYTES == 0
