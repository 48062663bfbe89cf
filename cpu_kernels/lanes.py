"""Vectors of 16 float32 lanes that stay in registers, written as LLVM instructions.

Numba's own loops would store and load sums at each step. LLVM cuts the vectors to the width that
the processor has. Factors come in units::

    float32   one number: lane += row * other
    uint32    two bfloat16 numbers: lane += row[0] * other[0] + row[1] * other[1],
              summed in float32 by one instruction of AVX512-BF16
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from kvrelay.cpu_kernels.processor import cpu_features

LANES = 16
LINE_BYTES = 4 * LANES
"""The bytes of a cache line, and of a vector."""

_FLOAT, _INT16, _INT32, _INT64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOATS, INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT32, LANES)
_EXP2 = (0.00132186722, 0.00967169832, 0.0555089302, 0.24022238, 0.693146884, 1.0)
"""The coefficients, the highest first, of ``2 ** x`` on [-0.5, 0.5]: its error is below 2e-7."""


class BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


BFLOATS = ir.VectorType(BFloat(), 2 * LANES)


def constant(value: float) -> Any:
    """A vector whose lanes all are this float32."""
    return ir.Constant(FLOATS, [value] * LANES)


def _int_constant(value: int) -> Any:
    return ir.Constant(INTS, [value] * LANES)


def call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    """Call the intrinsic `name` of LLVM."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(builder.module.declare_intrinsic(name, (), kind), args)


def ask_for_line(
    builder: Any, place: Any, *, to_write: bool = False, second_cache: bool = False
) -> None:
    """Fetch the cache line that the pointer `place` lies in; any pointer is harmless.

    The line will be read or, with `to_write`, written. With `second_cache` it is not put into the
    first cache.
    """
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _INT32, _INT32, _INT32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
    keep, data_not_code = _INT32(2 if second_cache else 3), _INT32(1)
    line = builder.bitcast(place, byte)
    builder.call(function, [line, _INT32(int(to_write)), keep, data_not_code])


def splat(builder: Any, scalar: Any, lanes: int = LANES) -> Any:
    """A vector whose lanes all are `scalar`."""
    nothing = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    one = builder.insert_element(nothing, scalar, _INT32(0))
    mask = ir.Constant(ir.VectorType(_INT32, lanes), [0] * lanes)
    return builder.shuffle_vector(one, nothing, mask)


_AS_WRITTEN = ("arcp",)
"""A flag that is about divisions only.

Numba lets instructions without flags be reordered (`jit.kernel`). With this flag, kernels for more
and for fewer vectors give the same bits.
"""


def add(builder: Any, x: Any, y: Any) -> Any:
    """``x + y``, never reordered."""
    return builder.fadd(x, y, flags=_AS_WRITTEN)


def subtract(builder: Any, x: Any, y: Any) -> Any:
    """``x - y``, never reordered."""
    return builder.fsub(x, y, flags=_AS_WRITTEN)


def multiply(builder: Any, x: Any, y: Any) -> Any:
    """``x * y``, never reordered, nor rounded together with a sum."""
    return builder.fmul(x, y, flags=_AS_WRITTEN)


def larger(builder: Any, x: Any, y: Any) -> Any:
    """The larger of two vectors, lane by lane; `y` where `x` is NaN."""
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def add_scaled(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """``x * y + z`` of float32, numbers or vectors, rounded once."""
    kind = "f32" if x.type == _FLOAT else f"v{x.type.count}f32"
    return call(builder, f"llvm.fma.{kind}", x.type, x, y, z)


def loop(
    builder: Any, count: Any, carried: Sequence[Any], body: Callable[[Any, Sequence[Any]], Any]
) -> Sequence[Any]:
    """Emit ``for i in range(count): carried = body(i, carried)``, which runs at least once."""
    before = builder.block
    head, after = builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(_INT64)
    phis = [builder.phi(value.type) for value in carried]
    results: Sequence[Any] = body(index, phis)
    following = builder.add(index, _INT64(1))
    first = (_INT64(0), *carried)
    for phi, value, result in zip((index, *phis), first, (following, *results), strict=True):
        phi.add_incoming(value, before)
        phi.add_incoming(result, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), head, after)
    builder.position_at_end(after)
    return results


def switch(builder: Any, key: Any, cases: Sequence[tuple[int, Callable[[], None]]]) -> None:
    """Emit each case's code for its key; `key` must be one of these."""
    bad, after = builder.append_basic_block("bad"), builder.append_basic_block("done")
    choice = builder.switch(key, bad)
    for number, generate in cases:
        block = builder.append_basic_block(f"case_{number}")
        choice.add_case(_INT64(number), block)
        builder.position_at_end(block)
        generate()
        builder.branch(after)
    builder.position_at_end(bad)
    builder.unreachable()
    builder.position_at_end(after)


def times(builder: Any, number: Any, factor: int) -> Any:
    """`number` times `factor`."""
    return builder.mul(number, _INT64(factor))


def data_of(context: Any, builder: Any, signature: Any, args: Any, index: int) -> Any:
    """The pointer to the elements of the argument `index`, an array."""
    return context.make_array(signature.args[index])(context, builder, args[index]).data


def add_product(builder: Any, total: Any, rows: Any, other: Any) -> Any:
    """``total + rows * other``; `rows` is a vector of units, `other` a unit for all lanes."""
    others = splat(builder, other)
    if rows.type == FLOATS:
        return add_scaled(builder, rows, others, total)
    pairs = (builder.bitcast(vector, BFLOATS) for vector in (rows, others))
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, *pairs)


def has_scaling() -> bool:
    """Whether this processor splits and scales floats by powers of two by itself: AVX512DQ."""
    return "avx512dq" in cpu_features()


def exp2(builder: Any, x: Any) -> Any:
    """``2 ** x`` for ``x <= 0``; NaN stays NaN.

    Below -126 the result is 0, or at most the true value.
    """
    scaling = has_scaling()
    nearest, rest = (_round_by_scaling if scaling else _round)(builder, x)
    power = constant(_EXP2[0])
    for coefficient in _EXP2[1:]:
        power = add_scaled(builder, power, rest, constant(coefficient))
    if scaling:
        return _call_unmasked(builder, "scalef", power, nearest)
    exponent = builder.add(builder.fptosi(nearest, INTS), _int_constant(127))
    scale = builder.bitcast(builder.shl(exponent, _int_constant(23)), FLOATS)
    tiny = builder.fcmp_ordered("<", x, constant(-126.0))
    return builder.select(tiny, constant(0.0), multiply(builder, power, scale))


def _round(builder: Any, x: Any) -> tuple[Any, Any]:
    """The nearest whole number, and the rest."""
    nearest = call(builder, f"llvm.rint.v{LANES}f32", FLOATS, x)
    return nearest, subtract(builder, x, nearest)


def _round_by_scaling(builder: Any, x: Any) -> tuple[Any, Any]:
    """The nearest whole number, and the rest, which is 0 for infinity."""
    rest = _call_unmasked(builder, "reduce", x, ir.Constant(_INT32, 0))
    return subtract(builder, x, rest), rest


def _call_unmasked(builder: Any, name: str, *args: Any) -> Any:
    """Call an AVX512 instruction for all lanes, with the usual rounding."""
    every, as_always = ir.Constant(_INT16, -1), ir.Constant(_INT32, 4)
    name = f"llvm.x86.avx512.mask.{name}.ps.512"
    return call(builder, name, FLOATS, *args, constant(0.0), every, as_always)
