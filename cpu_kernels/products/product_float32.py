"""Products with float32 weights on a CPU, of any processor.

The product is ``out [T, N] = x [T, K] W^T``. Weights lie in panels of `PANEL` outputs, in each of
which the inputs come in order::

    weights [panels, K, PANEL]

Each sum adds its products one after the other, from the first to the last. So a row's result
depends neither on the rows beside it nor on the number of threads.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from kvrelay.cpu_kernels.arrays import Array
from kvrelay.cpu_kernels.jit import array_at, exact, inlined, kernel, team_part
from kvrelay.cpu_kernels.lanes import LINE_BYTES
from kvrelay.cpu_kernels.pair_memory import address_of, make_lines
from kvrelay.cpu_kernels.products.product import PANEL
from kvrelay.cpu_kernels.products.product_floats import FLOAT_ROWS, WHOLE_ROWS, sum_float32
from kvrelay.cpu_kernels.team import run_on_team, take

BLOCK: Final = 8 * FLOAT_ROWS
"""Rows that are multiplied with one panel after the other."""


class FloatProduct(NamedTuple):
    """Addresses and sizes of a product; an address is 0 where there is no such thing."""

    x: int
    weights: int
    bias: int
    residual: int
    out: int
    rows: int
    inputs: int
    outputs: int


@kernel
def multiply_float32(
    threads: int,
    x: int,
    weights: int,
    bias: int,
    residual: int,
    out: int,
    rows: int,
    inputs: int,
    outputs: int,
) -> None:
    """``out [rows, outputs] = x [rows, inputs] W^T (+ bias [outputs]) (+ residual)``.

    All are float32, contiguous and given by their address, 0 for no bias and no residual.
    ``rows >= 1`` and ``inputs % PAIRS == 0``. The weights' last panel is whole.
    """
    panels = (outputs + PANEL - 1) // PANEL
    units = (rows + BLOCK - 1) // BLOCK * panels
    product = FloatProduct(x, weights, bias, residual, out, rows, inputs, outputs)
    run_on_team(threads, multiply_units, (np.zeros(1, np.int64), units, product))


@team_part
def multiply_units(counter: Array, units: int, product: FloatProduct) -> None:
    """Compute the next of `units` until there is none left: a panel of a block each."""
    panels = (product.outputs + PANEL - 1) // PANEL
    sums = make_lines(FLOAT_ROWS, PANEL, np.float32)
    unit = take(counter, 1)
    while unit < units:
        panel, first = unit % panels, unit // panels * BLOCK
        multiply_float_panel(product, first, panel, sums)
        unit = take(counter, 1)


@inlined
def multiply_float_panel(product: FloatProduct, first: int, panel: int, sums: Array) -> None:
    """Multiply a panel with the block of rows from `first` on."""
    weights = product.weights + panel * product.inputs * PANEL * 4
    end = min(first + BLOCK, product.rows)
    for row in range(first, end, FLOAT_ROWS):
        count, x = min(FLOAT_ROWS, end - row), product.x + row * product.inputs * 4
        for half in range(1 if count <= WHOLE_ROWS else 2):
            side, to = half * LINE_BYTES, address_of(sums)
            sum_float32(count, x, product.inputs // 2, weights + side, to + side)
        write_sums(product, row, count, panel, sums)


@exact
def write_sums(product: FloatProduct, row: int, count: int, panel: int, sums: Array) -> None:
    """Write `count` rows of a panel's sums, with bias and residual, from `row` on."""
    begin, width = panel * PANEL, min(PANEL, product.outputs - panel * PANEL)
    for r in range(count):
        at = 4 * ((row + r) * product.outputs + begin)
        out = array_at(product.out + at, (width,), np.float32)
        for output in range(width):
            out[output] = sums[r, output]
        if product.bias:
            bias = array_at(product.bias + 4 * begin, (width,), np.float32)
            for output in range(width):
                out[output] += bias[output]
        if product.residual:
            residual = array_at(product.residual + at, (width,), np.float32)
            for output in range(width):
                out[output] += residual[output]
