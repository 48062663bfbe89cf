"""bfloat16 in memory by whole vectors, as LLVM instructions: loads, stores, copies of heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils
from numba.extending import intrinsic

from kvrelay.cpu_kernels.jit import inlined
from kvrelay.cpu_kernels.lanes import FLOATS, INTS, LANES, add, ask_for_line, data_of, loop

UNITS: Final = 2 * LANES
"""The numbers in a vector of bfloat16, and in a cache line: heads are multiples of it."""
BITS: Final = ir.VectorType(ir.IntType(16), UNITS)
HALF_BITS: Final = ir.VectorType(ir.IntType(16), LANES)
BIT16: Final = ir.IntType(16)
FLOAT: Final = ir.FloatType()
_INT64: Final = ir.IntType(64)


def load(builder: Any, data: Any, index: Any, kind: Any) -> Any:
    """Load a value of this `kind` from the `index`-th element of `data`."""
    pointer = builder.bitcast(builder.gep(data, [index]), kind.as_pointer())
    return builder.load(pointer, align=4 if kind == FLOATS else 2)


def store(builder: Any, value: Any, data: Any, index: Any) -> None:
    """Write `value` from the `index`-th element of `data` on."""
    pointer = builder.bitcast(builder.gep(data, [index]), value.type.as_pointer())
    builder.store(value, pointer, align=4 if value.type in (FLOATS, INTS) else 2)


def pointer(builder: Any, address: Any, kind: Any, bytes_on: int = 0) -> Any:
    """The pointer to `kind` at `bytes_on` from an `address` (int64)."""
    if bytes_on:
        address = builder.add(address, _INT64(bytes_on))
    return builder.inttoptr(address, kind.as_pointer())


def fetch(builder: Any, data: Any, index: Any, *, second_cache: bool = False) -> None:
    """Fetch the cache line of the `index`-th element of `data`; any index is harmless."""
    ask_for_line(builder, builder.gep(data, [index]), second_cache=second_cache)


def add_widened(
    builder: Any, totals: Sequence[Any], address: Any, bytes_on: Any = None
) -> Sequence[Any]:
    """Add the bfloat16 at `bytes_on` from an `address` to vectors of float32, one after the other.

    An address of 0 means none: the result is `totals`.
    """
    before = builder.block
    with builder.if_then(builder.icmp_signed("!=", address, _INT64(0))):
        begin = address if bytes_on is None else builder.add(address, bytes_on)
        added = []
        for at, total in enumerate(totals):
            place = pointer(builder, builder.add(begin, _INT64(2 * LANES * at)), HALF_BITS)
            wide = builder.zext(builder.load(place, align=2), INTS)
            shifted = builder.shl(wide, ir.Constant(INTS, [16] * LANES))
            added.append(add(builder, total, builder.bitcast(shifted, FLOATS)))
        end = builder.block
    results = [builder.phi(FLOATS) for _ in totals]
    for result, total, one in zip(results, totals, added, strict=True):
        result.add_incoming(total, before)
        result.add_incoming(one, end)
    return results


@intrinsic  # type: ignore[untyped-decorator]
def address_of(_typing: Any, array: Any) -> Any:
    """The address of the elements of `array`, which must live as long as the address is used.

    The memory is read from there on: numba raises TypingError for an array that is not contiguous.
    """
    if array.layout != "C":
        return None

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(data_of(context, builder, signature, args, 0), _INT64)

    return numba.int64(array), generate


@intrinsic  # type: ignore[untyped-decorator]
def read_int32(_typing: Any, address: Any, index: Any) -> Any:
    """The `index`-th int32 from `address` on."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        number = builder.load(builder.gep(pointer(builder, args[0], ir.IntType(32)), [args[1]]))
        return builder.sext(number, _INT64)

    return numba.int64(numba.int64, numba.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def read_int64(_typing: Any, address: Any, index: Any) -> Any:
    """The `index`-th int64 from `address` on."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load(builder.gep(pointer(builder, args[0], _INT64), [args[1]]))

    return numba.int64(numba.int64, numba.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def write_int64(_typing: Any, address: Any, index: Any, value: Any) -> Any:
    """Write the `index`-th int64 from `address` on."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.store(args[2], builder.gep(pointer(builder, args[0], _INT64), [args[1]]))
        return context.get_dummy_value()

    return numba.void(numba.int64, numba.int64, numba.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def read_float(_typing: Any, address: Any, index: Any) -> Any:
    """The `index`-th float32 from `address` on."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load(builder.gep(pointer(builder, args[0], FLOAT), [args[1]]))

    return numba.float32(numba.int64, numba.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def write_float(_typing: Any, address: Any, index: Any, value: Any) -> Any:
    """Write the `index`-th float32 from `address` on."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.store(args[2], builder.gep(pointer(builder, args[0], FLOAT), [args[1]]))
        return context.get_dummy_value()

    return numba.void(numba.int64, numba.int64, numba.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def clear(_typing: Any, address: Any, size: Any) -> Any:
    """Fill `size` bytes with zeros."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        cgutils.memset(builder, pointer(builder, args[0], ir.IntType(8)), args[1], 0)
        return context.get_dummy_value()

    return numba.void(numba.int64, numba.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def copy(_typing: Any, to: Any, source: Any, size: Any) -> Any:
    """Copy `size` bytes."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        target, start = (pointer(builder, args[index], ir.IntType(8)) for index in (0, 1))
        cgutils.raw_memcpy(builder, target, start, args[2], _INT64(1))
        return context.get_dummy_value()

    return numba.void(numba.int64, numba.int64, numba.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def pair_values(
    _typing: Any, source: Any, step: Any, count: Any, to: Any, width: Any, dimensions: Any
) -> Any:
    """Interleave `count` (at least one) pairs of neighbouring values, which stay `dimensions` wide.

    They are rows of bfloat16, every `step` numbers from the address `source` on. They become rows
    of `width` units from the address `to` on. A unit has two values, the first in the lower half.
    `dimensions` are a multiple of `LANES`.
    """

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        values, pairs = pointer(builder, args[0], BIT16), pointer(builder, args[3], ir.IntType(32))
        _, step, count, _, width, dimensions = args

        def pair_rows(row: Any, _: Sequence[Any]) -> Sequence[Any]:
            first = builder.mul(builder.mul(row, _INT64(2)), step)
            target = builder.mul(row, width)

            def pair_lanes(index: Any, _: Sequence[Any]) -> Sequence[Any]:
                place = builder.mul(index, _INT64(LANES))
                at = builder.add(first, place)
                lower, upper = (
                    builder.zext(load(builder, values, one, HALF_BITS), INTS)
                    for one in (at, builder.add(at, step))
                )
                upper = builder.shl(upper, ir.Constant(INTS, [16] * LANES))
                store(builder, builder.or_(lower, upper), pairs, builder.add(target, place))
                return ()

            loop(builder, builder.udiv(dimensions, _INT64(LANES)), (), pair_lanes)
            return ()

        loop(builder, count, (), pair_rows)
        return context.get_dummy_value()

    return numba.void(*[numba.int64] * 6), generate


@inlined
def make_lines(rows: int, words: int, dtype: Any) -> Any:
    """An array ``[rows, words]`` of 4-byte numbers that begins at a cache line.

    Numba's own arrays begin anywhere: most vectors of 64 bytes would lie in two lines.
    """
    room = np.empty(rows * words + LANES, dtype)
    begin = -address_of(room) // 4 % LANES
    return room[begin : begin + rows * words].reshape((rows, words))
