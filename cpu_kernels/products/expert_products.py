"""The experts of a layer on a CPU, all in one call: products, activation and weighted sum.

A pair is a token and one of the experts that it chose. Pairs are sorted by expert, so that the rows
of each lie together: a slice::

    gathered [pairs, hidden]  ->  wide [pairs, 2 * inner]  ->  narrow [pairs, inner]
    out [tokens, hidden]      <-  results [pairs, hidden]  <-

Weights of all experts lie in panels as in `product` and `product_float32`, one expert's after the
other's. A free thread takes a panel of a slice's block at a time. Each row is computed as those
compute it, and a token's results are added in the order of its choices. So its output depends
neither on the tokens beside it nor on the number of threads.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from numba.extending import overload

from kvrelay.cpu_kernels.arrays import Array
from kvrelay.cpu_kernels.elementwise_kernels import (
    TAKEN_ROWS,
    clamped_silu_mul_row,
    gelu_mul_row,
    silu_mul_row,
)
from kvrelay.cpu_kernels.jit import exact, inlined, kernel, store, team_part, widen
from kvrelay.cpu_kernels.pair_memory import address_of, make_lines
from kvrelay.cpu_kernels.products.product import (
    PANEL,
    SUM_ROWS,
    Product,
    Unit,
    find_block,
    find_share,
    multiply_panel,
)
from kvrelay.cpu_kernels.products.product_float32 import BLOCK, FloatProduct, multiply_float_panel
from kvrelay.cpu_kernels.products.product_floats import FLOAT_ROWS, PANEL_BYTES
from kvrelay.cpu_kernels.products.tiles import drop_tiles
from kvrelay.cpu_kernels.team import run_on_team, take

_SHARED_NUMBERS: Final = 1 << 17
"""The fewest numbers that several threads copy, activate or add up."""


class Gate(IntEnum):
    """The functions of an expert's gate."""

    SILU = 0
    GELU = 1
    CLAMPED_SILU = 2


class Slices(NamedTuple):
    """The rows of the experts that were chosen, one expert's after the other's."""

    experts: Array
    """``[slices]``: the experts, in order."""
    starts: Array
    """``[slices + 1]``: the first row of each, and the end."""


class Products(NamedTuple):
    """The addresses and sizes of the products of all slices; a bias of 0 is none."""

    x: int
    weights: int
    bias: int
    out: int
    inputs: int
    outputs: int
    unit: int
    """A `Unit` for bfloat16; float32 has one way."""


class Division(NamedTuple):
    """The work of `Products`, divided into units: a panel of a block of a slice each."""

    first_units: Array
    """``[slices + 1]``: the first unit of each slice, and the end."""
    blocks: Array
    """``[slices]``: the rows of a slice's blocks."""
    most_rows: int
    """The most rows of a block."""


@kernel
def compute_experts(
    threads: int,
    x: Array,
    chosen: Array,
    shares: Array,
    experts: int,
    gate_up: int,
    gate_up_bias: int,
    gate_up_unit: int,
    down: int,
    down_bias: int,
    down_unit: int,
    gate: int,
    slope: float,
    most: float,
    scratch: Array,
    out: Array,
) -> None:
    """Write the sum over `k` of ``shares[t, k] * expert(chosen[t, k])(x[t])`` into ``out[t]``.

    All arrays are contiguous, weights are given by their addresses, biases by 0 if there are none.
    Sizes are those that `multiply` takes.

    Args:
        threads: the threads that compute.
        x: ``[tokens, hidden]``: bfloat16's bits, or float32, as are weights and biases.
        chosen: ``[tokens, each]`` int64: different experts for each token.
        shares: ``[tokens, each]`` float32.
        experts: the number of experts.
        gate_up: the panels of ``[experts, 2 * inner, hidden]``, gates first.
        gate_up_bias: ``[experts, 2 * inner]``
        gate_up_unit: the `Unit` of bfloat16's product.
        down: the panels of ``[experts, hidden, inner]``.
        down_bias: ``[experts, hidden]``
        down_unit: the `Unit` of bfloat16's product.
        gate: a `Gate`.
        slope: a clamped gate's.
        most: a clamped gate's.
        scratch: ``[chosen.size, hidden + 3 * inner]`` numbers like those of `x`.
        out: ``[tokens, hidden]``
    """
    pairs, hidden = chosen.size, x.shape[1]
    inner = scratch.size // pairs - hidden
    inner //= 3
    places = np.empty(chosen.shape, np.int64)
    slices = sort_pairs(chosen, experts, places)
    gathered = scratch[: pairs * hidden].reshape((pairs, hidden))
    rest = scratch[pairs * hidden :]
    wide = rest[: pairs * 2 * inner].reshape((pairs, 2 * inner))
    narrow = rest[pairs * 2 * inner :].reshape((pairs, inner))
    helpers = threads if pairs > TAKEN_ROWS and pairs * hidden >= _SHARED_NUMBERS else 1
    run_on_team(helpers, gather_rows, (np.zeros(1, np.int64), x, places, gathered))
    x_at, wide_at, narrow_at = address_of(gathered), address_of(wide), address_of(narrow)
    products = Products(x_at, gate_up, gate_up_bias, wide_at, hidden, 2 * inner, gate_up_unit)
    for half in range(2):  # a product is compiled once
        multiply_all(threads, x, slices, products)
        if half == 0:
            args = (np.zeros(1, np.int64), gate, np.float32(slope), np.float32(most), wide, narrow)
            run_on_team(helpers, activate_rows, args)
            products = Products(narrow_at, down, down_bias, x_at, inner, hidden, down_unit)
    run_on_team(helpers, add_results, (np.zeros(1, np.int64), gathered, places, shares, out))


