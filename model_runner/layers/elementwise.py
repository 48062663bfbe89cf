"""Normalization, rotation and activation: in plain torch, and by compiled kernels on a CPU."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch.nn import functional

from kvrelay.model_runner.kernels import elementwise as cpu_kernels
from kvrelay.model_runner.kernels.arrays import as_array

SHARED_ELEMENTS = 1 << 20
"""From so many on a second thread saves more than its start costs, also when cores are busy."""


class Elementwise(Protocol):
    """The operations of a layer between its matrix products."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """``x [T, N]`` scaled to unit mean square, times ``weight [N]``.

        A float32 weight of an `x` that is less precise is applied before rounding.
        """
        ...

    def rotate(self, heads: torch.Tensor, count: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate the first `count` heads of ``heads [T, heads, D]`` in place.

        ``cos, sin [T, D / 2]`` float32. Dimension ``i`` turns with ``i + D / 2``.
        """
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


def softcap(logits: torch.Tensor, most: float) -> torch.Tensor:
    """Bring logits into ``(-most, most)``."""
    return torch.tanh(logits / most) * most


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension of `x`, in float32 and in the order of transformers.

    Llama rounds before a weight of its own dtype is applied, Gemma after one in float32.
    """
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * wide.to(weight.dtype)).to(x.dtype)


class TorchElementwise:
    """Any device, any dtype; rounds where transformers rounds."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """``x [T, N]`` scaled to unit mean square, times ``weight [N]``: ``[T, N]``."""
        return rms_norm(x, weight, eps)

    def rotate(self, heads: torch.Tensor, count: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate the first `count` heads of ``heads [T, heads, D]`` in place."""
        cos, sin = cos[:, None].to(heads.dtype), sin[:, None].to(heads.dtype)
        first, second = heads[:, :count].chunk(2, dim=-1)
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


class InvariantElementwise(TorchElementwise):
    """Any dtype on a CPU; a row's result does not depend on the rows beside it.

    torch computes its silu, gelu and sigmoid by vector instructions, and what is left over at the
    end of a thread's part by scalar ones, whose exponentials differ in the last bit. Where those
    parts end depends on all rows. Its exp and tanh compute the rest by the same instructions, and
    sums, products and quotients are exact to the last bit whatever computes them.
    """

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of ``[T, 2 * N]``: ``[T, N]``."""
        gate, up = gate_up.chunk(2, dim=-1)
        return gate / (torch.exp(-gate) + 1) * up

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``gelu(gate) * up`` of ``[T, 2 * N]``: ``[T, N]``; gelu is approximated by tanh."""
        gate, up = gate_up.chunk(2, dim=-1)
        inner = (gate * gate * gate * 0.044715 + gate) * math.sqrt(2 / math.pi)
        return gate * 0.5 * (torch.tanh(inner) + 1) * up

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        """The logistic function of ``x [T, N]``."""
        return 1 / (torch.exp(-x) + 1)


class CpuElementwise:
    """bfloat16 on a CPU: one compiled pass each, float32 inside, rounded once at the end.

    Large ones are shared by as many threads as torch has when this is made.
    """

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """``x [T, N]`` scaled to unit mean square, times ``weight [N]``: ``[T, N]``."""
        out = torch.empty_like(x)
        cpu_kernels.rms_norm(
            self._threads_for(x), as_array(x), as_array(weight), eps, as_array(out)
        )
        return out

    def rotate(self, heads: torch.Tensor, count: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate the first `count` heads of ``heads [T, heads, D]`` in place."""
        threads = self._threads_for(heads)
        cpu_kernels.rotate(threads, as_array(heads), count, cos.numpy(), sin.numpy())

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of ``[T, 2 * N]``: ``[T, N]``."""
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        cpu_kernels.silu_mul(self._threads_for(gate_up), as_array(gate_up), as_array(out))
        return out

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``gelu(gate) * up`` of ``[T, 2 * N]``: ``[T, N]``; gelu is approximated by tanh."""
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        cpu_kernels.gelu_mul(self._threads_for(gate_up), as_array(gate_up), as_array(out))
        return out

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        """The logistic function of ``x [T, N]``, the same whatever rows are beside a row."""
        return 1 / (torch.exp(-x) + 1)

    def _threads_for(self, rows: torch.Tensor) -> int:
        return self._threads if rows.numel() >= SHARED_ELEMENTS else 1


def make_elementwise(
    dtype: torch.dtype, device: torch.device, batch_invariant: bool = False
) -> Elementwise:
    """The fastest implementation; float32 stays in torch, where it equals transformers exactly.

    But for the last bit, if a row's result must not depend on the rows beside it.
    """
    if device.type == "cpu" and dtype is torch.bfloat16:
        return CpuElementwise()
    return InvariantElementwise() if batch_invariant else TorchElementwise()
