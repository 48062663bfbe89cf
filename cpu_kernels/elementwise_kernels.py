"""Normalization, rotation and activation, compiled for a CPU.

Rows are bfloat16 bits (uint16), one after the other; sums are in float32. Threads of the team take
rows in turn. Kernels are given addresses. To make an array of a tensor, and to take it apart again,
costs more than most kernels take for one row.

A loop that writes is compiled twice, for arrays far apart and for such as may overlap, and which
one runs depends on addresses. Its operations are `exact`: both give the same bits. A loop that only
reads is compiled once, and may be reordered.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvrelay.cpu_kernels.arrays import Array
from kvrelay.cpu_kernels.jit import (
    array_at,
    exact,
    exp_of_negative,
    inlined,
    kernel,
    store,
    team_part,
    widen,
)
from kvrelay.cpu_kernels.team import run_on_team, take

TAKEN_ROWS = 16
"""The rows that a thread takes at a time."""


@kernel
def rms_norm(
    threads: int,
    rows: int,
    width: int,
    x: int,
    weight: int,
    has_wide_weight: bool,
    eps: float,
    out: int,
) -> None:
    """Normalize ``x [rows, width]`` into `out`; a wide ``weight [width]`` is float32."""
    counter, small = np.zeros(1, np.int64), np.float32(eps)
    source = array_at(x, (rows, width), np.uint16)
    target = array_at(out, (rows, width), np.uint16)
    if has_wide_weight:
        wide = array_at(weight, (width,), np.float32)
        run_on_team(threads, rms_norm_rows, (counter, source, wide, small, target))
    else:
        bits = array_at(weight, (width,), np.uint16)
        run_on_team(threads, rms_norm_rows, (counter, source, bits, small, target))


@team_part
def rms_norm_rows(counter: Array, x: Array, weight: Array, eps: Any, out: Array) -> None:
    """Compute rows of `rms_norm` until none is left."""
    count = len(x)
    begin = take(counter, TAKEN_ROWS)
    while begin < count:
        for row in range(begin, min(begin + TAKEN_ROWS, count)):
            rms_norm_row(x[row], weight, eps, out[row])
        begin = take(counter, TAKEN_ROWS)


@inlined
def sum_squares(x: Array) -> Any:
    """Add up a row's squares, in an order that depends on its length alone."""
    squares = np.float32(0)
    for i in range(len(x)):
        value = widen(x[i])
        squares += value * value
    return squares


@exact
def rms_norm_row(x: Array, weight: Array, eps: Any, out: Array) -> None:
    """One row of `rms_norm`."""
    scale = np.float32(1.0) / np.sqrt(sum_squares(x) / np.float32(len(x)) + eps)
    for i in range(len(x)):
        store(out, i, widen(x[i]) * scale * widen(weight[i]))


