"""Whatever a model computes row by row besides products and attention, compiled for a CPU.

Rows are arrays of float32 or, where nothing else is said, of bfloat16's bits. A row is computed by
the same instructions wherever it is among others, and whichever thread has it.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from kvrelay.cpu_kernels.arrays import Array
from kvrelay.cpu_kernels.attention.decode_attention import cap, softmax
from kvrelay.cpu_kernels.elementwise_kernels import (
    TAKEN_ROWS,
    gelu_mul_rows,
    rms_norm_row,
    rms_norm_rows,
    rotate_rows,
    silu_mul_rows,
    times_sigmoid,
)
from kvrelay.cpu_kernels.jit import exact, kernel, team_part
from kvrelay.cpu_kernels.team import run_on_team, take

_QUARTERS_A_RADIAN: Final = 2 / math.pi
_QUARTER: Final = float.fromhex("0x1.921fb54400000p+0")
"""The first 33 bits of pi / 2: times a number below a million it is exact."""
_QUARTER_REST: Final = 6.077100506506192e-11
"""The rest of pi / 2."""
_S: Final = tuple((-1) ** (n // 2) / math.factorial(n) for n in range(3, 15, 2))
_C: Final = tuple((-1) ** (n // 2) / math.factorial(n) for n in range(2, 16, 2))
"""Coefficients of sine and cosine beside ``x`` and 1, the lowest first."""


@kernel
def norm_of_rows(threads: int, x: Array, weight: Array, eps: float, out: Array) -> None:
    """``x, out [T, N]`` and ``weight [N]``: as `elementwise.rms_norm`."""
    run_on_team(threads, rms_norm_rows, (np.zeros(1, np.int64), x, weight, np.float32(eps), out))


@kernel
def norm_of_heads(threads: int, heads: Array, weights: Array, eps: float, out: Array) -> None:
    """The first of ``heads [T, heads, D]`` by ``weights [n, D]`` into ``out [T, n, D]``."""
    args = (np.zeros(1, np.int64), heads, weights, np.float32(eps), out)
    run_on_team(threads, norm_remaining_heads, args)


@team_part
def norm_remaining_heads(
    counter: Array, heads: Array, weights: Array, eps: Any, out: Array
) -> None:
    """Tokens of `norm_of_heads` until none is left."""
    count = len(heads)
    begin = take(counter, TAKEN_ROWS)
    while begin < count:
        for token in range(begin, min(begin + TAKEN_ROWS, count)):
            for head in range(len(weights)):
                rms_norm_row(heads[token, head], weights[head], eps, out[token, head])
        begin = take(counter, TAKEN_ROWS)


@kernel
def rotate_heads(threads: int, heads: Array, count: int, cos: Array, sin: Array) -> None:
    """Rotate the first `count` of ``heads [T, heads, D]`` in place: as `elementwise.rotate`."""
    run_on_team(threads, rotate_rows, (np.zeros(1, np.int64), heads, count, cos, sin))


@kernel
def silu_mul_of_rows(threads: int, gate_up: Array, out: Array) -> None:
    """``silu(gate) * up`` of ``gate_up [T, 2 * N]`` into ``out [T, N]``."""
    run_on_team(threads, silu_mul_rows, (np.zeros(1, np.int64), gate_up, out))


@kernel
def gelu_mul_of_rows(threads: int, gate_up: Array, out: Array) -> None:
    """Multiply as `silu_mul_of_rows`, with gelu by tanh."""
    run_on_team(threads, gelu_mul_rows, (np.zeros(1, np.int64), gate_up, out))


@kernel
def sigmoid_of_rows(rows: Array) -> None:
    """The logistic function of ``rows [T, N]`` float32, in place."""
    for row in rows:
        for i in range(len(row)):
            row[i] = times_sigmoid(np.float32(1.0), row[i])


@kernel
def softmax_of_rows(rows: Array) -> None:
    """The softmax of each of ``rows [T, N]`` float32, in place."""
    softmax(rows, 0, rows.shape[1], 0)


@kernel
def softcap_of_rows(rows: Array, most: float) -> None:
    """``most * tanh(x / most)`` of ``rows [T, N]`` float32, in place."""
    cap(rows, 0, rows.shape[1], most)


@kernel
def angles_of_rows(
    positions: Array, frequencies: Array, factor: float, cos: Array, sin: Array
) -> None:
    """The cosines and sines of positions times ``frequencies [N]``, each times `factor`.

    ``positions [T]`` are int64, ``cos, sin [T, N]`` float32.
    """
    for token in range(len(positions)):
        position = np.float32(positions[token])
        find_angles(position, frequencies, np.float32(factor), cos[token], sin[token])


@exact
def find_angles(position: Any, frequencies: Array, factor: Any, cos: Array, sin: Array) -> None:
    """One row of `angles_of_rows`.

    The nearest number of quarter turns is taken off in float64 (Cody and Waite). The rest is at
    most an eighth turn: there Taylor's polynomials are off by less than 1e-13.
    """
    for i in range(len(frequencies)):
        angle = np.float64(position * frequencies[i])
        quarters = np.floor(angle * _QUARTERS_A_RADIAN + 0.5)
        x = (angle - quarters * _QUARTER) - quarters * _QUARTER_REST
        y = x * x
        s = x * (
            1.0 + y * (_S[0] + y * (_S[1] + y * (_S[2] + y * (_S[3] + y * (_S[4] + y * _S[5])))))
        )
        c = 1.0 + y * (
            _C[0] + y * (_C[1] + y * (_C[2] + y * (_C[3] + y * (_C[4] + y * (_C[5] + y * _C[6])))))
        )
        turn = np.int64(quarters) & 3
        first, second = (s, c) if turn & 1 else (c, s)
        cos[i] = np.float32(-first if turn == 1 or turn == 2 else first) * factor
        sin[i] = np.float32(-second if turn >= 2 else second) * factor
