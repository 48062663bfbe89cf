"""Loops over vectors of 16 float32 lanes that stay in registers, written as LLVM instructions.

A tile of attention keeps 24 such vectors as sums; numba's own loops would store and
load them at each step. LLVM cuts the vectors to the width that the processor has.

A tile has `ROWS` query rows, one a lane. What is multiplied comes in units::

    float32   one number: lane += row * other
    uint32    two bfloat16 numbers: lane += row[0] * other[0] + row[1] * other[1],
              summed in float32 by one instruction of AVX512-BF16

The idea is FlashAttention's (Dao, arXiv 2307.08691) with queries in the lanes: a row's
largest score and the sum of its weights are then lanes of a vector, too, and no vector
is ever summed across. What a lane computes does not depend on the other lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding  # type: ignore[import-untyped]
import numba
from llvmlite import ir
from numba.extending import intrinsic

LANES = 16
VECTORS = 3
ROWS = LANES * VECTORS
"""Of a tile: 3 vectors times 8 others are 24 sums, so many that 32 registers hold the rest."""
OTHERS = 8
"""Keys, or dimensions of values, that a tile is multiplied with at once."""
STEP = 2
"""Depths are multiples of it: a turn of the loop has so many steps."""

_FLOAT, _INT16, _INT32, _INT64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOATS, INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT32, LANES)
_EXP2 = (0.00132186722, 0.00967169832, 0.0555089302, 0.24022238, 0.693146884, 1.0)
"""Coefficients, the highest first, of ``2 ** x`` on [-0.5, 0.5]: its error is below 2e-7."""


class BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


BFLOATS = ir.VectorType(BFloat(), 2 * LANES)


def has_bfloat16_products() -> bool:
    """Whether this processor multiplies pairs of bfloat16: AVX512-BF16."""
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512bf16"))


def has_bfloat16_tiles() -> bool:
    """Whether this processor multiplies whole tiles of bfloat16: AMX."""
    return bool(llvmlite.binding.get_host_cpu_features().get("amx-bf16"))


def constant(value: float) -> Any:
    """A vector whose lanes all are this float32."""
    return ir.Constant(FLOATS, [value] * LANES)


def _int_constant(value: int) -> Any:
    return ir.Constant(INTS, [value] * LANES)


def call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    """Call the intrinsic `name` of LLVM."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(builder.module.declare_intrinsic(name, (), kind), args)


def _address(builder: Any, base: Any, index: Any, kind: Any) -> Any:
    """A pointer to `kind` at the `index`-th 32 bits of `base`."""
    words = builder.bitcast(base, _INT32.as_pointer())
    return builder.bitcast(builder.gep(words, [index]), kind.as_pointer())


def _load(builder: Any, base: Any, index: Any, kind: Any) -> Any:
    return builder.load(_address(builder, base, index, kind), align=4)


def _store(builder: Any, value: Any, base: Any, index: Any) -> None:
    builder.store(value, _address(builder, base, index, value.type), align=4)


def _at(builder: Any, row: Any, vector: int) -> Any:
    """The index of a row's vector in an array of rows of `ROWS` units."""
    return builder.add(builder.mul(row, _INT64(ROWS)), _INT64(LANES * vector))


def splat(builder: Any, scalar: Any, lanes: int = LANES) -> Any:
    """A vector whose lanes all are `scalar`."""
    nothing = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    one = builder.insert_element(nothing, scalar, _INT32(0))
    mask = ir.Constant(ir.VectorType(_INT32, lanes), [0] * lanes)
    return builder.shuffle_vector(one, nothing, mask)


def larger(builder: Any, x: Any, y: Any) -> Any:
    """Of two vectors, lane by lane; `y` where `x` is NaN."""
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def add_scaled(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """``x * y + z`` of float32, numbers or vectors, rounded once."""
    kind = "f32" if x.type == _FLOAT else f"v{x.type.count}f32"
    return call(builder, f"llvm.fma.{kind}", x.type, x, y, z)


def loop(
    builder: Any, count: Any, carried: Sequence[Any], body: Callable[[Any, Sequence[Any]], Any]
) -> Sequence[Any]:
    """``for i in range(count): carried = body(i, carried)``, at least once."""
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


def data_of(context: Any, builder: Any, signature: Any, args: Any, index: int) -> Any:
    """Where the elements of the argument `index`, an array, begin."""
    return context.make_array(signature.args[index])(context, builder, args[index]).data


def add_product(builder: Any, total: Any, rows: Any, other: Any) -> Any:
    """``total + rows * other``: `rows` a vector of units, `other` a unit for all lanes."""
    others = splat(builder, other)
    if rows.type == FLOATS:
        return add_scaled(builder, rows, others, total)
    pairs = (builder.bitcast(vector, BFLOATS) for vector in (rows, others))
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, *pairs)


