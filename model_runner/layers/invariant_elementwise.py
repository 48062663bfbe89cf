"""Normalization, rotation and activation for --batch-invariant: kernels of ours and exact sums.

torch computes exponentials by vector instructions, and those at the end of a thread's part by
scalar ones. The last bit of both may differ, and where parts end depends on all rows.
Sums, products and quotients of two numbers are rounded alike whatever computes them.
"""

from __future__ import annotations

from functools import reduce

import torch

from kvrelay.cpu_kernels import elementwise_rows as kernels
from kvrelay.cpu_kernels.arrays import Array, as_array
from kvrelay.model_runner.layers.elementwise import (
    CpuElementwise,
    HeadNormWeights,
    NormWeight,
    Rotation,
)


class InvariantElementwise(CpuElementwise):
    """bfloat16 and float32 on a CPU; a row's result does not depend on the rows beside it."""

    def rms_norm(self, x: torch.Tensor, weight: NormWeight, eps: float) -> torch.Tensor:
        """``x [T, N]`` scaled to unit mean square, times the weight: ``[T, N]``."""
        if x.dtype is torch.bfloat16:
            return super().rms_norm(x, weight, eps)
        factor, out = weight.factor, torch.empty_like(x)
        assert factor.shape == x.shape[1:]
        kernels.norm_of_rows(self._threads_for(x), _rows(x), _rows(factor), eps, _rows(out))
        return out

    def rms_norm_heads(self, heads: torch.Tensor, weights: HeadNormWeights, eps: float) -> None:
        """Normalize each query and key head of ``heads [T, heads, D]`` in place."""
        factors = weights.factors
        assert heads.shape[2] == factors.shape[1]
        normed = heads.new_empty(len(heads), *factors.shape)
        kernels.norm_of_heads(
            self._threads_for(heads), _rows(heads), _rows(factors), eps, _rows(normed)
        )
        heads[:, : len(factors)] = normed

    def find_rotation(
        self, positions: torch.Tensor, frequencies: torch.Tensor, factor: float
    ) -> Rotation:
        """How ``positions [T]`` turn heads; ``frequencies [D / 2]`` are angles a position."""
        shape = (len(positions), len(frequencies))
        cos, sin = torch.empty(shape), torch.empty(shape)
        kernels.angles_of_rows(_rows(positions), _rows(frequencies), factor, _rows(cos), _rows(sin))
        return Rotation(cos, sin)

    def rotate(self, heads: torch.Tensor, count: int, rotation: Rotation) -> None:
        """Rotate the first `count` heads of ``heads [T, heads, D]`` in place."""
        if heads.dtype is torch.bfloat16:
            super().rotate(heads, count, rotation)
            return
        cos, sin = rotation.cos, rotation.sin
        assert cos.shape == sin.shape
        assert len(cos) == len(heads)
        kernels.rotate_heads(self._threads_for(heads), _rows(heads), count, _rows(cos), _rows(sin))

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of ``[T, 2 * N]``: ``[T, N]``."""
        if gate_up.dtype is torch.bfloat16:
            return super().silu_mul(gate_up)
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        kernels.silu_mul_of_rows(self._threads_for(gate_up), _rows(gate_up), _rows(out))
        return out

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``gelu(gate) * up`` of ``[T, 2 * N]``: ``[T, N]``; gelu is approximated by tanh."""
        if gate_up.dtype is torch.bfloat16:
            return super().gelu_mul(gate_up)
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        kernels.gelu_mul_of_rows(self._threads_for(gate_up), _rows(gate_up), _rows(out))
        return out

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        """The logistic function of ``x [T, N]`` float32."""
        out = x.clone(memory_format=torch.contiguous_format)
        kernels.sigmoid_of_rows(_rows(out))
        return out

    def softmax(self, x: torch.Tensor) -> torch.Tensor:
        """The shares of each row of ``x [T, N]`` float32, which add up to 1."""
        out = x.clone(memory_format=torch.contiguous_format)
        kernels.softmax_of_rows(_rows(out))
        return out

    def softcap(self, x: torch.Tensor, most: float) -> torch.Tensor:
        """``x [T, N]`` float32 brought into ``(-most, most)``."""
        out = x.clone(memory_format=torch.contiguous_format)
        kernels.softcap_of_rows(_rows(out), most)
        return out

    def sum_rows(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of each row of ``x [T, N]``, from the first to the last: ``[T, 1]``."""
        total: torch.Tensor = reduce(torch.add, torch.split(x, 1, 1))
        return total


def _rows(tensor: torch.Tensor) -> Array:
    """The memory of a tensor whose rows lie one behind the other.

    A kernel is compiled anew for rows with gaps, and may then add them up in another order. A
    single row has no gaps, so it would differ from the same row among others.
    """
    assert tensor.is_contiguous(), "not contiguous"
    return as_array(tensor)