@inlined
def sort_pairs(chosen: Array, experts: int, places: Array) -> Any:
    """Sort pairs by expert, those of one by token: fill each one's row in; return the `Slices`."""
    tokens, each = chosen.shape
    following = np.zeros(experts + 1, np.int64)
    for token in range(tokens):
        for choice in range(each):
            following[chosen[token, choice] + 1] += 1
    ids = np.empty(experts, np.int64)
    starts = np.zeros(experts + 1, np.int64)
    count = 0
    for expert in range(experts):
        if following[expert + 1] > 0:
            ids[count] = expert
            count += 1
        following[expert + 1] += following[expert]
        starts[count] = following[expert + 1]
    for token in range(tokens):
        for choice in range(each):
            expert = chosen[token, choice]
            places[token, choice] = following[expert]
            following[expert] += 1
    return Slices(ids[:count], starts[: count + 1])


@team_part
def activate_rows(
    counter: Array, gate: int, slope: Any, most: Any, wide: Array, narrow: Array
) -> None:
    """Write a `Gate` of the first half of each row, times the second, until none is left."""
    count, inner = narrow.shape
    begin = take(counter, TAKEN_ROWS)
    while begin < count:
        for row in range(begin, min(begin + TAKEN_ROWS, count)):
            gates, ups = wide[row, :inner], wide[row, inner:]
            if gate == Gate.SILU:
                silu_mul_row(gates, ups, narrow[row])
            elif gate == Gate.GELU:
                gelu_mul_row(gates, ups, narrow[row])
            else:
                clamped_silu_mul_row(gates, ups, slope, most, narrow[row])
        begin = take(counter, TAKEN_ROWS)


@team_part
def gather_rows(counter: Array, x: Array, places: Array, gathered: Array) -> None:
    """Copy tokens to the rows of their pairs until none is left."""
    tokens, each = places.shape
    begin = take(counter, TAKEN_ROWS)
    while begin < tokens:
        for token in range(begin, min(begin + TAKEN_ROWS, tokens)):
            for choice in range(each):
                row = places[token, choice]
                for i in range(x.shape[1]):
                    gathered[row, i] = x[token, i]
        begin = take(counter, TAKEN_ROWS)


@team_part
def add_results(counter: Array, results: Array, places: Array, shares: Array, out: Array) -> None:
    """Add up the results of tokens until none is left."""
    tokens, hidden = out.shape
    totals = np.empty(hidden, np.float32)
    begin = take(counter, TAKEN_ROWS)
    while begin < tokens:
        for token in range(begin, min(begin + TAKEN_ROWS, tokens)):
            add_choices(results, places[token], shares[token], totals, out[token])
        begin = take(counter, TAKEN_ROWS)


@exact
def add_choices(results: Array, places: Array, shares: Array, totals: Array, out: Array) -> None:
    """Add up a token's results in the order of its choices, in float32, and round once."""
    for i in range(len(totals)):
        totals[i] = np.float32(0)
    for choice in range(len(places)):
        result, share = results[places[choice]], shares[choice]
        for i in range(len(totals)):
            totals[i] += share * widen(result[i])
    for i in range(len(totals)):
        store(out, i, totals[i])


@inlined
def divide(slices: Slices, blocks: Array, outputs: int) -> Division:
    """Divide products with `outputs` into units, given the rows of each slice's blocks."""
    panels = (outputs + PANEL - 1) // PANEL
    first_units = np.zeros(len(blocks) + 1, np.int64)
    most_rows = 0
    for at in range(len(blocks)):
        rows = slices.starts[at + 1] - slices.starts[at]
        units = (rows + blocks[at] - 1) // blocks[at] * panels
        first_units[at + 1] = first_units[at] + units
        most_rows = max(most_rows, min(rows, blocks[at]))
    return Division(first_units, blocks, most_rows)


def multiply_all(threads: Any, x: Any, slices: Any, products: Any) -> Any:
    """Multiply all slices, of the dtype of `x`, inside kernels."""
    raise NotImplementedError("only inside a kernel")


