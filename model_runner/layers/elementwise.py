"""Normalization, rotation and activation: in plain torch, and by compiled kernels on a CPU.

FlashInfer's kernels for them are behind the same seam, in `flashinfer_elementwise`; what
--batch-invariant promises is kept by `invariant_elementwise`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from kvrelay.cpu_kernels import elementwise_kernels as cpu_kernels
from kvrelay.cpu_kernels.arrays import address
from kvrelay.cpu_kernels.kernel_threads import KernelThreads

SHARED_ELEMENTS = 1 << 17
"""The fewest elements for which a second thread of an awake team is worth its start."""


@dataclass(frozen=True, slots=True)
class NormWeight:
    """The weight of a norm, ``[N]``."""

    stored: torch.Tensor
    """The weight as the checkpoint has it, in the model's dtype."""
    factor: torch.Tensor
    """The factor: `stored`, or `stored` plus one in float32, which is applied before rounding."""

    @classmethod
    def of(cls, stored: torch.Tensor, add_unit_offset: bool) -> NormWeight:
        """Make a weight of `stored`; with `add_unit_offset` the checkpoint stored it less one."""
        return cls(stored, stored.to(torch.float32) + 1 if add_unit_offset else stored)

    @property
    def has_unit_offset(self) -> bool:
        """Whether the checkpoint stored it less one."""
        return self.factor is not self.stored


@dataclass(frozen=True, slots=True)
class HeadNormWeights:
    """The norms of query heads and of key heads, which come first among a token's heads."""

    query: NormWeight
    key: NormWeight
    query_heads: int
    key_heads: int
    factors: torch.Tensor
    """``[query_heads + key_heads, D]``: one row a head."""

    @classmethod
    def of(
        cls, query: NormWeight, key: NormWeight, query_heads: int, key_heads: int
    ) -> HeadNormWeights:
        """Make the weights for `query_heads` and `key_heads` heads."""
        factors = (query.factor.expand(query_heads, -1), key.factor.expand(key_heads, -1))
        return cls(query, key, query_heads, key_heads, torch.cat(factors))


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of the first `R` dimensions of heads; ``i`` turns with ``i + R / 2``."""

    cos: torch.Tensor
    """``[T, R / 2]`` float32"""
    sin: torch.Tensor
    """``[T, R / 2]`` float32"""
    table: torch.Tensor | None = None
    """``[T, R]`` float32: cosines, then sines. Only for FlashInfer."""
    rows: torch.Tensor | None = None
    """``[T]`` int32: each token's row of `table`."""


