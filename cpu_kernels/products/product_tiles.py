"""The computation of `product` by the processor's tiles, as LLVM instructions.

Arguments are addresses and numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numba
from numba.extending import intrinsic

from kvrelay.cpu_kernels.lanes import (
    BFLOATS,
    FLOATS,
    ask_for_line,
    call,
    loop,
    switch,
    times,
)
from kvrelay.cpu_kernels.pair_memory import BITS, add_widened, pointer
from kvrelay.cpu_kernels.products.tiles import (
    INT8,
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

ASKED_LINES: Final = (32, 16, 8, 0)
"""The cache lines that `sum_in_tiles` may fetch a step: all or part of its weights, or none."""


@intrinsic  # type: ignore[untyped-decorator]
def sum_in_tiles(
    _typing: Any,
    halves: Any,
    lines: Any,
    x: Any,
    row_bytes: Any,
    steps: Any,
    weights: Any,
    ahead: Any,
    sums: Any,
) -> Any:
    """``sums [32, 32] = x W^T`` of float32, for 32 outputs.

    Arrays are given by address: rows of `x`, `row_bytes` apart, ``weights [steps * 16, 32, 2]`` and
    `sums`. The rows are those of tile 4, and with two `halves` of tile 5, which begins 16 rows
    later. Each of the `steps`, of 32 inputs, fetches `lines` cache lines (one of `ASKED_LINES`)
    from `ahead` on. Unless they are all of a step's weights, they go to the second cache, as the
    first one has no room.
    """

    def generate(builder: Any, *args: Any) -> None:
        halves, lines, x, row_bytes, steps, weights, ahead, sums = args
        second_x = builder.add(x, times(builder, row_bytes, TILE_ROWS))
        stride = INT64(2 * TILE_BYTES)

        def add_up(count: int, asked: int) -> None:
            def turn(index: Any, _: Sequence[Any]) -> Sequence[Any]:
                panel = builder.add(weights, times(builder, index, 2 * TILE_ROWS * TILE_BYTES))
                inputs = times(builder, index, TILE_BYTES)
                following = builder.add(ahead, times(builder, index, asked * TILE_BYTES))
                load_tile(builder, 6, panel, stride)
                load_tile(builder, 7, on(builder, panel, TILE_BYTES), stride)
                for half, begin in enumerate((x, second_x)[:count]):
                    load_tile(builder, 4 + half, builder.add(begin, inputs), row_bytes)
                    for side in (0, 1):
                        tile_call(builder, "tdpbf16ps", 2 * half + side, 4 + half, 6 + side)
                for line in range(asked):
                    place = on(builder, following, line * TILE_BYTES)
                    asked_line = pointer(builder, place, INT8)
                    ask_for_line(builder, asked_line, second_cache=asked < max(ASKED_LINES))
                return ()

            totals = [(half, side) for half in range(count) for side in (0, 1)]
            for half, side in totals:
                tile_call(builder, "tilezero", 2 * half + side)
            loop(builder, steps, (), turn)
            for half, side in totals:
                place = on(builder, sums, (half * 2 * TILE_ROWS + side) * TILE_BYTES)
                store_tile(builder, 2 * half + side, place, stride)

        switch(
            builder,
            builder.add(times(builder, halves, 2 * max(ASKED_LINES)), lines),
            [
                (2 * max(ASKED_LINES) * count + asked, partial(add_up, count, asked))
                for count in (1, 2)
                for asked in ASKED_LINES
            ],
        )

    return numba.void(*[numba.int64] * 8), emit_tiles(generate)


@intrinsic  # type: ignore[untyped-decorator]
def round_sums(
    _typing: Any, sums: Any, rows: Any, bias: Any, residual: Any, out: Any, stride: Any
) -> Any:
    """Round the `rows` of ``sums [rows, 32]``, with bias and residual, to bfloat16.

    Arrays are given by address, the residual and `out` by that of their first rows, which are
    `stride` bytes apart. An address of 0 means no bias, or no residual.
    """

    def generate(builder: Any, *args: Any) -> None:
        sums, rows, bias, residual, out, stride = args

        def write(index: Any, _: Sequence[Any]) -> Sequence[Any]:
            source = builder.add(sums, times(builder, index, 2 * TILE_BYTES))
            totals: Sequence[Any] = [
                builder.load(pointer(builder, on(builder, source, side), FLOATS), align=4)
                for side in (0, TILE_BYTES)
            ]
            row = builder.mul(index, stride)
            nothing = builder.icmp_signed("==", residual, INT64(0))
            added = builder.select(nothing, INT64(0), builder.add(residual, row))
            for addend in (bias, added):
                totals = add_widened(builder, totals, addend)
            first, second = totals
            name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
            both = builder.bitcast(call(builder, name, BFLOATS, second, first), BITS)
            builder.store(both, pointer(builder, builder.add(out, row), BITS), align=2)
            return ()

        loop(builder, rows, (), write)

    return numba.void(*[numba.int64] * 6), emit_tiles(generate)


@intrinsic  # type: ignore[untyped-decorator]
def fetch_to_write(_typing: Any, begin: Any, stride: Any, rows: Any) -> Any:
    """Fetch `rows` cache lines from an address on, `stride` bytes apart, to write them."""

    def generate(builder: Any, begin: Any, stride: Any, rows: Any) -> None:
        ask_for_lines(builder, begin, stride, rows, to_write=True)

    return numba.void(*[numba.int64] * 3), emit_tiles(generate)
