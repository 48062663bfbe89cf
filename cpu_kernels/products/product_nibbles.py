"""Products with weights of 4 bits on a CPU, which widen them where they are multiplied.

Weights lie in panels as in `product`. A word holds eight inputs of an output, which are
four pairs. The first of a pair is in its lower half, the first pair in the lowest four bits::

    codes  [panels, K / 8, PANEL] uint32
    scales [panels, groups, PANEL] float32
    zeros  [panels, groups, PANEL] uint8

A weight is ``(code - zero) * scale``. There are two ways, which read a quarter of the bytes:

- A thread writes a panel as bfloat16 into memory of its own, which stays in a second cache. It
  multiplies with the panel as `product` does. Results are the bits of a product with these weights
  in bfloat16.
- Few rows are multiplied with codes that become bfloat16 in registers or in a first cache, group by
  group. A code's bits are those of ``16 + code`` once others are beside them, so no number is
  converted. The sum of a group's inputs, times ``16 + zero``, is taken away, and the rest is
  multiplied with the scale. Results are more exact: no weight is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

from kvrelay.cpu_kernels.arrays import Array
from kvrelay.cpu_kernels.jit import inlined, kernel, team_part
from kvrelay.cpu_kernels.lanes import (
    BFLOATS,
    FLOATS,
    INTS,
    LANES,
    LINE_BYTES,
    add,
    add_product,
    add_scaled,
    ask_for_line,
    call,
    constant,
    loop,
    multiply,
    splat,
    subtract,
    switch,
    times,
)
from kvrelay.cpu_kernels.pair_memory import BITS, FLOAT, address_of, make_lines, pointer
from kvrelay.cpu_kernels.processor import has_bfloat16_products
from kvrelay.cpu_kernels.products.product import (
    PANEL,
    SUM_ROWS,
    Product,
    Unit,
    find_block,
    find_share,
    multiply_panel,
    write_rows,
)
from kvrelay.cpu_kernels.products.product_floats import PANEL_BYTES
from kvrelay.cpu_kernels.products.product_tiles import sum_in_tiles
from kvrelay.cpu_kernels.products.tiles import TILE_NUMBERS, TILE_ROWS, drop_tiles, shape_tiles
from kvrelay.cpu_kernels.team import run_on_team, take

WORD: Final = 8
"""The inputs in a word of codes; a group is a multiple of it."""
FEW_ROWS: Final = 8
"""The most rows that are multiplied with codes by pairs: their sums stay in registers."""
_PAIRS: Final = WORD // 2
_WORD_BYTES: Final = 4
_AHEAD: Final = 4096
"""The bytes of codes that are fetched ahead."""
_SIZES: Final = (1, 2, 4, 6, 8)
"""The rows that are summed at once; what is missing is added up twice."""
_OFFSET: Final = 16.0
_OFFSET_BITS, _CODE_BITS = 0x41804180, 0x00780078
"""Two bfloat16 of `_OFFSET`, and the bits of them that count its units up to 15."""
_INT8, _INT32, _INT64 = (ir.IntType(bits) for bits in (8, 32, 64))
_FOUR_INTS, _FOUR_FLOATS = ir.VectorType(_INT32, 4), ir.VectorType(ir.FloatType(), 4)
_OCTETS = ir.VectorType(_INT8, LANES)
_INTERLEAVED: Final = [lane // 2 + lane % 2 * LANES for lane in range(2 * LANES)]
_SIDES: Final = range(PANEL // LANES)


class Nibbles(NamedTuple):
    """The addresses of weights in 4 bits, and the number of their groups of inputs."""

    codes: int
    scales: int
    zeros: int
    groups: int


def _ints(value: int) -> Any:
    return ir.Constant(INTS, [value] * LANES)


def _rounded_pairs(builder: Any, first: Any, second: Any) -> Any:
    """The bfloat16 of two vectors, lane by lane side by side; both are finite."""
    if has_bfloat16_products():
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        both = builder.bitcast(call(builder, name, BFLOATS, second, first), BITS)
        kind = ir.VectorType(ir.IntType(32), 2 * LANES)
        return builder.shuffle_vector(both, both, ir.Constant(kind, _INTERLEAVED))
    low, high = (_round(builder, one) for one in (first, second))
    upper = builder.and_(high, _ints(-1 << 16))
    return builder.bitcast(builder.or_(builder.lshr(low, _ints(16)), upper), BITS)


def _round(builder: Any, total: Any) -> Any:
    """The bits of float32, rounded to bfloat16 in their upper half, ties to even."""
    bits = builder.bitcast(total, INTS)
    odd = builder.and_(builder.lshr(bits, _ints(16)), _ints(1))
    return builder.add(builder.add(bits, _ints(0x7FFF)), odd)


def _load_group(builder: Any, scales: Any, zeros: Any, offset: float) -> list[tuple[Any, Any]]:
    """For each side of a panel a group's scales, and minus its zeros, less an `offset`."""
    sides = []
    for side in _SIDES:
        scale = builder.load(pointer(builder, scales, FLOATS, side * LINE_BYTES), align=4)
        zero = builder.load(pointer(builder, zeros, _OCTETS, side * LANES), align=1)
        wide = builder.sitofp(builder.zext(zero, INTS), FLOATS)
        sides.append((scale, subtract(builder, constant(-offset), wide)))
    return sides


