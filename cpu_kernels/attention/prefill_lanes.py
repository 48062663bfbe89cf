"""The computation of a tile of prefill attention, as LLVM instructions.

A tile has a query row a lane, in up to `VECTORS` vectors; its arrays have room for `ROWS`. Factors
come in units (`lanes.add_product`): two bfloat16, or one float32.

The idea is FlashAttention's (Dao, arXiv 2307.08691) with queries in the lanes. A row's largest
score and the sum of its weights are then lanes of a vector, too, and no vector is ever summed
across. A lane's result depends neither on the other lanes nor on a tile's number of vectors.

Arguments are addresses: numba counts references of arrays, which costs as much as eight keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

from kvrelay.cpu_kernels.lanes import (
    BFLOATS,
    FLOATS,
    INTS,
    LANES,
    add,
    add_product,
    add_scaled,
    call,
    constant,
    exp2,
    larger,
    loop,
    multiply,
    splat,
    subtract,
)
from kvrelay.cpu_kernels.pair_memory import fetch, pointer
from kvrelay.cpu_kernels.processor import has_wide_registers

VECTORS: Final = 3
"""The most vectors of a tile."""
ROWS: Final = LANES * VECTORS
"""The most rows of a tile: rows of its arrays have this many units, or float32."""
OTHERS: Final = 8
"""The keys, or dimensions of values, that a tile is multiplied with at once."""
_SUMS: Final = 24 if has_wide_registers() else 6
"""The vectors of sums that registers hold, beside the factors.

`OTHERS` with more sums are multiplied in turns: the bits are the same."""
STEP: Final = 2
"""Depths are multiples of it: a turn of the loop has this many steps."""

_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_FLOAT = ir.FloatType()


def _words(builder: Any, addresses: Sequence[Any]) -> list[Any]:
    return [pointer(builder, address, _INT32) for address in addresses]


def _address(builder: Any, base: Any, index: Any, kind: Any) -> Any:
    """A pointer to `kind` at the `index`-th 32 bits of `base`."""
    return builder.bitcast(builder.gep(base, [index]), kind.as_pointer())


def _load(builder: Any, base: Any, index: Any, kind: Any) -> Any:
    return builder.load(_address(builder, base, index, kind), align=4)


def _store(builder: Any, value: Any, base: Any, index: Any) -> None:
    builder.store(value, _address(builder, base, index, value.type), align=4)


def _at(builder: Any, row: Any, vector: int) -> Any:
    """The index of a row's vector in an array of rows of `ROWS` units."""
    return builder.add(builder.mul(row, _INT64(ROWS)), _INT64(LANES * vector))


def _kinds_of(unit: Any) -> tuple[Any, Any]:
    """The LLVM types of a `unit`, a number of numba, and of a vector of them."""
    return (_FLOAT, FLOATS) if unit == numba.float32 else (_INT32, INTS)