def _unit(array: Any) -> tuple[Any, Any]:
    """The LLVM types of a unit of `array` and of a vector of them."""
    return (_FLOAT, FLOATS) if array.dtype == numba.float32 else (_INT32, INTS)


def _add_products(
    builder: Any, totals: Sequence[Any], depth: Any, rows_at: Any, other_at: Any
) -> Sequence[Any]:
    """``totals[other][vector] += rows[i][vector] * others[i][other]``, flat, for all i of `depth`.

    `rows_at(i, vector)` and `other_at(i, other)` load them.
    """

    def turn(index: Any, totals: Sequence[Any]) -> Sequence[Any]:
        sums = list(totals)
        for step in range(STEP):
            i = builder.add(builder.mul(index, _INT64(STEP)), _INT64(step))
            rows = [rows_at(i, vector) for vector in range(VECTORS)]
            for other in range(OTHERS):
                unit = other_at(i, other)
                for vector in range(VECTORS):
                    at = other * VECTORS + vector
                    sums[at] = add_product(builder, sums[at], rows[vector], unit)
        return sums

    return loop(builder, builder.udiv(depth, _INT64(STEP)), totals, turn)


@intrinsic  # type: ignore[untyped-decorator]
def score_tile(_typing: Any, queries: Any, keys: Any, depth: Any, scores: Any, first: Any) -> Any:
    """``scores[key] = queries . keys[key]`` for the `OTHERS` keys from `first` on.

    ``queries [depth, ROWS]`` and ``keys [block, depth]`` units, ``scores [block, ROWS]``.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        query_data, key_data, score_data = (
            data_of(context, builder, signature, args, index) for index in (0, 1, 3)
        )
        unit, units = _unit(queries)
        _, _, length, _, begin = args
        starts = [builder.mul(builder.add(begin, _INT64(other)), length) for other in range(OTHERS)]
        sums = _add_products(
            builder,
            [constant(0.0)] * (OTHERS * VECTORS),
            length,
            lambda i, vector: _load(builder, query_data, _at(builder, i, vector), units),
            lambda i, other: _load(builder, key_data, builder.add(starts[other], i), unit),
        )
        for at, total in enumerate(sums):
            row = builder.add(begin, _INT64(at // VECTORS))
            _store(builder, total, score_data, _at(builder, row, at % VECTORS))
        return context.get_dummy_value()

    return numba.void(queries, keys, numba.int64, scores, numba.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def value_tile(
    _typing: Any,
    weights: Any,
    values: Any,
    depth: Any,
    width: Any,
    decay: Any,
    sums: Any,
    first: Any,
) -> Any:
    """``sums[d] = sums[d] * decay + weights . values[:, d]`` for `OTHERS` dimensions from `first`.

    ``weights [depth, ROWS]`` and ``values [depth, width]`` units, ``decay [ROWS]``,
    ``sums [width, ROWS]``.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weight_data, value_data, decay_data, sum_data = (
            data_of(context, builder, signature, args, index) for index in (0, 1, 4, 5)
        )
        unit, units = _unit(weights)
        _, _, length, stride, _, _, begin = args
        places = [
            _at(builder, builder.add(begin, _INT64(other)), vector)
            for other in range(OTHERS)
            for vector in range(VECTORS)
        ]
        decays = [
            _load(builder, decay_data, _INT64(LANES * vector), FLOATS) for vector in range(VECTORS)
        ]
        scaled = [
            builder.fmul(_load(builder, sum_data, place, FLOATS), decays[at % VECTORS])
            for at, place in enumerate(places)
        ]
        dimensions = [builder.add(begin, _INT64(other)) for other in range(OTHERS)]
        totals = _add_products(
            builder,
            scaled,
            length,
            lambda i, vector: _load(builder, weight_data, _at(builder, i, vector), units),
            lambda i, other: _load(
                builder,
                value_data,
                builder.add(builder.mul(i, stride), dimensions[other]),
                unit,
            ),
        )
        for place, total in zip(places, totals, strict=True):
            _store(builder, total, sum_data, place)
        return context.get_dummy_value()

    number = numba.int64
    return numba.void(weights, values, number, number, decay, sums, number), generate


