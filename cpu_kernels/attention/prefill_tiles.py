"""The computation of prefill attention by the processor's tiles, as LLVM instructions.

The arrays are those of `prefill_lanes`, but `transpose_units` gives values a row a dimension.
Arguments are addresses and numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

from kvrelay.cpu_kernels.lanes import FLOATS, INTS, LANES, loop, multiply, switch, times
from kvrelay.cpu_kernels.pair_memory import pointer
from kvrelay.cpu_kernels.products.tiles import (
    INT64,
    TILE_BYTES,
    TILE_ROWS,
    ask_for_lines,
    emit_tiles,
    load_tile,
    on,
    store_tile,
    tile_call,
)


@intrinsic  # type: ignore[untyped-decorator]
def fetch_lines(_typing: Any, begin: Any, lines: Any) -> Any:
    """Fetch `lines` lines from an address on into the second cache."""

    def generate(builder: Any, begin: Any, lines: Any) -> None:
        ask_for_lines(builder, begin, INT64(TILE_BYTES), lines, second_cache=True)

    return numba.void(*[numba.int64] * 2), emit_tiles(generate)


def _add_tiles(
    builder: Any,
    vectors: int,
    steps: Any,
    rows: Sequence[Any],
    row_bytes: Any,
    columns: Any,
    column_bytes: Any,
) -> None:
    """``tile[half * vectors + vector] += rows[half] . columns[vector]``; tiles 6 and 7 are used up.

    Arrays are given by address: two of ``rows [16, steps * 32]``, and ``columns [steps * 16, ROWS,
    2]``. `row_bytes` and `column_bytes` are the distances of their rows.
    """

    def turn(index: Any, _: Sequence[Any]) -> Sequence[Any]:
        numbers = times(builder, index, TILE_BYTES)
        pairs = builder.add(columns, builder.mul(times(builder, index, TILE_ROWS), column_bytes))
        for half, begin in enumerate(rows):
            load_tile(builder, 6, builder.add(begin, numbers), row_bytes)
            for vector in range(vectors):
                load_tile(builder, 7, on(builder, pairs, vector * TILE_BYTES), column_bytes)
                tile_call(builder, "tdpbf16ps", half * vectors + vector, 6, 7)
        return ()

    loop(builder, steps, (), turn)


def _places(builder: Any, begin: Any, stride: Any, vectors: int) -> list[tuple[int, Any]]:
    """The addresses of these tiles, from `begin` on."""
    rows = [begin, builder.add(begin, times(builder, stride, TILE_ROWS))]
    return [
        (half * vectors + vector, on(builder, row, vector * TILE_BYTES))
        for half, row in enumerate(rows)
        for vector in range(vectors)
    ]


def _for_each_width(builder: Any, vectors: Any, generate: Callable[[int], None]) -> None:
    """Emit code for each number of `vectors`, one to three."""
    switch(builder, vectors, [(count, partial(generate, count)) for count in (1, 2, 3)])


@intrinsic  # type: ignore[untyped-decorator]
def scores_in_tiles(
    _typing: Any,
    vectors: Any,
    keys: Any,
    more_keys: Any,
    key_bytes: Any,
    queries: Any,
    row_bytes: Any,
    steps: Any,
    scores: Any,
) -> Any:
    """``scores[key] = queries . keys[key]`` for two times 16 keys and up to three vectors of rows.

    Arrays are given by address: two groups of keys, `key_bytes` apart, ``queries [steps * 16, ROWS,
    2]`` and ``scores [32, ROWS]``. Rows of the last two are `row_bytes` apart.
    """

    def generate(builder: Any, *args: Any) -> None:
        vectors, keys, more_keys, key_bytes, queries, row_bytes, steps, scores = args

        def score(count: int) -> None:
            for tile in range(2 * count):
                tile_call(builder, "tilezero", tile)
            both = (keys, more_keys)
            _add_tiles(builder, count, steps, both, key_bytes, queries, row_bytes)
            for tile, place in _places(builder, scores, row_bytes, count):
                store_tile(builder, tile, place, row_bytes)

        _for_each_width(builder, vectors, score)

    return numba.void(*[numba.int64] * 8), emit_tiles(generate)


@intrinsic  # type: ignore[untyped-decorator]
def values_in_tiles(
    _typing: Any,
    vectors: Any,
    values: Any,
    value_bytes: Any,
    weights: Any,
    row_bytes: Any,
    steps: Any,
    decay: Any,
    sums: Any,
) -> Any:
    """``sums[d] = sums[d] * decay + weights . values[d]`` for 32 dimensions.

    There are up to three vectors of rows. Arrays are given by address: ``values [32, steps * 32]``,
    ``weights [steps * 16, ROWS, 2]``, ``decay [ROWS]`` and ``sums [32, ROWS]``. Rows of values are
    `value_bytes` apart, those of weights and sums `row_bytes`.
    """

    def generate(builder: Any, *args: Any) -> None:
        vectors, values, value_bytes, weights, row_bytes, steps, decay, sums = args

        def add_values(count: int) -> None:
            factors = [
                builder.load(pointer(builder, on(builder, decay, at * TILE_BYTES), FLOATS), align=4)
                for at in range(count)
            ]

            def scale(index: Any, _: Sequence[Any]) -> Sequence[Any]:
                row = builder.add(sums, builder.mul(index, row_bytes))
                for at, factor in enumerate(factors):
                    place = pointer(builder, on(builder, row, at * TILE_BYTES), FLOATS)
                    scaled = multiply(builder, builder.load(place, align=4), factor)
                    builder.store(scaled, place, align=4)
                return ()

            loop(builder, INT64(2 * TILE_ROWS), (), scale)
            places = _places(builder, sums, row_bytes, count)
            for tile, place in places:
                load_tile(builder, tile, place, row_bytes)
            rows = (values, builder.add(values, times(builder, value_bytes, TILE_ROWS)))
            _add_tiles(builder, count, steps, rows, value_bytes, weights, row_bytes)
            for tile, place in places:
                store_tile(builder, tile, place, row_bytes)

        _for_each_width(builder, vectors, add_values)

    return numba.void(*[numba.int64] * 8), emit_tiles(generate)


@intrinsic  # type: ignore[untyped-decorator]
def transpose_units(_typing: Any, source: Any, rows: Any, columns: Any, target: Any) -> Any:
    """``target [columns, rows] = source [rows, columns]`` of 4 bytes each, by their addresses.

    `rows` and `columns` are multiples of 16.
    """

    def generate(builder: Any, *args: Any) -> None:
        source, rows, columns, target = args

        def row_blocks(outer: Any, _: Sequence[Any]) -> Sequence[Any]:
            def column_blocks(inner: Any, _: Sequence[Any]) -> Sequence[Any]:
                first, second = times(builder, outer, LANES), times(builder, inner, LANES)

                def place(data: Any, length: Any, row: Any, column: Any, at: int) -> Any:
                    index = builder.add(builder.mul(on(builder, row, at), length), column)
                    begin = builder.add(data, times(builder, index, 4))
                    return pointer(builder, begin, INTS)

                block = [
                    builder.load(place(source, columns, first, second, at), align=4)
                    for at in range(LANES)
                ]
                for at, vector in enumerate(_transposed(builder, block)):
                    builder.store(vector, place(target, rows, second, first, at), align=4)
                return ()

            loop(builder, builder.udiv(columns, INT64(LANES)), (), column_blocks)
            return ()

        loop(builder, builder.udiv(rows, INT64(LANES)), (), row_blocks)

    return numba.void(*[numba.int64] * 4), emit_tiles(generate)


def _transposed(builder: Any, block: Sequence[Any]) -> list[Any]:
    """Transpose a block of 16 vectors of 16 lanes.

    In each of four rounds, vectors `distance` apart exchange runs of `distance` lanes.
    """
    vectors, int32 = list(block), ir.IntType(32)
    for distance in (1, 2, 4, 8):
        low, high = (
            ir.Constant(
                ir.VectorType(int32, LANES),
                [
                    (lane & ~distance) + side * distance + (LANES if lane & distance else 0)
                    for lane in range(LANES)
                ],
            )
            for side in (0, 1)
        )
        for at in (at for at in range(LANES) if not at & distance):
            pair = vectors[at], vectors[at + distance]
            vectors[at] = builder.shuffle_vector(*pair, low)
            vectors[at + distance] = builder.shuffle_vector(*pair, high)
    return vectors
