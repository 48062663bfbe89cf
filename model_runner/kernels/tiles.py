"""Matrix products by tiles of bfloat16 that the processor multiplies as a whole: AMX.

A tile has up to 16 rows of 64 bytes. The one instruction that multiplies is

    C [M, 16] += A [M, 32] B [32, 16]

of float32 sums, rows of bfloat16, and pairs of bfloat16: ``B`` has 16 rows of ``[16, 2]``, which is
how `product` keeps weights and `prefill_attention` queries and weights of values. A sum adds its
products one after the other, from the first to the last, so a row's result depends on no other row.
Numbers too small for a normal exponent count as 0.

A process asks the system once before it uses tiles (`may_use_tiles`). A thread says how many rows
its tiles have (`shape_tiles`) before it multiplies, and gives them up afterwards (`drop_tiles`):
else the system saves 8 KiB whenever it takes the thread's core away. Code for tiles is compiled
wherever the processor has them, because compiled kernels are kept by processor.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Final

import llvmlite.binding  # type: ignore[import-untyped]
import numba
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from kvrelay.model_runner.kernels.lanes import BFLOATS, FLOATS, INTS, LANES, add, call, loop, multiply
from kvrelay.model_runner.kernels.pair_memory import pointer

logger = logging.getLogger(__name__)

TILE_ROWS: Final = 16
TILE_NUMBERS: Final = 32
"""bfloat16 in a tile's row."""
LINES: Final = (32, 16, 8, 0)
"""Of the cache that `sum_in_tiles` may ask for in a step: a step's weights, a part of them, or none."""
_ROW_BYTES: Final = 64
_ARCH_PRCTL, _ASK, _TILE_DATA = 158, 0x1023, 18
"""The system call of x86-64, its order to ask for a part of the processor's state, and which."""

_INT8, _INT16, _INT64 = (ir.IntType(bits) for bits in (8, 16, 64))
_NOTHING = ir.VoidType()
_HALVES: Final = ir.VectorType(_INT16, LANES)
_BOTH: Final = ir.VectorType(_INT16, 2 * LANES)


def has_tiles() -> bool:
    """Whether this processor has tiles of bfloat16."""
    return bool(llvmlite.binding.get_host_cpu_features().get("amx-bf16"))


@cache
def may_use_tiles() -> bool:
    """Whether the processor has them, and the system lets this process use them."""
    if not has_tiles() or platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_ARCH_PRCTL, _ASK, _TILE_DATA) == 0:
        return True
    error = os.strerror(ctypes.get_errno())
    logger.warning("the system does not let this process use AMX, so it is slower: %s", error)
    return False


def _emit(generate: Callable[..., None]) -> Callable[..., Any]:
    """Generates code where the processor has tiles; elsewhere nobody comes to it."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if has_tiles():
            generate(builder, *args)
        return context.get_dummy_value()

    return emit


def _tile_call(builder: Any, name: str, *args: Any) -> None:
    """An instruction of AMX; Python's numbers are tiles."""
    values = [_INT8(arg) if isinstance(arg, int) else arg for arg in args]
    call(builder, f"llvm.x86.{name}", _NOTHING, *values)


def _load(builder: Any, tile: int, address: Any, stride: Any) -> None:
    _tile_call(builder, "tileloadd64", tile, pointer(builder, address, _INT8), stride)


def _store(builder: Any, tile: int, address: Any, stride: Any) -> None:
    _tile_call(builder, "tilestored64", tile, pointer(builder, address, _INT8), stride)