def _load_codes(builder: Any, codes: Any, index: Any, side: int) -> Any:
    """The words of a side of a panel that hold the `index`-th eight inputs."""
    place = builder.add(codes, times(builder, index, PANEL * _WORD_BYTES))
    return builder.load(pointer(builder, place, INTS, side * LINE_BYTES), align=4)


def _fetch_ahead(builder: Any, codes: Any, index: Any) -> None:
    place = builder.add(codes, times(builder, index, PANEL * _WORD_BYTES))
    for side in _SIDES:
        ask_for_line(builder, pointer(builder, place, _INT8, _AHEAD + side * LINE_BYTES))


@intrinsic  # type: ignore[untyped-decorator]
def _widen_group(_typing: Any, codes: Any, scales: Any, zeros: Any, words: Any, target: Any) -> Any:
    """Write `words` of a group's weights as bfloat16 ``[4 * words, PANEL, 2]`` to `target`.

    All but `words` are addresses, of the group's first word.
    """

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        codes, scales, zeros, words, target = args
        sides = [
            # Exact: a scale has 11 bits, a zero 4.
            (scale, multiply(builder, zero, scale))
            for scale, zero in _load_group(builder, scales, zeros, 0.0)
        ]

        def turn(index: Any, _: Sequence[Any]) -> Sequence[Any]:
            _fetch_ahead(builder, codes, index)
            panel = builder.add(target, times(builder, index, _PAIRS * PANEL_BYTES))
            for side, (scale, offset) in enumerate(sides):
                word = _load_codes(builder, codes, index, side)
                for pair in range(_PAIRS):
                    first, second = (
                        builder.and_(builder.lshr(word, _ints(4 * pair + half)), _ints(15))
                        for half in (0, 16)
                    )
                    weights = [
                        add_scaled(builder, builder.sitofp(one, FLOATS), scale, offset)
                        for one in (first, second)
                    ]
                    place = pair * PANEL_BYTES + side * LINE_BYTES
                    to = pointer(builder, panel, BITS, place)
                    builder.store(_rounded_pairs(builder, *weights), to, align=2)
            return ()

        loop(builder, words, (), turn)
        return context.get_dummy_value()

    return numba.void(*[numba.int64] * 5), generate


def _code_pairs(builder: Any, word: Any, pair: int) -> Any:
    """``16 + code`` of a pair of inputs, as two bfloat16 a lane."""
    shift = 4 * pair - 3  # the lowest bit of a code counts as 1
    moved = builder.shl(word, _ints(-shift)) if shift < 0 else builder.lshr(word, _ints(shift))
    return builder.or_(builder.and_(moved, _ints(_CODE_BITS)), _ints(_OFFSET_BITS))