@kernel
def rotate(
    threads: int, rows: int, all_heads: int, dim: int, heads: int, count: int, cos: int, sin: int
) -> None:
    """Rotate the first `count` of ``heads [rows, all_heads, dim]`` in place.

    ``cos, sin [rows, dim / 2]`` are float32.
    """
    numbers = array_at(heads, (rows, all_heads, dim), np.uint16)
    cosines = array_at(cos, (rows, dim // 2), np.float32)
    sines = array_at(sin, (rows, dim // 2), np.float32)
    args = (np.zeros(1, np.int64), numbers, count, cosines, sines)
    run_on_team(threads, rotate_rows, args)


@team_part
def rotate_rows(counter: Array, heads: Array, count: int, cos: Array, sin: Array) -> None:
    """Compute rows of `rotate` until none is left."""
    total = len(heads)
    begin = take(counter, TAKEN_ROWS)
    while begin < total:
        for row in range(begin, min(begin + TAKEN_ROWS, total)):
            for head in range(count):
                rotate_head(heads[row, head], cos[row], sin[row])
        begin = take(counter, TAKEN_ROWS)


@exact
def rotate_head(head: Array, cos: Array, sin: Array) -> None:
    """Rotate one ``head [D]``."""
    half = len(cos)
    first, second = head[:half], head[half:]
    for i in range(half):
        a, b = widen(first[i]), widen(second[i])
        store(first, i, a * cos[i] - b * sin[i])
        store(second, i, b * cos[i] + a * sin[i])


@exact
def times_sigmoid(factor: Any, x: Any) -> Any:
    """``factor * sigmoid(x)``"""
    decay = exp_of_negative(-abs(x))
    numerator = factor if x >= 0 else factor * decay
    return numerator / (np.float32(1.0) + decay)


@kernel
def silu_mul(threads: int, rows: int, width: int, gate_up: int, out: int) -> None:
    """Write ``silu(gate) * up`` of ``gate_up [rows, 2 * width]`` into ``out [rows, width]``."""
    factors = array_at(gate_up, (rows, 2 * width), np.uint16)
    products = array_at(out, (rows, width), np.uint16)
    run_on_team(threads, silu_mul_rows, (np.zeros(1, np.int64), factors, products))


@team_part
def silu_mul_rows(counter: Array, gate_up: Array, out: Array) -> None:
    """Compute rows of `silu_mul` until none is left."""
    count, width = out.shape
    begin = take(counter, TAKEN_ROWS)
    while begin < count:
        for row in range(begin, min(begin + TAKEN_ROWS, count)):
            silu_mul_row(gate_up[row, :width], gate_up[row, width:], out[row])
        begin = take(counter, TAKEN_ROWS)


@exact
def silu_mul_row(gates: Array, ups: Array, products: Array) -> None:
    """Compute one row of `silu_mul`."""
    for i in range(len(products)):
        gate = widen(gates[i])
        store(products, i, times_sigmoid(gate, gate) * widen(ups[i]))


@kernel
def gelu_mul(threads: int, rows: int, width: int, gate_up: int, out: int) -> None:
    """Write ``gelu(gate) * up`` into `out`, with gelu by tanh; arguments as in `silu_mul`."""
    factors = array_at(gate_up, (rows, 2 * width), np.uint16)
    products = array_at(out, (rows, width), np.uint16)
    run_on_team(threads, gelu_mul_rows, (np.zeros(1, np.int64), factors, products))


@team_part
def gelu_mul_rows(counter: Array, gate_up: Array, out: Array) -> None:
    """Compute rows of `gelu_mul` until none is left."""
    count, width = out.shape
    begin = take(counter, TAKEN_ROWS)
    while begin < count:
        for row in range(begin, min(begin + TAKEN_ROWS, count)):
            gelu_mul_row(gate_up[row, :width], gate_up[row, width:], out[row])
        begin = take(counter, TAKEN_ROWS)


@exact
def gelu_mul_row(gates: Array, ups: Array, products: Array) -> None:
    """Compute one row of `gelu_mul`.

    gelu is from Hendrycks and Gimpel (arXiv 1606.08415)::

        gelu(x) = x * (1 + tanh(u)) / 2 = x * sigmoid(2 * u)
        u = sqrt(2 / pi) * (x + 0.044715 * x ** 3)
    """
    slope, bend = np.float32(2 * np.sqrt(2 / np.pi)), np.float32(0.044715)
    for i in range(len(products)):
        gate = widen(gates[i])
        x = slope * gate * (np.float32(1.0) + bend * gate * gate)
        store(products, i, times_sigmoid(gate, x) * widen(ups[i]))


@exact
def clamped_silu_mul_row(gates: Array, ups: Array, slope: Any, most: Any, products: Array) -> None:
    """Write ``(up + 1) * gate * sigmoid(slope * gate)``, as gpt-oss does.

    A gate is at most `most`, the other factor within ``[-most, most]``; NaN stays NaN.
    """
    for i in range(len(products)):
        gate, up = widen(gates[i]), widen(ups[i])
        gate = min(gate, most)
        up = most if up > most else max(up, -most)
        store(products, i, times_sigmoid(gate, slope * gate) * (up + np.float32(1.0)))
