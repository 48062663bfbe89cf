"""Products with bfloat16 weights on a CPU that multiplies pairs of bfloat16 (AVX512-BF16), whole
tiles of it (AMX), or float32 (AVX2): a `Unit`.

The product is ``out [T, N] = x [T, K] W^T``. ``W [N, K]`` lies in panels of `PANEL` outputs, one
after the other, and the pairs of inputs come in order::

    weights [panels, K / 2, PANEL, 2]

A tile is a panel and up to `TILE` rows, whose sums stay in registers. Few rows are one tile: the
weights stream from memory once, fetched `_AHEAD` bytes before they are needed. With more rows, each
tile fetches a part of the panel that probably comes next, so that memory and arithmetic work at the
same time. The last tiles fetch the memory behind the weights, which may be the next product's. Many
rows are computed by blocks that stay in the second cache. A free thread takes a panel of a block at
a time.

The processor's own tiles (`tiles`) multiply up to `_TILED_ROWS` rows with a panel, in the same
layout. Many rows are ten times as fast as with vectors. Float32 (`product_floats`) has half as many
registers of half the size: tiles have up to `FLOAT_ROWS` rows.

Each sum adds its pairs one after the other, from the first to the last. Tiles add 32 inputs after
the other, float32 each input by itself, which gives other bits. So a row's result depends neither
on the rows beside it nor on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import partial
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

from kvrelay.cpu_kernels.arrays import Array
from kvrelay.cpu_kernels.jit import inlined, kernel, team_part
from kvrelay.cpu_kernels.lanes import (
    LANES,
    LINE_BYTES,
    add_product,
    ask_for_line,
    constant,
    loop,
    switch,
    times,
)
from kvrelay.cpu_kernels.pair_memory import add_widened, address_of, make_lines
from kvrelay.cpu_kernels.processor import has_bfloat16_products
from kvrelay.cpu_kernels.products.product_floats import (
    FLOAT_ROWS,
    LINES,
    PANEL_BYTES,
    WHOLE_ROWS,
    sum_floats,
    widen_floats,
)
from kvrelay.cpu_kernels.products.product_tiles import (
    ASKED_LINES,
    fetch_to_write,
    round_sums,
    sum_in_tiles,
)
from kvrelay.cpu_kernels.products.tiles import TILE_ROWS, drop_tiles, shape_tiles
from kvrelay.cpu_kernels.team import run_on_team, take

_VECTORS: Final = 2
PANEL: Final = _VECTORS * LANES
TILE: Final = 12
"""The rows of a tile: times 2 vectors these are 24 sums, and 32 registers hold the rest, too."""
_STEP: Final = 2
"""The pairs of inputs in a turn of a tile's loop."""
PAIRS: Final = 2 * _STEP
"""Inputs are a multiple of it."""
_LINES: Final = _STEP * _VECTORS
"""The cache lines that hold a turn's weights."""
_AHEAD: Final = 8192
"""The bytes fetched ahead. Weights for 8 rows: 28.7 GB/s without, 34 so, 29 with 1,024."""
_FIRST_CACHE_ROWS: Final = 4
"""The most rows of tiles that fetch lines into the first cache; others use the second.

The first cache has no room for a panel besides the one in use. With the second, 16 rows take 0.8 of
the time, but 4 rows would take 1.2 times theirs.
"""
_BLOCK: Final = 20 * TILE
"""The most rows of a block: with up to 2,000 inputs they stay in a second cache of 1 MiB."""
_TILED_ROWS: Final = 2 * TILE_ROWS
"""The rows of two of the processor's tiles: with a panel's two of outputs, four tiles of sums."""
SUM_ROWS: Final = 2 * _TILED_ROWS
"""The rows of sums that a thread needs: those of two such tiles, or fewer."""
_TILED_BYTES: Final = _TILED_ROWS * PANEL * 4
"""The bytes of the sums of such a tile."""
_TILED_BLOCK: Final = 10 * _TILED_ROWS
"""The most rows of a block: their outputs stay in a second cache of 2 MiB until they are read."""
_TILED_BLOCK_BYTES: Final = 1 << 20
"""The most bytes of a block's inputs, unless 32 rows have more."""
_WIDENED_BYTES: Final = 1 << 18
"""The most bytes of a block's inputs as float32: half of a second cache of 512 KiB."""
_FEWEST_TILES: Final = 4
"""The fewest tiles of a block of floats. With 8,192 inputs: 57 GFLOP/s, with 1 tile 33."""
_SHARES: Final = 4
"""The pieces a thread of a product of one tile, with several threads: each streams its own."""
_TILES: Final = (
    (1, 0),
    *((rows, _LINES) for rows in (2, 4, 6, 8, 10, 12)),
    *((rows, _LINES // 2) for rows in (6, 8, 10, 12)),
    *((rows, _LINES // 4) for rows in (8, 10, 12)),
)
"""The rows of a tile, with the lines that it fetches in a turn. One row streams best without."""

_INT8, _INT16, _INT32, _INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOATS, _INTS, _BITS = (ir.VectorType(kind, LANES) for kind in (ir.FloatType(), _INT32, _INT16))


class Unit(IntEnum):
    """The numbers that are multiplied at once."""

    FLOATS = 0
    PAIRS = 1
    TILES = 2


class Product(NamedTuple):
    """The addresses and sizes of a product; an address of 0 means that there is no such thing."""

    x: int
    weights: int
    bias: int
    residual: int
    out: int
    rows: int
    pairs: int
    """The pairs of inputs."""
    outputs: int
    block: int
    """The rows that are computed with one panel after the other."""
    unit: int


def _pointer(builder: Any, address: Any, kind: Any, bytes_on: Any = None) -> Any:
    if bytes_on is not None:
        address = builder.add(address, bytes_on)
    return builder.inttoptr(address, kind.as_pointer())


def _sum_tile(
    builder: Any, rows: Sequence[Any], weights: Any, pairs: Any, ahead: Any, lines: int
) -> Sequence[Any]:
    """The sums of a tile, ``[len(rows) * _VECTORS]`` vectors.

    `rows` and `weights` are addresses; each turn fetches `lines` cache lines from `ahead` on.
    """

    def turn(index: Any, totals: Sequence[Any]) -> Sequence[Any]:
        sums = list(totals)
        asked = builder.add(ahead, times(builder, index, lines * LINE_BYTES))
        for line in range(lines):
            place = _pointer(builder, asked, _INT8, _INT64(line * LINE_BYTES))
            ask_for_line(builder, place, second_cache=len(rows) > _FIRST_CACHE_ROWS)
        for step in range(_STEP):
            pair = builder.add(times(builder, index, _STEP), _INT64(step))
            panel = builder.add(weights, times(builder, pair, PANEL_BYTES))
            vectors = [
                builder.load(_pointer(builder, panel, _INTS, _INT64(vector * LINE_BYTES)), align=4)
                for vector in range(_VECTORS)
            ]
            for at, row in enumerate(rows):
                unit = builder.load(_pointer(builder, row, _INT32, times(builder, pair, 4)))
                for vector in range(_VECTORS):
                    total = at * _VECTORS + vector
                    sums[total] = add_product(builder, sums[total], vectors[vector], unit)
        return sums

    nothing = [constant(0.0)] * (len(rows) * _VECTORS)
    return loop(builder, builder.udiv(pairs, _INT64(_STEP)), nothing, turn)


@intrinsic  # type: ignore[untyped-decorator]
def sum_tile(
    _typing: Any,
    size: Any,
    lines: Any,
    x: Any,
    last: Any,
    pairs: Any,
    weights: Any,
    ahead: Any,
    sums: Any,
) -> Any:
    """``sums [TILE, PANEL]`` of the first `size` rows from `x` on; (`size`, `lines`) in `_TILES`.

    Rows after the `last` are copies of it. `weights` is the address of the panel's, `ahead` that of
    the lines to fetch.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not has_bfloat16_products():  # nobody comes to it
            return context.get_dummy_value()
        data = context.make_array(signature.args[7])(context, builder, args[7]).data
        target = builder.ptrtoint(data, _INT64)
        count, asked, begin, end, depth, panel, following, _ = args

        def add_up(size: int, lines: int) -> None:
            rows = []
            for row in range(size):
                known = builder.icmp_signed("<", end, _INT64(row))
                index = builder.select(known, end, _INT64(row))
                rows.append(builder.add(begin, times(builder, builder.mul(index, depth), 4)))
            for at, total in enumerate(_sum_tile(builder, rows, panel, depth, following, lines)):
                place = _pointer(builder, target, _FLOATS, _INT64(at * LINE_BYTES))
                builder.store(total, place, align=4)

        key = builder.add(times(builder, count, _LINES + 1), asked)
        cases = [
            (size * (_LINES + 1) + lines, partial(add_up, size, lines)) for size, lines in _TILES
        ]
        switch(builder, key, cases)
        return context.get_dummy_value()

    number = numba.int64
    return numba.void(number, number, number, number, number, number, number, sums), generate


def _round(builder: Any, total: Any) -> Any:
    """Round float32 to the bits of bfloat16, to nearest, ties to even."""
    bits = builder.bitcast(total, _INTS)
    sixteen, one, half = (ir.Constant(_INTS, [n] * LANES) for n in (16, 1, 0x7FFF))
    odd = builder.and_(builder.lshr(bits, sixteen), one)
    rounded = builder.lshr(builder.add(builder.add(bits, half), odd), sixteen)
    is_nan = builder.fcmp_unordered("uno", total, total)
    quiet = ir.Constant(_INTS, [0x7FC0] * LANES)
    return builder.trunc(builder.select(is_nan, quiet, rounded), _BITS)


@intrinsic  # type: ignore[untyped-decorator]
def write_row(
    _typing: Any, sums: Any, row: Any, vectors: Any, bias: Any, residual: Any, out: Any
) -> Any:
    """Round `vectors` of a row of sums, with `bias` and `residual` (0 for none), to `out`.

    The last three are addresses of the row's first output in this panel.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        _, row, count, first, second, target = args
        source = builder.add(
            builder.ptrtoint(data, _INT64), times(builder, row, _VECTORS * LINE_BYTES)
        )

        def write(vector: Any, _: Sequence[Any]) -> Sequence[Any]:
            place = times(builder, vector, LINE_BYTES)
            total = builder.load(_pointer(builder, source, _FLOATS, place), align=4)
            half = times(builder, vector, LINE_BYTES // 2)
            for addend in (first, second):
                (total,) = add_widened(builder, [total], addend, half)
            to = _pointer(builder, target, _BITS, half)
            builder.store(_round(builder, total), to, align=2)
            return ()

        loop(builder, count, (), write)
        return context.get_dummy_value()

    number = numba.int64
    return numba.void(sums, number, number, number, number, number), generate


@kernel
def multiply(
    threads: int,
    unit: int,
    x: int,
    weights: int,
    bias: int,
    residual: int,
    out: int,
    rows: int,
    inputs: int,
    outputs: int,
) -> None:
    """Compute ``out [rows, outputs] = x [rows, inputs] W^T (+ bias [outputs]) (+ residual)``.

    All are bfloat16, contiguous and given by their address, 0 for no bias and no residual. The
    `unit` is a `Unit` that this processor has. There must be ``rows >= 1``, ``outputs % LANES ==
    0``, and ``inputs % PAIRS == 0`` (in tiles ``inputs % TILE_NUMBERS == 0``). The weights' last
    panel is whole.
    """
    block = find_block(unit, rows, inputs)
    units = (rows + block - 1) // block * ((outputs + PANEL - 1) // PANEL)
    share = find_share(threads, unit, rows, units)
    product = Product(x, weights, bias, residual, out, rows, inputs // 2, outputs, block, unit)
    args = (np.zeros(1, np.int64), share, threads * share, units, product)
    run_on_team(threads, multiply_remaining, args)


@inlined
def find_tile(unit: int) -> int:
    """The most rows that this `Unit` multiplies with a panel at once."""
    if unit == Unit.TILES:
        return _TILED_ROWS
    return FLOAT_ROWS if unit == Unit.FLOATS else TILE


@inlined
def find_block(unit: int, rows: int, inputs: int) -> int:
    """The rows that are computed with one panel after the other.

    Blocks are equal, and of whole tiles; the last one may be shorter.
    """
    most, tile = _BLOCK, find_tile(unit)
    if unit == Unit.TILES:
        most = min(_TILED_BLOCK, max(_TILED_BLOCK_BYTES // (2 * inputs * tile), 1) * tile)
    if unit == Unit.FLOATS:
        most = min(_BLOCK, max(_WIDENED_BYTES // (4 * inputs * tile), _FEWEST_TILES) * tile)
    blocks = (rows + most - 1) // most
    return (rows + blocks * tile - 1) // (blocks * tile) * tile


@inlined
def find_share(threads: int, unit: int, rows: int, units: int) -> int:
    """How many of `units` a thread takes at a time, of products of at most so many rows.

    Of many rows as few as can be, so that all threads end at about the same time.
    """
    if threads == 1:
        return units
    return 1 if rows > find_tile(unit) else max(1, units // (threads * _SHARES))


@team_part
def multiply_remaining(
    counter: Array, share: int, stride: int, units: int, product: Product
) -> None:
    """Compute the next `share` of `units` until none is left; a unit is a panel of a block.

    Equally fast threads take turns: a thread's next share begins `stride` units later.
    """
    panels = (product.outputs + PANEL - 1) // PANEL
    sums = make_lines(SUM_ROWS, PANEL, np.float32)
    widened_rows = min(product.block, product.rows) if product.unit == Unit.FLOATS else 0
    widened = make_lines(widened_rows, 2 * product.pairs, np.float32)
    widened_from = -1
    begin = take(counter, share)
    while begin < units:
        end = min(begin + share, units)
        for unit in range(begin, end):
            following = unit + 1 if unit + 1 < end else begin + stride
            asked = following % panels if following < units else panels
            first, panel = unit // panels * product.block, unit % panels
            is_widened, widened_from = first == widened_from, first
            multiply_panel(product, first, panel, asked, is_widened, widened, sums)
        begin = take(counter, share)
    if product.unit == Unit.TILES:
        drop_tiles()


@inlined
def multiply_panel(
    product: Product,
    first: int,
    panel: int,
    following: int,
    is_widened: bool,
    widened: Array,
    sums: Array,
) -> None:
    """Multiply a panel with a block of rows, by the product's unit: as `multiply_block`.

    Inputs of the block are in `widened` already, or are put there if they must be wide.
    """
    if product.unit == Unit.TILES:
        multiply_in_tiles(product, first, panel, following, sums)
    elif product.unit == Unit.PAIRS:
        multiply_block(product, first, panel, following, sums)
    else:
        if not is_widened:
            widen_block(product, first, address_of(widened))
        multiply_floats(product, first, panel, following, address_of(widened), sums)


@inlined
def multiply_block(product: Product, first: int, panel: int, following: int, sums: Array) -> None:
    """Multiply a panel with the block of rows from `first` on, and fetch the `following` panel.

    The panel behind the last may be unmapped memory: to fetch it is harmless.
    """
    pairs, panel_bytes = product.pairs, product.pairs * PANEL_BYTES
    weights = product.weights + panel * panel_bytes
    end = min(first + product.block, product.rows)
    halves = (end - first + 1) // 2
    tiles = (2 * halves + TILE - 1) // TILE
    lines = _LINES if tiles == 1 else _LINES // 2 if tiles < 4 else _LINES // 4
    part = panel_bytes * lines // _LINES
    vectors = min(PANEL, product.outputs - panel * PANEL) // LANES
    for tile in range(tiles):
        row = first + tile * halves // tiles * 2
        size = first + (tile + 1) * halves // tiles * 2 - row
        count = min(size, end - row)
        ahead = weights + _AHEAD
        if tiles > 1:
            ahead = product.weights + following * panel_bytes + tile * part
            if tile * lines >= _LINES:
                ahead = weights  # all of it has been asked for
        x = product.x + row * pairs * 4
        if end - first == 1:
            sum_tile(1, 0, x, 0, pairs, weights, ahead, sums)
        else:
            sum_tile(size, lines, x, count - 1, pairs, weights, ahead, sums)
        write_rows(product, row, count, panel, 0, vectors, sums)


@inlined
def write_rows(
    product: Product, row: int, count: int, panel: int, index: int, vectors: int, sums: Array
) -> None:
    """Round `count` rows of a panel's ``sums[index:]``, to the rows from `row` on of the output."""
    bias = product.bias + 2 * panel * PANEL if product.bias else 0
    for r in range(count):
        at = 2 * ((row + r) * product.outputs + panel * PANEL)
        residual = product.residual + at if product.residual else 0
        write_row(sums, index + r, vectors, bias, residual, product.out + at)


@inlined
def widen_block(product: Product, first: int, to: int) -> None:
    """Widen the inputs of the block of rows from `first` on."""
    rows = min(product.block, product.rows - first)
    widen_floats(product.x + first * 4 * product.pairs, rows * 2 * product.pairs, to)


@inlined
def find_lines(
    product: Product, panel: int, following: int, tile: int, tiles: int, most: int, least: int
) -> tuple[int, int]:
    """The number of lines that a tile fetches a turn (0, or `least` to `most`), and where.

    A single tile fetches its own weights. Several fetch parts of the `following` panel, and none
    once all of it is fetched.
    """
    panel_bytes = product.pairs * PANEL_BYTES
    weights = product.weights + panel * panel_bytes
    if tiles == 1:
        return most, weights + _AHEAD
    lines = max(most // 2 if tiles < 4 else most // 4, least)
    if tile * lines >= most:
        return 0, weights
    part = panel_bytes * lines // most
    return lines, product.weights + following * panel_bytes + tile * part


@inlined
def multiply_floats(
    product: Product, first: int, panel: int, following: int, x: int, sums: Array
) -> None:
    """Multiply as `multiply_block` does, with inputs widened to float32 at `x`."""
    pairs, row_bytes = product.pairs, 8 * product.pairs
    weights = product.weights + panel * pairs * PANEL_BYTES
    rows = min(product.block, product.rows - first)
    tiles = (rows + FLOAT_ROWS - 1) // FLOAT_ROWS
    vectors = min(PANEL, product.outputs - panel * PANEL) // LANES
    for tile in range(tiles):
        row = tile * rows // tiles
        count = (tile + 1) * rows // tiles - row
        lines, ahead = find_lines(product, panel, following, tile, tiles, LINES[0], LINES[1])
        begin = x + row * row_bytes
        for half in range(1 if count <= WHOLE_ROWS else 2):
            side = half * LINE_BYTES
            sum_floats(count, lines, begin, pairs, weights + side, ahead, address_of(sums) + side)
            lines = 0
        write_rows(product, first + row, count, panel, 0, vectors, sums)


@inlined
def multiply_in_tiles(
    product: Product, first: int, panel: int, following: int, sums: Array
) -> None:
    """Multiply like `multiply_block`, by tiles of up to `_TILED_ROWS` rows.

    A tile's sums are rounded while the next one's are added up: `sums` has room for two.
    """
    pairs, row_bytes = product.pairs, 4 * product.pairs
    weights = product.weights + panel * pairs * PANEL_BYTES
    end = min(first + product.block, product.rows)
    tiles = (end - first + _TILED_ROWS - 1) // _TILED_ROWS
    shaped = 0
    for tile in range(tiles):
        row = first + tile * _TILED_ROWS
        count = min(_TILED_ROWS, end - row)
        if count != shaped:
            shape_tiles(min(count, TILE_ROWS), max(count - TILE_ROWS, 1))
            shaped = count
        lines, ahead = find_lines(product, panel, following, tile, tiles, ASKED_LINES[0], 1)
        halves = (count + TILE_ROWS - 1) // TILE_ROWS
        x, to = product.x + row * row_bytes, address_of(sums) + tile % 2 * _TILED_BYTES
        sum_in_tiles(halves, lines, x, row_bytes, pairs // TILE_ROWS, weights, ahead, to)
        if tile > 0:
            write_tile(product, row - _TILED_ROWS, _TILED_ROWS, panel, (tile - 1) % 2, sums)
    last = tiles - 1
    row = first + last * _TILED_ROWS
    write_tile(product, row, end - row, panel, last % 2, sums)


@inlined
def write_tile(product: Product, row: int, count: int, panel: int, place: int, sums: Array) -> None:
    """Round `count` sums of a panel, at `place` (one of two), to rows of the output."""
    if (panel + 1) * PANEL <= product.outputs:
        at, stride = 2 * (row * product.outputs + panel * PANEL), 2 * product.outputs
        bias = product.bias + 2 * panel * PANEL if product.bias else 0
        residual = product.residual + at if product.residual else 0
        source, out = address_of(sums) + place * _TILED_BYTES, product.out + at
        fetch_to_write(out, stride, count)
        round_sums(source, count, bias, residual, out, stride)
    else:
        write_rows(product, row, count, panel, place * _TILED_ROWS, 1, sums)
