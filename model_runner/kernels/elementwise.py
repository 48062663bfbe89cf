"""Normalization, rotation and activation, compiled for a CPU.

Rows are bfloat16 bits (uint16) or float32 throughout; sums are in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvrelay.model_runner.kernels.arrays import Array
from kvrelay.model_runner.kernels.jit import exp_of_negative, inlined, kernel, store, widen


@kernel
def rms_norm(x: Array, weight: Array, eps: float, out: Array) -> None:
    """``x, out [T, N]``, ``weight [N]`` (or float32), summed in float32."""
    width = x.shape[1]
    for row in range(x.shape[0]):
        squares = np.float32(0)
        for i in range(width):
            value = widen(x[row, i])
            squares += value * value
        scale = np.float32(1.0) / np.sqrt(squares / np.float32(width) + np.float32(eps))
        for i in range(width):
            store(out[row], i, widen(x[row, i]) * scale * widen(weight[i]))


@kernel
def rotate(heads: Array, count: int, cos: Array, sin: Array) -> None:
    """Rotate the first `count` of ``heads [T, heads, D]`` in place; ``cos, sin [T, D / 2]``."""
    half = cos.shape[1]
    for row in range(heads.shape[0]):
        for head in range(count):
            first, second = heads[row, head, :half], heads[row, head, half:]
            for i in range(half):
                a, b = widen(first[i]), widen(second[i])
                store(first, i, a * cos[row, i] - b * sin[row, i])
                store(second, i, b * cos[row, i] + a * sin[row, i])


@inlined
def times_sigmoid(factor: Any, x: Any) -> Any:
    """``factor * sigmoid(x)``"""
    decay = exp_of_negative(-abs(x))
    numerator = factor if x >= 0 else factor * decay
    return numerator / (np.float32(1.0) + decay)


@kernel
def silu_mul(gate_up: Array, out: Array) -> None:
    """``silu(gate) * up`` of ``gate_up [T, 2 * N]`` into ``out [T, N]``."""
    width = out.shape[1]
    for row in range(out.shape[0]):
        gates, ups, products = gate_up[row, :width], gate_up[row, width:], out[row]
        for i in range(width):
            gate = widen(gates[i])
            store(products, i, times_sigmoid(gate, gate) * widen(ups[i]))


@kernel
def gelu_mul(gate_up: Array, out: Array) -> None:
    """``gelu(gate) * up`` of ``gate_up [T, 2 * N]`` into ``out [T, N]``, gelu by tanh.

    ``gelu(x) = x * (1 + tanh(u)) / 2 = x * sigmoid(2 * u)`` with
    ``u = sqrt(2 / pi) * (x + 0.044715 * x ** 3)``: Hendrycks and Gimpel (arXiv 1606.08415).
    """
    width = out.shape[1]
    slope, bend = np.float32(2 * np.sqrt(2 / np.pi)), np.float32(0.044715)
    for row in range(out.shape[0]):
        gates, ups, products = gate_up[row, :width], gate_up[row, width:], out[row]
        for i in range(width):
            gate = widen(gates[i])
            x = slope * gate * (np.float32(1.0) + bend * gate * gate)
            store(products, i, times_sigmoid(gate, x) * widen(ups[i]))