def _ask(builder: Any, address: Any, *, to_write: bool = False, second_cache: bool = False) -> None:
    """Ask for the cache line at an address; any is harmless."""
    byte, int32 = _INT8.as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(_NOTHING, [byte, int32, int32, int32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
    which, data_not_code = int32(2 if second_cache else 3), int32(1)
    line = pointer(builder, address, _INT8)
    builder.call(function, [line, int32(int(to_write)), which, data_not_code])


def _on(builder: Any, address: Any, bytes_on: int) -> Any:
    return builder.add(address, _INT64(bytes_on))


def _times(builder: Any, number: Any, factor: int) -> Any:
    return builder.mul(number, _INT64(factor))


@intrinsic  # type: ignore[untyped-decorator]
def shape_tiles(_typing: Any, first: Any, second: Any) -> Any:
    """Gives this thread tiles: 0, 1 and 4 of `first` rows, 2, 3 and 5 of `second`, others of 16.

    Both are 1 to 16.
    """

    def generate(builder: Any, *rows: Any) -> None:
        first, second = (builder.trunc(count, _INT8) for count in rows)
        room = cgutils.alloca_once(builder, ir.ArrayType(_INT8, 64))
        begin = builder.bitcast(room, _INT8.as_pointer())
        cgutils.memset(builder, begin, _INT64(64), 0)

        def write(at: int, value: Any) -> None:
            place = builder.gep(begin, [_INT64(at)])
            builder.store(value, builder.bitcast(place, value.type.as_pointer()), align=1)

        write(0, _INT8(1))  # the palette
        whole = _INT8(TILE_ROWS)
        for tile, count in enumerate((first, first, second, second, first, second, whole, whole)):
            write(16 + 2 * tile, _INT16(_ROW_BYTES))
            write(48 + tile, count)
        _tile_call(builder, "ldtilecfg", begin)

    return numba.void(numba.int64, numba.int64), _emit(generate)


@intrinsic  # type: ignore[untyped-decorator]
def drop_tiles(_typing: Any) -> Any:
    """Gives this thread's tiles up."""
    return numba.void(), _emit(lambda builder: _tile_call(builder, "tilerelease"))


def _switch(builder: Any, key: Any, cases: Sequence[tuple[int, Callable[[], None]]]) -> None:
    """Generates each case's code, for its key; there are no others."""
    bad, after = builder.append_basic_block("bad"), builder.append_basic_block("done")
    switch = builder.switch(key, bad)
    for number, generate in cases:
        block = builder.append_basic_block(f"case_{number}")
        switch.add_case(_INT64(number), block)
        builder.position_at_end(block)
        generate()
        builder.branch(after)
    builder.position_at_end(bad)
    builder.unreachable()
    builder.position_at_end(after)


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

    Addresses of rows of `x`, `row_bytes` apart, of ``weights [steps * 16, 32, 2]`` and of `sums`. The
    rows are those of tile 4, and with two `halves` of tile 5, which begins 16 rows later. In each
    of the `steps`, which have 32 inputs, so many `lines` of the cache are asked for from `ahead` on,
    one after the other: one of `LINES`.
    """

    def generate(builder: Any, *args: Any) -> None:
        halves, lines, x, row_bytes, steps, weights, ahead, sums = args
        second_x = builder.add(x, _times(builder, row_bytes, TILE_ROWS))
        stride = _INT64(2 * _ROW_BYTES)

        def add_up(count: int, asked: int) -> None:
            def turn(index: Any, _: Sequence[Any]) -> Sequence[Any]:
                panel = builder.add(weights, _times(builder, index, 2 * TILE_ROWS * _ROW_BYTES))
                inputs = _times(builder, index, _ROW_BYTES)
                following = builder.add(ahead, _times(builder, index, asked * _ROW_BYTES))
                _load(builder, 6, panel, stride)
                _load(builder, 7, _on(builder, panel, _ROW_BYTES), stride)
                for half, begin in enumerate((x, second_x)[:count]):
                    _load(builder, 4 + half, builder.add(begin, inputs), row_bytes)
                    for side in (0, 1):
                        _tile_call(builder, "tdpbf16ps", 2 * half + side, 4 + half, 6 + side)
                for line in range(asked):
                    place = _on(builder, following, line * _ROW_BYTES)
                    _ask(builder, place, second_cache=asked < max(LINES))
                return ()

            totals = [(half, side) for half in range(count) for side in (0, 1)]
            for half, side in totals:
                _tile_call(builder, "tilezero", 2 * half + side)
            loop(builder, steps, (), turn)
            for half, side in totals:
                place = _on(builder, sums, (half * 2 * TILE_ROWS + side) * _ROW_BYTES)
                _store(builder, 2 * half + side, place, stride)

        _switch(
            builder,
            builder.add(_times(builder, halves, 2 * max(LINES)), lines),
            [
                (2 * max(LINES) * count + asked, partial(add_up, count, asked))
                for count in (1, 2)
                for asked in LINES
            ],
        )

    return numba.void(*[numba.int64] * 8), _emit(generate)


@intrinsic  # type: ignore[untyped-decorator]
def round_sums(
    _typing: Any, sums: Any, rows: Any, bias: Any, residual: Any, out: Any, stride: Any
) -> Any:
    """Round the `rows` of ``sums [rows, 32]``, with bias and residual, to bfloat16.

    Addresses of `sums`, of a bias and of the first rows of a residual and of `out`, whose rows are
    `stride` bytes apart; 0 for no bias and no residual.
    """

    def generate(builder: Any, *args: Any) -> None:
        sums, rows, bias, residual, out, stride = args

        def widen(address: Any) -> Any:
            bits = builder.load(pointer(builder, address, _HALVES), align=2)
            wide = builder.shl(builder.zext(bits, INTS), ir.Constant(INTS, [16] * LANES))
            return builder.bitcast(wide, FLOATS)

        def plus(totals: Sequence[Any], address: Any) -> Sequence[Any]:
            before = builder.block
            with builder.if_then(builder.icmp_signed("!=", address, _INT64(0))):
                added = [
                    add(builder, total, widen(_on(builder, address, side * 2 * LANES)))
                    for side, total in enumerate(totals)
                ]
                end = builder.block
            phis = [builder.phi(FLOATS) for _ in totals]
            for phi, total, new in zip(phis, totals, added, strict=True):
                phi.add_incoming(total, before)
                phi.add_incoming(new, end)
            return phis

        def write(index: Any, _: Sequence[Any]) -> Sequence[Any]:
            source = builder.add(sums, _times(builder, index, 2 * _ROW_BYTES))
            totals: Sequence[Any] = [
                builder.load(pointer(builder, _on(builder, source, side), FLOATS), align=4)
                for side in (0, _ROW_BYTES)
            ]
            row = builder.mul(index, stride)
            nothing = builder.icmp_signed("==", residual, _INT64(0))
            added = builder.select(nothing, _INT64(0), builder.add(residual, row))
            first, second = plus(plus(totals, bias), added)
            name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
            both = builder.bitcast(call(builder, name, BFLOATS, second, first), _BOTH)
            builder.store(both, pointer(builder, builder.add(out, row), _BOTH), align=2)
            return ()

        loop(builder, rows, (), write)

    return numba.void(*[numba.int64] * 6), _emit(generate)


@intrinsic  # type: ignore[untyped-decorator]
def fetch_to_write(_typing: Any, begin: Any, stride: Any, rows: Any) -> Any:
    """Ask for `rows` lines of the cache, `stride` bytes apart, that are going to be written."""

    def generate(builder: Any, *args: Any) -> None:
        begin, stride, rows = args

        def ask(index: Any, _: Sequence[Any]) -> Sequence[Any]:
            place = builder.add(begin, builder.mul(index, stride))
            _ask(builder, place, to_write=True)
            return ()

        loop(builder, rows, (), ask)

    return numba.void(*[numba.int64] * 3), _emit(generate)


@intrinsic  # type: ignore[untyped-decorator]
def fetch_lines(_typing: Any, begin: Any, lines: Any) -> Any:
    """Ask for so many `lines` of the cache, one after the other, for the second cache."""

    def generate(builder: Any, *args: Any) -> None:
        begin, lines = args

        def ask(index: Any, _: Sequence[Any]) -> Sequence[Any]:
            place = builder.add(begin, _times(builder, index, _ROW_BYTES))
            _ask(builder, place, second_cache=True)
            return ()

        loop(builder, lines, (), ask)

    return numba.void(*[numba.int64] * 2), _emit(generate)


def _add_tiles(
    builder: Any,
    halves: int,
    vectors: int,
    steps: Any,
    rows: Sequence[Any],
    row_bytes: Any,
    columns: Any,
    column_bytes: Any,
) -> None:
    """Adds products to the tiles ``half * vectors + vector``: `rows` of each half by `columns`."""

    def turn(index: Any, _: Sequence[Any]) -> Sequence[Any]:
        numbers = _times(builder, index, _ROW_BYTES)
        pairs = builder.add(columns, builder.mul(_times(builder, index, TILE_ROWS), column_bytes))
        for half in range(halves):
            _load(builder, 6, builder.add(rows[half], numbers), row_bytes)
            for vector in range(vectors):
                _load(builder, 7, _on(builder, pairs, vector * _ROW_BYTES), column_bytes)
                _tile_call(builder, "tdpbf16ps", half * vectors + vector, 6, 7)
        return ()

    loop(builder, steps, (), turn)


def _places(
    builder: Any, begin: Any, stride: Any, halves: int, vectors: int
) -> list[tuple[int, Any]]:
    """Where each of those tiles lies from `begin` on."""
    rows = [builder.add(begin, builder.mul(stride, _INT64(half * TILE_ROWS))) for half in (0, 1)]
    return [
        (half * vectors + vector, _on(builder, rows[half], vector * _ROW_BYTES))
        for half in range(halves)
        for vector in range(vectors)
    ]


def _for_each_shape(builder: Any, halves: Any, vectors: Any, generate: Callable[..., None]) -> None:
    """Generates code for one and two `halves` and for one to three `vectors`."""
    shapes = [(half, vector) for half in (1, 2) for vector in (1, 2, 3)]
    key = builder.add(_times(builder, halves, 4), vectors)
    _switch(builder, key, [(4 * one[0] + one[1], partial(generate, *one)) for one in shapes])


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

    Addresses of the two groups of keys, each of which has them `key_bytes` apart; of
    ``queries [steps * 16, ROWS, 2]`` and ``scores [32, ROWS]``, whose rows are `row_bytes` apart.
    """

    def generate(builder: Any, *args: Any) -> None:
        vectors, keys, more_keys, key_bytes, queries, row_bytes, steps, scores = args

        def score(halves: int, count: int) -> None:
            for tile in range(halves * count):
                _tile_call(builder, "tilezero", tile)
            both = (keys, more_keys)
            _add_tiles(builder, halves, count, steps, both, key_bytes, queries, row_bytes)
            for tile, place in _places(builder, scores, row_bytes, halves, count):
                _store(builder, tile, place, row_bytes)

        _for_each_shape(builder, _INT64(2), vectors, score)

    return numba.void(*[numba.int64] * 8), _emit(generate)


@intrinsic  # type: ignore[untyped-decorator]
def values_in_tiles(
    _typing: Any,
    halves: Any,
    vectors: Any,
    values: Any,
    value_bytes: Any,
    weights: Any,
    row_bytes: Any,
    steps: Any,
    decay: Any,
    sums: Any,
) -> Any:
    """``sums[d] = sums[d] * decay + weights . values[d]`` for 16 or, of two `halves`, 32 dimensions.

    Addresses of ``values [32, tokens]``, rows `value_bytes` apart, of
    ``weights [steps * 16, ROWS, 2]``, ``decay [ROWS]`` and ``sums [32, ROWS]``, rows of
    `row_bytes`.
    """

    def generate(builder: Any, *args: Any) -> None:
        halves, vectors, values, value_bytes, weights, row_bytes, steps, decay, sums = args

        def add_values(dimensions: int, count: int) -> None:
            factors = [
                builder.load(pointer(builder, _on(builder, decay, at * _ROW_BYTES), FLOATS), align=4)
                for at in range(count)
            ]

            def scale(index: Any, _: Sequence[Any]) -> Sequence[Any]:
                row = builder.add(sums, builder.mul(index, row_bytes))
                for at, factor in enumerate(factors):
                    place = pointer(builder, _on(builder, row, at * _ROW_BYTES), FLOATS)
                    scaled = multiply(builder, builder.load(place, align=4), factor)
                    builder.store(scaled, place, align=4)
                return ()

            loop(builder, _INT64(dimensions * TILE_ROWS), (), scale)
            places = _places(builder, sums, row_bytes, dimensions, count)
            for tile, place in places:
                _load(builder, tile, place, row_bytes)
            rows = [_on(builder, values, 0)]
            rows.append(builder.add(values, _times(builder, value_bytes, TILE_ROWS)))
            _add_tiles(builder, dimensions, count, steps, rows, value_bytes, weights, row_bytes)
            for tile, place in places:
                _store(builder, tile, place, row_bytes)

        _for_each_shape(builder, halves, vectors, add_values)

    return numba.void(*[numba.int64] * 9), _emit(generate)


@intrinsic  # type: ignore[untyped-decorator]
def transpose_units(_typing: Any, source: Any, rows: Any, columns: Any, target: Any) -> Any:
    """``target [columns, rows] = source [rows, columns]`` of 4 bytes each, by their addresses.

    Both are multiples of 16.
    """

    def generate(builder: Any, *args: Any) -> None:
        source, rows, columns, target = args

        def row_blocks(outer: Any, _: Sequence[Any]) -> Sequence[Any]:
            def column_blocks(inner: Any, _: Sequence[Any]) -> Sequence[Any]:
                first, second = _times(builder, outer, LANES), _times(builder, inner, LANES)

                def place(data: Any, length: Any, row: Any, column: Any, at: int) -> Any:
                    index = builder.add(
                        builder.mul(_on(builder, row, at), length), column
                    )
                    begin = builder.add(data, _times(builder, index, 4))
                    return pointer(builder, begin, INTS)

                block = [
                    builder.load(place(source, columns, first, second, at), align=4)
                    for at in range(LANES)
                ]
                for at, vector in enumerate(_transposed(builder, block)):
                    builder.store(vector, place(target, rows, second, first, at), align=4)
                return ()

            loop(builder, builder.udiv(columns, _INT64(LANES)), (), column_blocks)
            return ()

        loop(builder, builder.udiv(rows, _INT64(LANES)), (), row_blocks)

    return numba.void(*[numba.int64] * 4), _emit(generate)


def _transposed(builder: Any, block: Sequence[Any]) -> list[Any]:
    """16 vectors whose lanes are the others' numbers.

    In each of four rounds vectors `distance` apart exchange runs of so many lanes.
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