@intrinsic  # type: ignore[untyped-decorator]
def _add_group(
    _typing: Any,
    size: Any,
    x: Any,
    last: Any,
    row_bytes: Any,
    codes: Any,
    words: Any,
    scales: Any,
    zeros: Any,
    inputs: Any,
    inputs_bytes: Any,
    sums: Any,
) -> Any:
    """Add a group's products to ``sums [size, PANEL]``; `size` is one of `_SIZES`.

    Args are addresses but for `size`, the index of the `last` row, the bytes from one row to the
    next, and the number of `words`. `inputs` is that of the sum of the group's inputs, for the
    first row; the next row's is `inputs_bytes` further on.
    """

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if not has_bfloat16_products():  # nobody comes to it
            return context.get_dummy_value()
        count, x, last, row_bytes, codes, words, scales, zeros, inputs, inputs_bytes, sums = args

        def add_up(size: int) -> None:
            indices = []
            for row in range(size):
                known = builder.icmp_signed("<", last, _INT64(row))
                indices.append(builder.select(known, last, _INT64(row)))
            rows = [builder.add(x, builder.mul(index, row_bytes)) for index in indices]

            def turn(index: Any, totals: Sequence[Any]) -> Sequence[Any]:
                results = list(totals)
                _fetch_ahead(builder, codes, index)
                loaded = [_load_codes(builder, codes, index, side) for side in _SIDES]
                for pair in range(_PAIRS):
                    pairs = [_code_pairs(builder, word, pair) for word in loaded]
                    place = builder.add(times(builder, index, 2 * WORD), _INT64(4 * pair))
                    for at, row in enumerate(rows):
                        unit = builder.load(pointer(builder, builder.add(row, place), _INT32))
                        for side in _SIDES:
                            total = at * len(_SIDES) + side
                            results[total] = add_product(builder, results[total], pairs[side], unit)
                return results

            nothing = [constant(0.0)] * (size * len(_SIDES))
            totals = loop(builder, words, nothing, turn)
            sides = _load_group(builder, scales, zeros, _OFFSET)
            for at, index in enumerate(indices):
                place = builder.add(inputs, builder.mul(index, inputs_bytes))
                summed = splat(builder, builder.load(pointer(builder, place, FLOAT)))
                for side, (scale, offset) in enumerate(sides):
                    total = at * len(_SIDES) + side
                    to = pointer(builder, sums, FLOATS, total * LINE_BYTES)
                    rest = add_scaled(builder, offset, summed, totals[total])
                    before = builder.load(to, align=4)
                    builder.store(add_scaled(builder, scale, rest, before), to, align=4)

        switch(builder, count, [(size, partial(add_up, size)) for size in _SIZES])
        return context.get_dummy_value()

    return numba.void(*[numba.int64] * 11), generate


@intrinsic  # type: ignore[untyped-decorator]
def _write_codes(_typing: Any, codes: Any, words: Any, target: Any) -> Any:
    """Write ``16 + code`` of a group as bfloat16 ``[4 * words, PANEL, 2]`` to `target`."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        codes, words, target = args

        def turn(index: Any, _: Sequence[Any]) -> Sequence[Any]:
            _fetch_ahead(builder, codes, index)
            panel = builder.add(target, times(builder, index, _PAIRS * PANEL_BYTES))
            for side in _SIDES:
                word = _load_codes(builder, codes, index, side)
                for pair in range(_PAIRS):
                    place = pair * PANEL_BYTES + side * LINE_BYTES
                    to = pointer(builder, panel, INTS, place)
                    builder.store(_code_pairs(builder, word, pair), to, align=4)
            return ()

        loop(builder, words, (), turn)
        return context.get_dummy_value()

    return numba.void(*[numba.int64] * 3), generate


@intrinsic  # type: ignore[untyped-decorator]
def _add_scaled_group(
    _typing: Any,
    rows: Any,
    products: Any,
    scales: Any,
    zeros: Any,
    inputs: Any,
    inputs_bytes: Any,
    sums: Any,
) -> Any:
    """Add ``products [rows, PANEL]`` with codes to ``sums``, as `_add_group` does."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        rows, products, scales, zeros, inputs, inputs_bytes, sums = args
        sides = _load_group(builder, scales, zeros, _OFFSET)

        def turn(row: Any, _: Sequence[Any]) -> Sequence[Any]:
            place = builder.add(inputs, builder.mul(row, inputs_bytes))
            summed = splat(builder, builder.load(pointer(builder, place, FLOAT)))
            here = times(builder, row, PANEL * 4)
            for side, (scale, offset) in enumerate(sides):
                source, to = (
                    pointer(builder, builder.add(begin, here), FLOATS, side * LINE_BYTES)
                    for begin in (products, sums)
                )
                rest = add_scaled(builder, offset, summed, builder.load(source, align=4))
                builder.store(
                    add_scaled(builder, scale, rest, builder.load(to, align=4)), to, align=4
                )
            return ()

        loop(builder, rows, (), turn)
        return context.get_dummy_value()

    return numba.void(*[numba.int64] * 7), generate