def exp2(builder: Any, x: Any) -> Any:
    """``2 ** x`` for ``x <= 0``: exactly 0 below -126; NaN stays NaN."""
    nearest = call(builder, f"llvm.rint.v{LANES}f32", FLOATS, x)
    rest = builder.fsub(x, nearest)
    result = constant(_EXP2[0])
    for coefficient in _EXP2[1:]:
        result = add_scaled(builder, result, rest, constant(coefficient))
    exponent = builder.add(builder.fptosi(nearest, INTS), _int_constant(127))
    power = builder.bitcast(builder.shl(exponent, _int_constant(23)), FLOATS)
    result = builder.fmul(result, power)
    tiny = builder.fcmp_ordered("<", x, constant(-126.0))
    return builder.select(tiny, constant(0.0), result)


def _pairs(builder: Any, first: Any, second: Any) -> Any:
    """Two vectors of float32, rounded and interleaved as pairs of bfloat16."""
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    both = call(builder, name, BFLOATS, second, first)
    order = [half + LANES * side for half in range(LANES) for side in (0, 1)]
    order_vector = ir.Constant(ir.VectorType(_INT32, 2 * LANES), order)
    return builder.bitcast(builder.shuffle_vector(both, both, order_vector), INTS)


@intrinsic  # type: ignore[untyped-decorator]
def weigh_block(
    _typing: Any,
    scores: Any,
    count: Any,
    factor: Any,
    largest: Any,
    total: Any,
    decay: Any,
    weights: Any,
) -> Any:
    """A block's part of a softmax: Milakov and Gimelshein's, "online" (arXiv 1805.02867).

    ``largest [ROWS]`` becomes that of the ``scores [count, ROWS]``, too; ``decay [ROWS]`` is
    what former weights have to be multiplied by for that, as ``total [ROWS]`` already is when
    it gets the new weights' sum. A weight is ``2 ** (factor * (score - largest))``. `count` is
    even. ``weights`` are units of rows, and may be the scores themselves.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        score_data, largest_data, total_data, decay_data, weight_data = (
            data_of(context, builder, signature, args, index) for index in (0, 3, 4, 5, 6)
        )
        halves, slope = builder.udiv(args[1], _INT64(2)), splat(builder, args[2])
        ends = [_INT64(LANES * vector) for vector in range(VECTORS)]
        paired = weights.dtype == numba.uint32

        def row(index: Any, side: int) -> Any:
            return builder.add(builder.mul(index, _INT64(2)), _INT64(side))

        def load_scores(index: Any, side: int) -> list[Any]:
            at = row(index, side)
            return [
                _load(builder, score_data, _at(builder, at, vector), FLOATS)
                for vector in range(VECTORS)
            ]

        def find_largest(index: Any, found: Sequence[Any]) -> Sequence[Any]:
            both = load_scores(index, 0) + load_scores(index, 1)
            return [larger(builder, score, most) for score, most in zip(both, found, strict=True)]

        old = [_load(builder, largest_data, end, FLOATS) for end in ends]
        found = loop(builder, halves, old * 2, find_largest)
        new = [
            larger(builder, *pair) for pair in zip(found[:VECTORS], found[VECTORS:], strict=True)
        ]
        shifts = [builder.fneg(builder.fmul(most, slope)) for most in new]
        decays = [
            exp2(builder, builder.fmul(builder.fsub(before, most), slope))
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
            for vector in range(VECTORS):
                if paired:
                    pairs = _pairs(builder, first[vector], second[vector])
                    _store(builder, pairs, weight_data, _at(builder, index, vector))
                    continue
                for side, one in enumerate((first, second)):
                    at = _at(builder, row(index, side), vector)
                    _store(builder, one[vector], weight_data, at)
            return [
                builder.fadd(total, weight)
                for total, weight in zip(sums, first + second, strict=True)
            ]

        sums = loop(builder, halves, [constant(0.0)] * (2 * VECTORS), weigh)
        for vector, end in enumerate(ends):
            _store(builder, new[vector], largest_data, end)
            _store(builder, decays[vector], decay_data, end)
            former = builder.fmul(_load(builder, total_data, end, FLOATS), decays[vector])
            added = builder.fadd(sums[vector], sums[VECTORS + vector])
            _store(builder, builder.fadd(former, added), total_data, end)
        return context.get_dummy_value()

    number = numba.int64
    return (
        numba.void(scores, number, numba.float32, largest, total, decay, weights),
        generate,
    )
