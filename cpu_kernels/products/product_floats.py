"""Products by float32 alone, as LLVM instructions.

A processor that multiplies only float32 (AVX2) computes `product` so, all do `product_float32`.

bfloat16 is the upper half of a float32: weights are widened as they are used, inputs once for all
panels. Arguments are addresses and numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

from kvrelay.cpu_kernels.lanes import (
    FLOATS,
    INTS,
    LANES,
    LINE_BYTES,
    add_scaled,
    ask_for_line,
    constant,
    loop,
    splat,
    switch,
    times,
)
from kvrelay.cpu_kernels.pair_memory import FLOAT, pointer
from kvrelay.cpu_kernels.processor import has_wide_registers

FLOAT_ROWS: Final = 12 if has_wide_registers() else 6
"""The most rows of a tile. AVX512 has registers for 24 sums of 16 lanes: a whole panel's.

AVX2 has them for 12 sums of 8 lanes: those of half a panel.
"""
WHOLE_ROWS: Final = 12 if has_wide_registers() else 3
"""The most rows that have sums for a whole panel, in as many registers."""
WIDENED: Final = 4
"""The numbers that are widened at a time: inputs are a multiple of it."""
_STEP: Final = 2
"""The pairs of inputs in a turn of the loop."""
PANEL_BYTES: Final = 2 * LINE_BYTES
"""The bytes of a panel's weights for one pair of inputs, and of a row of its sums."""
LINES: Final = tuple(_STEP * PANEL_BYTES // LINE_BYTES // part for part in (1, 2))
"""The cache lines that `sum_floats` may fetch in a turn: its weights', half of them, or 0."""

_INT8, _INT64 = ir.IntType(8), ir.IntType(64)
_NARROW, _WIDE = (ir.VectorType(ir.IntType(bits), WIDENED) for bits in (16, 32))


_Load: TypeAlias = Callable[[Any, Any, int, range], Sequence[Sequence[Any]]]
"""Code that loads vectors of a panel's weights as float32: of a pair's first input, and its second.

It is given the builder, the address of a turn's weights, the pair's place there and the vectors.
"""


def _load_widened(builder: Any, panel: Any, pair: int, vectors: range) -> Sequence[Sequence[Any]]:
    """Load weights in bfloat16, ``[pairs, 32, 2]``."""
    upper = ir.Constant(INTS, [0xFFFF0000] * LANES)
    sixteen = ir.Constant(INTS, [16] * LANES)
    places = [pair * PANEL_BYTES + vector * LINE_BYTES for vector in vectors]
    bits = [builder.load(pointer(builder, panel, INTS, place), align=4) for place in places]
    sides = (
        [builder.shl(one, sixteen) for one in bits],
        [builder.and_(one, upper) for one in bits],
    )
    return [[builder.bitcast(one, FLOATS) for one in side] for side in sides]


def _load_floats(builder: Any, panel: Any, pair: int, vectors: range) -> Sequence[Sequence[Any]]:
    """Load weights in float32, ``[2 * pairs, 32]``."""
    return [
        [
            builder.load(
                pointer(builder, panel, FLOATS, row * PANEL_BYTES + vector * LINE_BYTES), align=4
            )
            for vector in vectors
        ]
        for row in (2 * pair, 2 * pair + 1)
    ]


def _add_up(
    builder: Any, args: Sequence[Any], load: _Load, pair_bytes: int, count: int, asked: int
) -> None:
    """Generate `sum_floats` of `count` rows with so many `asked` lines.

    A panel's weights of a pair of inputs are `pair_bytes`, which `load` reads.
    """
    _, _, x, pairs, weights, ahead, sums = args
    vectors = range(2 if count <= WHOLE_ROWS else 1)
    row_bytes = times(builder, pairs, 8)
    begins = [builder.add(x, times(builder, row_bytes, row)) for row in range(count)]

    def turn(index: Any, totals: Sequence[Any]) -> Sequence[Any]:
        results = list(totals)
        panel = builder.add(weights, times(builder, index, _STEP * pair_bytes))
        inputs = times(builder, index, _STEP * 8)
        following = builder.add(ahead, times(builder, index, asked * LINE_BYTES))
        for line in range(asked):
            ask_for_line(builder, pointer(builder, following, _INT8, line * LINE_BYTES))
        for step in range(_STEP):
            for side, wide in enumerate(load(builder, panel, step, vectors)):
                for row, begin in enumerate(begins):
                    place = builder.add(begin, inputs)
                    number = builder.load(
                        pointer(builder, place, FLOAT, step * 8 + side * 4), align=4
                    )
                    for at, one in enumerate(wide):
                        total = row * len(vectors) + at
                        results[total] = add_scaled(
                            builder, one, splat(builder, number), results[total]
                        )
        return results

    nothing = [constant(0.0)] * (count * len(vectors))
    totals = loop(builder, builder.udiv(pairs, _INT64(_STEP)), nothing, turn)
    for at, total in enumerate(totals):
        row, vector = divmod(at, len(vectors))
        place = row * PANEL_BYTES + vector * LINE_BYTES
        builder.store(total, pointer(builder, sums, FLOATS, place), align=4)


@intrinsic  # type: ignore[untyped-decorator]
def sum_floats(
    _typing: Any,
    rows: Any,
    lines: Any,
    x: Any,
    pairs: Any,
    weights: Any,
    ahead: Any,
    sums: Any,
) -> Any:
    """``sums [rows, 32] = x W^T``, for up to `WHOLE_ROWS` rows; for more rows, half a panel.

    A panel's other half begins a line further on, in `weights` and in `sums`.

    ``x [rows, 2 * pairs]`` and `sums` are float32, ``weights [pairs, 32, 2]`` bfloat16. Each turn
    of `_STEP` pairs fetches `lines` cache lines (one of `LINES`, or 0) from `ahead` on. Each sum
    adds its products from the first to the last, each rounded once.
    """

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        step = LINES[0] + 1
        cases = [
            (
                count * step + asked,
                partial(_add_up, builder, args, _load_widened, PANEL_BYTES, count, asked),
            )
            for count in range(1, FLOAT_ROWS + 1)
            for asked in (*LINES, 0)
        ]
        switch(builder, builder.add(times(builder, args[0], step), args[1]), cases)
        return context.get_dummy_value()

    return numba.void(*[numba.int64] * 7), generate


@intrinsic  # type: ignore[untyped-decorator]
def sum_float32(_typing: Any, rows: Any, x: Any, pairs: Any, weights: Any, sums: Any) -> Any:
    """Add up as `sum_floats`, with ``weights [2 * pairs, 32]`` in float32.

    No lines are asked for.
    """

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        rows, x, pairs, weights, sums = args
        nothing = _INT64(0)
        whole = (rows, nothing, x, pairs, weights, nothing, sums)
        cases = [
            (count, partial(_add_up, builder, whole, _load_floats, 2 * PANEL_BYTES, count, 0))
            for count in range(1, FLOAT_ROWS + 1)
        ]
        switch(builder, rows, cases)
        return context.get_dummy_value()

    return numba.void(*[numba.int64] * 5), generate


@intrinsic  # type: ignore[untyped-decorator]
def widen_floats(_typing: Any, source: Any, count: Any, to: Any) -> Any:
    """Widen `count` numbers, a multiple of `WIDENED`, from bfloat16 to float32."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        source, count, to = args

        def widen(index: Any, _: Sequence[Any]) -> Sequence[Any]:
            begin = builder.add(source, times(builder, index, 2 * WIDENED))
            bits = builder.zext(builder.load(pointer(builder, begin, _NARROW), align=2), _WIDE)
            target = builder.add(to, times(builder, index, 4 * WIDENED))
            wide = builder.shl(bits, ir.Constant(_WIDE, [16] * WIDENED))
            builder.store(wide, pointer(builder, target, _WIDE), align=4)
            return ()

        loop(builder, builder.udiv(count, _INT64(WIDENED)), (), widen)
        return context.get_dummy_value()

    return numba.void(*[numba.int64] * 3), generate