@intrinsic  # type: ignore[untyped-decorator]
def _sum_inputs(_typing: Any, x: Any, words: Any) -> Any:
    """The sum of ``8 * words`` bfloat16 from the address `x` on, as float32."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, words = args

        def turn(index: Any, totals: Sequence[Any]) -> Sequence[Any]:
            place = builder.add(x, times(builder, index, 2 * WORD))
            units = builder.load(pointer(builder, place, _FOUR_INTS), align=2)
            sixteen, upper = (ir.Constant(_FOUR_INTS, [n] * 4) for n in (16, -1 << 16))
            both = (builder.shl(units, sixteen), builder.and_(units, upper))
            return [
                add(builder, total, builder.bitcast(one, _FOUR_FLOATS))
                for total, one in zip(totals, both, strict=True)
            ]

        nothing = ir.Constant(_FOUR_FLOATS, [0.0] * 4)
        first, second = loop(builder, words, [nothing, nothing], turn)
        four = add(builder, first, second)
        lanes = [builder.extract_element(four, _INT32(lane)) for lane in range(4)]
        return reduce(partial(add, builder), lanes)

    return numba.float32(numba.int64, numba.int64), generate


@inlined
def widen_panel(nibbles: Nibbles, pairs: int, panel: int, target: int) -> None:
    """Write the weights of a panel as bfloat16 ``[pairs, PANEL, 2]`` to the address `target`."""
    words = pairs // _PAIRS // nibbles.groups
    for group in range(nibbles.groups):
        place = panel * nibbles.groups + group
        _widen_group(
            nibbles.codes + place * words * PANEL * _WORD_BYTES,
            nibbles.scales + place * PANEL * 4,
            nibbles.zeros + place * PANEL,
            words,
            target + group * words * _PAIRS * PANEL_BYTES,
        )


@inlined
def multiply_codes(
    product: Product, nibbles: Nibbles, panel: int, inputs: Array, room: Array, sums: Array
) -> None:
    """Multiply a panel's codes with all rows.

    ``inputs [rows, groups]`` are the sums of the groups' inputs. `room` has place for a group's
    codes as bfloat16, `sums` for those of all rows twice.
    """
    words = product.pairs // _PAIRS // nibbles.groups
    rows, row_bytes = product.rows, 4 * product.pairs
    # The rows whose sums are in registers; the last one may be summed twice.
    size = 1 if rows == 1 else (rows + 1) // 2 * 2
    sums[: max(size, rows)] = 0.0
    in_tiles = product.unit == Unit.TILES and rows > 1
    products = address_of(sums) + TILE_ROWS * PANEL * 4
    for group in range(nibbles.groups):
        place = panel * nibbles.groups + group
        x = product.x + group * words * 2 * WORD
        codes = nibbles.codes + place * words * PANEL * _WORD_BYTES
        scales, zeros = nibbles.scales + place * PANEL * 4, nibbles.zeros + place * PANEL
        summed, summed_bytes = address_of(inputs) + 4 * group, 4 * nibbles.groups
        if in_tiles:
            weights = address_of(room)
            _write_codes(codes, words, weights)
            steps = words * WORD // TILE_NUMBERS
            sum_in_tiles(1, 0, x, row_bytes, steps, weights, weights, products)
            _add_scaled_group(rows, products, scales, zeros, summed, summed_bytes, address_of(sums))
        else:
            _add_group(
                size,
                x,
                rows - 1,
                row_bytes,
                codes,
                words,
                scales,
                zeros,
                summed,
                summed_bytes,
                address_of(sums),
            )
    vectors = min(PANEL, product.outputs - panel * PANEL) // LANES
    write_rows(product, 0, rows, panel, 0, vectors, sums)


@kernel
def multiply_nibbles(
    threads: int,
    unit: int,
    by_codes: bool,
    x: int,
    codes: int,
    scales: int,
    zeros: int,
    groups: int,
    bias: int,
    residual: int,
    out: int,
    rows: int,
    inputs: int,
    outputs: int,
) -> None:
    """Compute as `multiply` does, of weights in 4 bits.

    A group is a number of inputs that `WORD` divides. `by_codes` asks for the way of few rows, on a
    processor that multiplies pairs: there are at most `FEW_ROWS`, in tiles `TILE_ROWS`, and then
    `TILE_NUMBERS` divides a group.
    """
    block = rows if by_codes else find_block(unit, rows, inputs)
    units = (rows + block - 1) // block * ((outputs + PANEL - 1) // PANEL)
    share = find_share(threads, unit, rows, units)
    product = Product(x, 0, bias, residual, out, rows, inputs // 2, outputs, block, unit)
    nibbles = Nibbles(codes, scales, zeros, groups)
    args = (np.zeros(1, np.int64), share, units, by_codes, product, nibbles)
    run_on_team(threads, multiply_remaining_nibbles, args)


@team_part
def multiply_remaining_nibbles(
    counter: Array, share: int, units: int, by_codes: bool, product: Product, nibbles: Nibbles
) -> None:
    """Compute the next `share` of `units` until none is left; a unit is a panel of a block."""
    sums = make_lines(SUM_ROWS, PANEL, np.float32)
    if by_codes:
        multiply_few_rows(counter, share, units, product, nibbles, sums)
    else:
        multiply_widened(counter, share, units, product, nibbles, sums)


@inlined
def multiply_few_rows(
    counter: Array, share: int, units: int, product: Product, nibbles: Nibbles, sums: Array
) -> None:
    """Compute as `multiply_remaining_nibbles` by codes."""
    inputs = np.empty((product.rows, nibbles.groups), np.float32)
    words = product.pairs // _PAIRS // nibbles.groups
    for row in range(product.rows):
        for group in range(nibbles.groups):
            place = product.x + 4 * row * product.pairs + group * words * 2 * WORD
            inputs[row, group] = _sum_inputs(place, words)
    in_tiles = product.unit == Unit.TILES and product.rows > 1
    room = make_lines(words * _PAIRS if in_tiles else 0, PANEL, np.uint32)
    if in_tiles:
        shape_tiles(product.rows, 1)
    begin = take(counter, share)
    while begin < units:
        for panel in range(begin, min(begin + share, units)):
            multiply_codes(product, nibbles, panel, inputs, room, sums)
        begin = take(counter, share)
    if in_tiles:
        drop_tiles()


@inlined
def multiply_widened(
    counter: Array, share: int, units: int, product: Product, nibbles: Nibbles, sums: Array
) -> None:
    """Compute as `multiply_remaining_nibbles` by panels in bfloat16."""
    panels = (product.outputs + PANEL - 1) // PANEL
    weights = make_lines(product.pairs, PANEL, np.uint32)
    widened_rows = min(product.block, product.rows) if product.unit == Unit.FLOATS else 0
    widened = make_lines(widened_rows, 2 * product.pairs, np.float32)
    widened_from = -1
    begin = take(counter, share)
    while begin < units:
        for unit in range(begin, min(begin + share, units)):
            first, panel = unit // panels * product.block, unit % panels
            widen_panel(nibbles, product.pairs, panel, address_of(weights))
            # Where all weights would begin if this panel had its place among them.
            begin_at = address_of(weights) - panel * product.pairs * PANEL_BYTES
            one = Product(
                product.x,
                begin_at,
                product.bias,
                product.residual,
                product.out,
                product.rows,
                product.pairs,
                product.outputs,
                product.block,
                product.unit,
            )
            is_widened, widened_from = first == widened_from, first
            multiply_panel(one, first, panel, panel, is_widened, widened, sums)
        begin = take(counter, share)
    if product.unit == Unit.TILES:
        drop_tiles()