class Elementwise(Protocol):
    """The operations of a layer between its matrix products; ``T`` is at least 1."""

    @property
    def adds_in_norms(self) -> bool:
        """Whether sums are left to the norm that follows, which computes them by `add_rms_norm`."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: NormWeight, eps: float) -> torch.Tensor:
        """``x [T, N]`` scaled to unit mean square, times the weight."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: NormWeight, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of ``residual + x``, ``[T, N]`` each, and that sum. May overwrite both."""
        ...

    def rms_norm_heads(self, heads: torch.Tensor, weights: HeadNormWeights, eps: float) -> None:
        """Normalize each query and key head of ``heads [T, heads, D]`` in place."""
        ...

    def find_rotation(
        self, positions: torch.Tensor, frequencies: torch.Tensor, factor: float
    ) -> Rotation:
        """How ``positions [T]`` turn heads, all by `factor` longer.

        ``frequencies [R / 2]`` are angles a position.
        """
        ...

    def prepare(self, rotation: Rotation) -> Rotation:
        """The rotation in the form that `rotate` takes in all layers of a forward."""
        ...

    def rotate(self, heads: torch.Tensor, count: int, rotation: Rotation) -> None:
        """Rotate the first `count` heads of ``heads [T, heads, D]`` in place."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of ``[T, 2 * N]``: ``[T, N]``."""
        ...

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``gelu(gate) * up`` of ``[T, 2 * N]``: ``[T, N]``; gelu is approximated by tanh."""
        ...

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        """The logistic function of ``x [T, N]`` float32."""
        ...

    def softmax(self, x: torch.Tensor) -> torch.Tensor:
        """The shares of each row of ``x [T, N]`` float32, which add up to 1."""
        ...

    def softcap(self, x: torch.Tensor, most: float) -> torch.Tensor:
        """``x [T, N]`` float32 brought into ``(-most, most)``."""
        ...

    def sum_rows(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of each row of ``x [T, N]``: ``[T, 1]``."""
        ...


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalize the last dimension of `x`, in float32 and in the order of transformers.

    Llama rounds before a weight of its own dtype is applied, Gemma after a weight in float32.
    """
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * wide.to(weight.dtype)).to(x.dtype)


class TorchElementwise:
    """The operations in plain torch, in any dtype; they round where transformers rounds."""

    adds_in_norms = False

    def rms_norm(self, x: torch.Tensor, weight: NormWeight, eps: float) -> torch.Tensor:
        """``x [T, N]`` scaled to unit mean square, times the weight: ``[T, N]``."""
        return rms_norm(x, weight.factor, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: NormWeight, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of ``residual + x``, ``[T, N]`` each, and that sum."""
        total = residual + x
        return self.rms_norm(total, weight, eps), total

    def rms_norm_heads(self, heads: torch.Tensor, weights: HeadNormWeights, eps: float) -> None:
        """Normalize each query and key head of ``heads [T, heads, D]`` in place."""
        normed = heads[:, : len(weights.factors)]
        normed.copy_(rms_norm(normed, weights.factors, eps))

    def find_rotation(
        self, positions: torch.Tensor, frequencies: torch.Tensor, factor: float
    ) -> Rotation:
        """How ``positions [T]`` turn heads; ``frequencies [R / 2]`` are angles a position."""
        angles = positions[:, None].to(torch.float32) * frequencies
        cos, sin = (one * factor for one in (angles.cos(), angles.sin()))
        return Rotation(cos, sin)

    def prepare(self, rotation: Rotation) -> Rotation:
        """The rotation as it is."""
        return rotation

    def rotate(self, heads: torch.Tensor, count: int, rotation: Rotation) -> None:
        """Rotate the first `count` heads of ``heads [T, heads, D]`` in place."""
        cos, sin = (one[:, None].to(heads.dtype) for one in (rotation.cos, rotation.sin))
        first, second = heads[:, :count, : 2 * cos.shape[-1]].chunk(2, dim=-1)
        turned = first * cos - second * sin
        second.copy_(second * cos + first * sin)
        first.copy_(turned)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of ``[T, 2 * N]``: ``[T, N]``."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``gelu(gate) * up`` of ``[T, 2 * N]``: ``[T, N]``; gelu is approximated by tanh."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh") * up

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        """The logistic function of ``x [T, N]``."""
        return x.sigmoid()

    def softmax(self, x: torch.Tensor) -> torch.Tensor:
        """The shares of each row of ``x [T, N]``, which add up to 1."""
        return x.softmax(-1)

    def softcap(self, x: torch.Tensor, most: float) -> torch.Tensor:
        """``x [T, N]`` brought into ``(-most, most)``."""
        return torch.tanh(x / most) * most

    def sum_rows(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of each row of ``x [T, N]``: ``[T, 1]``."""
        return x.sum(-1, keepdim=True)


class CpuElementwise(TorchElementwise):
    """bfloat16 on a CPU: one compiled pass each, float32 inside, rounded once at the end.

    Threads share large passes. Products add to the residual themselves, so sums are not left to
    norms.
    """

    def __init__(self, threads: KernelThreads | None = None) -> None:
        self._threads = threads or KernelThreads()

    def rms_norm(self, x: torch.Tensor, weight: NormWeight, eps: float) -> torch.Tensor:
        """``x [T, N]`` scaled to unit mean square, times the weight: ``[T, N]``."""
        rows, width = x.shape
        factor, out = weight.factor, x.new_empty(rows, width)
        assert factor.shape == (width,)
        is_wide = factor.dtype is torch.float32
        cpu_kernels.rms_norm(
            self._threads_for(x),
            rows,
            width,
            address(x, torch.bfloat16),
            address(factor, torch.float32 if is_wide else torch.bfloat16),
            is_wide,
            eps,
            out.data_ptr(),
        )
        return out

    def rotate(self, heads: torch.Tensor, count: int, rotation: Rotation) -> None:
        """Rotate the first `count` heads of ``heads [T, heads, D]`` in place."""
        rows, all_heads, dim = heads.shape
        cos, sin = rotation.cos, rotation.sin
        half = cos.shape[1]
        assert cos.shape == sin.shape == (rows, half)
        cpu_kernels.rotate(
            self._threads_for(heads),
            rows,
            all_heads,
            dim,
            half,
            address(heads, torch.bfloat16),
            count,
            address(cos, torch.float32),
            address(sin, torch.float32),
        )

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of ``[T, 2 * N]``: ``[T, N]``."""
        return self._activate(cpu_kernels.silu_mul, gate_up)

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``gelu(gate) * up`` of ``[T, 2 * N]``: ``[T, N]``; gelu is approximated by tanh."""
        return self._activate(cpu_kernels.gelu_mul, gate_up)

    def _activate(
        self, kernel: Callable[[int, int, int, int, int], None], gate_up: torch.Tensor
    ) -> torch.Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        factors = address(gate_up, torch.bfloat16)
        kernel(self._threads_for(gate_up), rows, width, factors, out.data_ptr())
        return out

    def _threads_for(self, rows: torch.Tensor) -> int:
        is_large = rows.shape[0] > cpu_kernels.TAKEN_ROWS and rows.numel() >= SHARED_ELEMENTS
        return self._threads.count if is_large else 1