@overload(multiply_all, inline="always")  # type: ignore[untyped-decorator]
def _multiply_all(threads: Any, x: Any, slices: Any, products: Any) -> Any:
    def multiply_bits(threads: Any, x: Any, slices: Any, products: Any) -> Any:
        multiply_slices_on(threads, slices, products)

    def multiply_floats(threads: Any, x: Any, slices: Any, products: Any) -> Any:
        multiply_float_slices_on(threads, slices, products)

    return multiply_bits if x.dtype == numba.uint16 else multiply_floats


@inlined
def multiply_slices_on(threads: int, slices: Slices, products: Products) -> None:
    """Multiply all slices in bfloat16."""
    blocks = np.empty(len(slices.experts), np.int64)
    for at in range(len(blocks)):
        rows = slices.starts[at + 1] - slices.starts[at]
        blocks[at] = find_block(products.unit, rows, products.inputs)
    division = divide(slices, blocks, products.outputs)
    units = division.first_units[-1]
    share = find_share(threads, products.unit, division.most_rows, units)
    args = (np.zeros(1, np.int64), share, threads * share, slices, division, products)
    run_on_team(threads, multiply_slices, args)


@team_part
def multiply_slices(
    counter: Array,
    share: int,
    stride: int,
    slices: Slices,
    division: Division,
    products: Products,
) -> None:
    """Compute the next `share` of units until none is left, as `multiply_remaining`."""
    inputs, outputs = products.inputs, products.outputs
    panels = (outputs + PANEL - 1) // PANEL
    expert_bytes = panels * inputs // 2 * PANEL_BYTES
    first_units, units = division.first_units, division.first_units[-1]
    sums = make_lines(SUM_ROWS, PANEL, np.float32)
    widened_rows = division.most_rows if products.unit == Unit.FLOATS else 0
    widened = make_lines(widened_rows, inputs, np.float32)
    widened_from = -1
    at, begin = 0, take(counter, share)
    while begin < units:
        end = min(begin + share, units)
        for unit in range(begin, end):
            at = find_slice(first_units, at, unit)
            expert, start = slices.experts[at], slices.starts[at]
            product = Product(
                products.x + 2 * start * inputs,
                products.weights + expert * expert_bytes,
                products.bias + 2 * expert * outputs if products.bias else 0,
                0,
                products.out + 2 * start * outputs,
                slices.starts[at + 1] - start,
                inputs // 2,
                outputs,
                division.blocks[at],
                products.unit,
            )
            within = unit - first_units[at]
            first, panel = within // panels * product.block, within % panels
            # Panels of all experts lie one after the other.
            asked, following = panels, unit + 1 if unit + 1 < end else begin + stride
            if following < units:
                then = find_slice(first_units, at, following)
                ahead = slices.experts[then] - expert
                asked = ahead * panels + (following - first_units[then]) % panels
            is_widened, widened_from = start + first == widened_from, start + first
            multiply_panel(product, first, panel, asked, is_widened, widened, sums)
        begin = take(counter, share)
    if products.unit == Unit.TILES:
        drop_tiles()


@inlined
def find_slice(first_units: Array, at: int, unit: int) -> int:
    """Find the slice of a `unit`, which is `at` or a later one."""
    while first_units[at + 1] <= unit:
        at += 1
    return at


@inlined
def multiply_float_slices_on(threads: int, slices: Slices, products: Products) -> None:
    """Multiply all slices in float32."""
    blocks = np.empty(len(slices.experts), np.int64)
    for at in range(len(blocks)):
        blocks[at] = BLOCK
    args = (np.zeros(1, np.int64), slices, divide(slices, blocks, products.outputs), products)
    run_on_team(threads, multiply_float_slices, args)


@team_part
def multiply_float_slices(
    counter: Array, slices: Slices, division: Division, products: Products
) -> None:
    """Compute the next unit until none is left, as `multiply_units`."""
    inputs, outputs = products.inputs, products.outputs
    panels = (outputs + PANEL - 1) // PANEL
    first_units, units = division.first_units, division.first_units[-1]
    sums = make_lines(FLOAT_ROWS, PANEL, np.float32)
    at, unit = 0, take(counter, 1)
    while unit < units:
        at = find_slice(first_units, at, unit)
        expert, start = slices.experts[at], slices.starts[at]
        product = FloatProduct(
            products.x + 4 * start * inputs,
            products.weights + 4 * expert * panels * inputs * PANEL,
            products.bias + 4 * expert * outputs if products.bias else 0,
            0,
            products.out + 4 * start * outputs,
            slices.starts[at + 1] - start,
            inputs,
            outputs,
        )
        within = unit - first_units[at]
        multiply_float_panel(product, within // panels * BLOCK, within % panels, sums)
        unit = take(counter, 1)
