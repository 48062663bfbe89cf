"""bfloat16 in memory by whole vectors, as LLVM instructions: loads, stores, copies of heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils
from numba.extending import intrinsic

from kvrelay.model_runner.kernels.lanes import FLOATS, INTS, LANES, data_of, loop

UNITS: Final = 2 * LANES
"""Numbers in a vector of bfloat16, and in a cache line: heads are multiples of it."""
BITS: Final = ir.VectorType(ir.IntType(16), UNITS)
HALF_BITS: Final = ir.VectorType(ir.IntType(16), LANES)
BIT16: Final = ir.IntType(16)
FLOAT: Final = ir.FloatType()
_INT64: Final = ir.IntType(64)


def load(builder: Any, data: Any, index: Any, kind: Any) -> Any:
    """What is of this `kind` at the `index`-th element of `data`."""
    pointer = builder.bitcast(builder.gep(data, [index]), kind.as_pointer())
    return builder.load(pointer, align=4 if kind == FLOATS else 2)


def store(builder: Any, value: Any, data: Any, index: Any) -> None:
    """Write `value` from the `index`-th element of `data` on."""
    pointer = builder.bitcast(builder.gep(data, [index]), value.type.as_pointer())
    builder.store(value, pointer, align=4 if value.type in (FLOATS, INTS) else 2)


def width_of(context: Any, builder: Any, signature: Any, args: Any, index: int) -> Any:
    """Of the rows of the argument `index`, a matrix."""
    array = context.make_array(signature.args[index])(context, builder, args[index])
    return builder.extract_value(array.shape, 1)


def pointer(builder: Any, address: Any, kind: Any) -> Any:
    """A pointer to `kind` at an `address`, an int64."""
    return builder.inttoptr(address, kind.as_pointer())


def fetch(builder: Any, data: Any, index: Any) -> None:
    """Ask for the cache line of the `index`-th element of `data`; any is harmless."""
    byte, int32 = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, int32, int32, int32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
    read, keep_in_all_caches, data_not_code = int32(0), int32(3), int32(1)
    line = builder.bitcast(builder.gep(data, [index]), byte)
    builder.call(function, [line, read, keep_in_all_caches, data_not_code])


@intrinsic  # type: ignore[untyped-decorator]
def address_of(_typing: Any, array: Any) -> Any:
    """Where the elements of `array` begin, which must live as long as that is used.

    Its users count on from there: numba raises TypingError for an array that is not contiguous.
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
def copy_pairs(
    _typing: Any,
    pages: Any,
    at: Any,
    value_at: Any,
    stride: Any,
    pairs: Any,
    keys: Any,
    values: Any,
    token: Any,
) -> Any:
    """Copy `pairs`, at least one, of neighbouring tokens of a head, from an even `token` on.

    Keys begin every `stride` numbers from `at` of ``pages [n]`` on, values from `value_at`.
    They become rows of ``keys [block, head_dim / 2]`` and ``values [block / 2, value_dim]``,
    of pairs: of a key's neighbours, and of two tokens.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        page_data, key_data, value_data = (
            data_of(context, builder, signature, args, index) for index in (0, 5, 6)
        )
        key_width, value_width = (
            width_of(context, builder, signature, args, index) for index in (5, 6)
        )
        _, key_from, value_from, step, count, _, _, first = args
        two = _INT64(2)

        def copy_pair(pair: Any, _: Sequence[Any]) -> Sequence[Any]:
            even = builder.mul(builder.mul(pair, two), step)
            token = builder.add(first, builder.mul(pair, two))

            def copy_key(index: Any, _: Sequence[Any]) -> Sequence[Any]:
                for side in (0, 1):
                    offset = builder.add(even, builder.mul(step, _INT64(side)))
                    place = builder.add(offset, builder.mul(index, _INT64(UNITS)))
                    vector = load(builder, page_data, builder.add(key_from, place), INTS)
                    row = builder.mul(builder.add(token, _INT64(side)), key_width)
                    to = builder.add(row, builder.mul(index, _INT64(LANES)))
                    store(builder, vector, key_data, to)
                return ()

            def pair_values(index: Any, _: Sequence[Any]) -> Sequence[Any]:
                place = builder.add(even, builder.mul(index, _INT64(LANES)))
                first, second = (
                    builder.zext(
                        load(builder, page_data, builder.add(value_from, at), HALF_BITS), INTS
                    )
                    for at in (place, builder.add(place, step))
                )
                upper = builder.shl(second, ir.Constant(INTS, [16] * LANES))
                row = builder.mul(builder.udiv(token, two), value_width)
                to = builder.add(row, builder.mul(index, _INT64(LANES)))
                store(builder, builder.or_(first, upper), value_data, to)
                return ()

            loop(builder, builder.udiv(key_width, _INT64(LANES)), (), copy_key)
            loop(builder, builder.udiv(value_width, _INT64(LANES)), (), pair_values)
            return ()

        loop(builder, count, (), copy_pair)
        return context.get_dummy_value()

    number = numba.int64
    return (
        numba.void(pages, number, number, number, number, keys, values, number),
        generate,
    )