def _add_products(
    builder: Any,
    totals: Sequence[Any],
    vectors: int,
    depth: Any,
    rows_at: Any,
    other_at: Any,
    begin_turn: Callable[[Any], None] = lambda _: None,
) -> Sequence[Any]:
    """Add ``rows[i][vector] * others[i][other]`` to flat ``totals[other][vector]``, i of `depth`.

    `rows_at(i, vector)` and `other_at(i, other)` load them; a turn of the loop has `STEP` i, and
    begins with `begin_turn`, once for all others.
    """

    def add_up(
        others: Sequence[int], begin_turn: Callable[[Any], None], totals: Sequence[Any]
    ) -> Sequence[Any]:
        def turn(index: Any, totals: Sequence[Any]) -> Sequence[Any]:
            sums = list(totals)
            begin_turn(index)
            for step in range(STEP):
                i = builder.add(builder.mul(index, _INT64(STEP)), _INT64(step))
                rows = [rows_at(i, vector) for vector in range(vectors)]
                for at, other in enumerate(others):
                    unit = other_at(i, other)
                    for vector in range(vectors):
                        place = at * vectors + vector
                        sums[place] = add_product(builder, sums[place], rows[vector], unit)
            return sums

        return loop(builder, builder.udiv(depth, _INT64(STEP)), totals, turn)

    sums: list[Any] = []
    for first in range(0, OTHERS, _SUMS // vectors):
        others = range(first, min(first + _SUMS // vectors, OTHERS))
        part = totals[first * vectors : others.stop * vectors]
        sums += add_up(others, (lambda _: None) if first else begin_turn, part)
    return sums


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def score_tile(
    _typing: Any,
    vectors: Any,
    unit: Any,
    queries: Any,
    keys: Any,
    depth: Any,
    scores: Any,
    ahead: Any,
    far: Any,
    line: Any,
) -> Any:
    """``scores[key] = queries . keys[key]`` for `OTHERS` keys and `vectors`, a constant, of rows.

    Arrays are given by address: ``queries [depth, ROWS]`` and ``keys [OTHERS, depth]`` of the type
    of `unit`, and ``scores [OTHERS, ROWS]``. Each turn of `STEP` units fetches a line from `ahead`
    and one from ``ahead + far`` on, `line` bytes further than the turn before.
    """
    if not isinstance(vectors, numba.types.IntegerLiteral):
        return None
    number, units = _kinds_of(unit)

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, _, query_at, key_at, length, score_at, following, offset, size = args
        queries, keys, scores = _words(builder, (query_at, key_at, score_at))
        width = vectors.literal_value
        starts = [builder.mul(length, _INT64(other)) for other in range(OTHERS)]

        bytes_ahead = pointer(builder, following, ir.IntType(8))

        def fetch_lines(turn: Any) -> None:
            place = builder.mul(turn, size)
            fetch(builder, bytes_ahead, place)
            fetch(builder, bytes_ahead, builder.add(place, offset))

        sums = _add_products(
            builder,
            [constant(0.0)] * (OTHERS * width),
            width,
            length,
            lambda i, vector: _load(builder, queries, _at(builder, i, vector), units),
            lambda i, other: _load(builder, keys, builder.add(starts[other], i), number),
            fetch_lines,
        )
        for at, total in enumerate(sums):
            _store(builder, total, scores, _at(builder, _INT64(at // width), at % width))
        return context.get_dummy_value()

    return numba.void(vectors, unit, *[numba.int64] * 7), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def value_tile(
    _typing: Any,
    vectors: Any,
    unit: Any,
    weights: Any,
    values: Any,
    depth: Any,
    width: Any,
    decay: Any,
    sums: Any,
) -> Any:
    """``sums[d] = sums[d] * decay + weights . values[:, d]`` for `OTHERS` dimensions.

    `vectors`, a constant, is the number of vectors of rows. Arrays are given by address: ``weights
    [depth, ROWS]`` and ``values [depth, width]`` of the type of `unit`, from the first dimension
    on. ``decay [ROWS]`` and ``sums [OTHERS, ROWS]`` are float32.
    """
    if not isinstance(vectors, numba.types.IntegerLiteral):
        return None
    number, units = _kinds_of(unit)

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, _, weight_at, value_at, length, stride, decay_at, sum_at = args
        weights, values, decay, sums = _words(builder, (weight_at, value_at, decay_at, sum_at))
        count = vectors.literal_value
        places = [
            _at(builder, _INT64(other), vector)
            for other in range(OTHERS)
            for vector in range(count)
        ]
        decays = [_load(builder, decay, _INT64(LANES * vector), FLOATS) for vector in range(count)]
        scaled = [
            multiply(builder, _load(builder, sums, place, FLOATS), decays[at % count])
            for at, place in enumerate(places)
        ]
        totals = _add_products(
            builder,
            scaled,
            count,
            length,
            lambda i, vector: _load(builder, weights, _at(builder, i, vector), units),
            lambda i, other: _load(
                builder, values, builder.add(builder.mul(i, stride), _INT64(other)), number
            ),
        )
        for place, total in zip(places, totals, strict=True):
            _store(builder, total, sums, place)
        return context.get_dummy_value()

    return numba.void(vectors, unit, *[numba.int64] * 6), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def hide_scores(
    _typing: Any, vectors: Any, scores: Any, count: Any, token: Any, positions: Any, window: Any
) -> Any:
    """Make scores minus infinity where a row does not see a token: later, or before its window.

    Arrays are given by address: ``scores [count, ROWS]`` of the tokens from `token` on, and the
    rows' ``positions [ROWS]`` int32. `vectors`, a constant, is the number of vectors of rows. There
    is at least one token.
    """
    if not isinstance(vectors, numba.types.IntegerLiteral):
        return None

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, score_at, count, token, position_at, window = args
        scores, positions = _words(builder, (score_at, position_at))
        ends = [_INT64(LANES * vector) for vector in range(vectors.literal_value)]
        lasts = [_load(builder, positions, end, INTS) for end in ends]
        size = splat(builder, builder.trunc(window, _INT32))
        befores = [builder.sub(last, size) for last in lasts]

        def hide(index: Any, _: Sequence[Any]) -> Sequence[Any]:
            one = splat(builder, builder.trunc(builder.add(token, index), _INT32))
            for vector, (last, before) in enumerate(zip(lasts, befores, strict=True)):
                place = _at(builder, index, vector)
                hidden = builder.or_(
                    builder.icmp_signed(">", one, last), builder.icmp_signed("<=", one, before)
                )
                score = _load(builder, scores, place, FLOATS)
                seen = builder.select(hidden, constant(float("-inf")), score)
                _store(builder, seen, scores, place)
            return ()

        loop(builder, count, (), hide)
        return context.get_dummy_value()

    return numba.void(vectors, *[numba.int64] * 5), generate


def _pairs(builder: Any, first: Any, second: Any) -> Any:
    """Two vectors of float32, rounded and interleaved as pairs of bfloat16."""
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    both = call(builder, name, BFLOATS, second, first)
    order = [half + LANES * side for half in range(LANES) for side in (0, 1)]
    order_vector = ir.Constant(ir.VectorType(_INT32, 2 * LANES), order)
    return builder.bitcast(builder.shuffle_vector(both, both, order_vector), INTS)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def weigh_block(
    _typing: Any,
    vectors: Any,
    unit: Any,
    scores: Any,
    count: Any,
    factor: Any,
    largest: Any,
    total: Any,
    decay: Any,
    weights: Any,
) -> Any:
    """A block's part of a softmax: Milakov and Gimelshein's, "online" (arXiv 1805.02867).

    ``largest [ROWS]`` is updated by the ``scores [count, ROWS]``. ``decay [ROWS]`` becomes the
    factor of former weights for that. ``total [ROWS]`` is multiplied by it before the new weights'
    sum is added. A weight is ``2 ** (factor * (score - largest))``. `count` is even. `weights` are
    rows of the type of `unit`, and may be the scores themselves. All arrays are addresses;
    `vectors`, a constant, is the number of vectors of rows.
    """
    if not isinstance(vectors, numba.types.IntegerLiteral):
        return None

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, _, score_at, count, factor, largest_at, total_at, decay_at, weight_at = args
        addresses = (score_at, largest_at, total_at, decay_at, weight_at)
        score_data, largest_data, total_data, decay_data, weight_data = _words(builder, addresses)
        halves, slope = builder.udiv(count, _INT64(2)), splat(builder, factor)
        width = vectors.literal_value
        ends = [_INT64(LANES * vector) for vector in range(width)]
        paired = unit == numba.uint32

        def row(index: Any, side: int) -> Any:
            return builder.add(builder.mul(index, _INT64(2)), _INT64(side))

        def load_scores(index: Any, side: int) -> list[Any]:
            at = row(index, side)
            return [
                _load(builder, score_data, _at(builder, at, vector), FLOATS)
                for vector in range(width)
            ]

        def find_largest(index: Any, found: Sequence[Any]) -> Sequence[Any]:
            both = load_scores(index, 0) + load_scores(index, 1)
            return [larger(builder, score, most) for score, most in zip(both, found, strict=True)]

        old = [_load(builder, largest_data, end, FLOATS) for end in ends]
        found = loop(builder, halves, old * 2, find_largest)
        new = [larger(builder, *pair) for pair in zip(found[:width], found[width:], strict=True)]
        shifts = [builder.fneg(multiply(builder, most, slope)) for most in new]
        decays = [
            exp2(builder, multiply(builder, subtract(builder, before, most), slope))
            for before, most in zip(old, new, strict=True)
        ]

        def weigh(index: Any, sums: Sequence[Any]) -> Sequence[Any]:
            first, second = (
                [
                    exp2(builder, add_scaled(builder, score, slope, shift))
                    for score, shift in zip(load_scores(index, side), shifts, strict=True)
                ]
                for side in (0, 1)
            )
            for vector in range(width):
                if paired:
                    pairs = _pairs(builder, first[vector], second[vector])
                    _store(builder, pairs, weight_data, _at(builder, index, vector))
                    continue
                for side, one in enumerate((first, second)):
                    at = _at(builder, row(index, side), vector)
                    _store(builder, one[vector], weight_data, at)
            return [
                add(builder, total, weight)
                for total, weight in zip(sums, first + second, strict=True)
            ]

        sums = loop(builder, halves, [constant(0.0)] * (2 * width), weigh)
        for vector, end in enumerate(ends):
            _store(builder, new[vector], largest_data, end)
            _store(builder, decays[vector], decay_data, end)
            former = multiply(builder, _load(builder, total_data, end, FLOATS), decays[vector])
            added = add(builder, sums[vector], sums[width + vector])
            _store(builder, add(builder, former, added), total_data, end)
        return context.get_dummy_value()

    place = numba.int64
    kinds = (place, place, numba.float32, place, place, place, place)
    return numba.void(vectors, unit, *kinds), generate
