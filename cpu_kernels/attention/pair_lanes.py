"""Decode attention in pairs of bfloat16: blocks of 16 tokens, as LLVM instructions.

A head's `TOKENS` keys, or values, of a block lie one after the other::

    keys     [TOKENS, head_dim / 2]     pairs of a key's neighbours
    scores   [TOKENS]                   a lane a token
    weights  [TOKENS / 2]               pairs of neighbouring tokens, as values are combined
    sums     [value_dim]                `UNITS` dimensions at a time: a vector of the lower, one
                                        of the upper 4 of each 8, as AVX512 interleaves two values

A part of a key, or of a value, is loaded once for all query heads that share it. Weights are
rounded to bfloat16, as they are in the tiles of prompts. A sum's order depends on its length.

Lines are fetched into the second cache only: memory is then read up to 1.8 times as fast as into
the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

from kvrelay.cpu_kernels.lanes import (
    BFLOATS,
    FLOATS,
    INTS,
    LANES,
    BFloat,
    add_scaled,
    call,
    constant,
    exp2,
    larger,
    loop,
    splat,
)
from kvrelay.cpu_kernels.pair_memory import (
    BIT16,
    BITS,
    FLOAT,
    HALF_BITS,
    UNITS,
    fetch,
    load,
    pointer,
    store,
)

TOKENS: Final = LANES
"""The tokens of a block."""
_VECTORS: Final = 2
"""The vectors of keys, and of values, that are computed in a turn."""
DIMENSIONS: Final = _VECTORS * UNITS
"""The dimensions of keys and of values are multiples of it."""
_LOG2_E: Final = 1.44269504
_LEAST: Final = -1e30
"""A number less than any score, and finite: differences to it are numbers."""
_AT_ONCE: Final = 4
"""The keys whose products with several heads stay in registers."""

_INT32, _INT64 = ir.IntType(32), ir.IntType(64)


def _shuffle(builder: Any, first: Any, second: Any, lanes: Sequence[int]) -> Any:
    mask = ir.Constant(ir.VectorType(_INT32, len(lanes)), lanes)
    return builder.shuffle_vector(first, second, mask)


def _of_quarters(lanes: Sequence[int]) -> list[int]:
    """Repeat the lanes of one quarter for all quarters; lanes from 4 on are a second vector's."""
    return [4 * quarter + lane % 4 + lane // 4 * LANES for quarter in range(4) for lane in lanes]


_MERGES: Final = (
    ([*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]),
    (
        [*range(4), *range(8, 12), *range(16, 20), *range(24, 28)],
        [*range(4, 8), *range(12, 16), *range(20, 24), *range(28, 32)],
    ),
    (_of_quarters((0, 1, 4, 5)), _of_quarters((2, 3, 6, 7))),
    (_of_quarters((0, 2, 4, 6)), _of_quarters((1, 3, 5, 7))),
)
"""The steps that add up two vectors' lanes to one vector's, until a lane is a vector's sum.

The first two steps add whole quarters: quarters of 4 vectors become those of one. The last two add
within quarters, which processors shuffle without constants.
"""


def _merge(builder: Any, vectors: Sequence[Any], steps: Sequence[Any]) -> Any:
    """Merge 4 vectors to one: each step makes one vector of two."""
    for lower, upper in steps:
        vectors = [
            builder.fadd(
                _shuffle(builder, *pair, lower),
                _shuffle(builder, *pair, upper),
            )
            for pair in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    (merged,) = vectors
    return merged


def _across(builder: Any, vector: Any, combine: Any) -> Any:
    """Combine all lanes of a vector, and put the result into each lane."""
    for distance in (8, 4, 2, 1):
        lanes = [lane ^ distance for lane in range(LANES)]
        vector = combine(vector, _shuffle(builder, vector, vector, lanes))
    return vector


def _dot(builder: Any, total: Any, first: Any, second: Any) -> Any:
    """``total + first[0] * second[0] + first[1] * second[1]`` of pairs, lane by lane."""
    pairs = [builder.bitcast(units, BFLOATS) for units in (first, second)]
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, *pairs)


def _round(builder: Any, numbers: Any) -> Any:
    """16 float32 as the bits of bfloat16, to nearest, ties to even."""
    kind = ir.VectorType(BFloat(), LANES)
    rounded = call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", kind, numbers)
    return builder.bitcast(rounded, HALF_BITS)


def _score(
    builder: Any, keys: Any, starts: Sequence[Any], queries: Any, depth: Any, ahead: Any
) -> list[Any]:
    """The scores of `queries`, which begin at ``(data, index)``: 4 lanes a key of 4 `starts`.

    The same places of `ahead` as the keys' in `keys` are fetched.
    """

    def turn(index: Any, sums: Sequence[Any]) -> Sequence[Any]:
        for vector in range(_VECTORS):
            place = builder.mul(index, _INT64(DIMENSIONS))
            place = builder.add(place, _INT64(vector * UNITS))
            for start in starts:
                fetch(builder, ahead, builder.add(start, place), second_cache=True)
            some = [load(builder, keys, builder.add(start, place), INTS) for start in starts]
            ones = [load(builder, data, builder.add(at, place), INTS) for data, at in queries]
            pairs = [(one, key) for one in ones for key in some]
            sums = [_dot(builder, total, *pair) for total, pair in zip(sums, pairs, strict=True)]
        return sums

    nothing = [constant(0.0)] * (_AT_ONCE * len(queries))
    sums = loop(builder, builder.udiv(depth, _INT64(DIMENSIONS)), nothing, turn)
    of_queries = [sums[at : at + _AT_ONCE] for at in range(0, len(sums), _AT_ONCE)]
    return [_merge(builder, some, _MERGES[:2]) for some in of_queries]


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def score_block(
    _typing: Any,
    heads: Any,
    keys: Any,
    queries: Any,
    depth: Any,
    scores: Any,
    width: Any,
    ahead: Any,
) -> Any:
    """``scores[h, t] = queries[h] . keys[t]`` for `heads` h, a constant, and a block's tokens t.

    ``keys [TOKENS, depth]`` and ``queries [heads, depth]`` are bfloat16, ``scores [heads, width]``
    float32. As many bytes as the keys have are fetched from `ahead` on, spread over the work.
    """
    if not isinstance(heads, numba.types.IntegerLiteral):
        return None

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, key_at, query_at, depth, score_at, width, ahead = args
        following = pointer(builder, ahead, BIT16)
        keys, queries, scores = (
            pointer(builder, key_at, BIT16),
            pointer(builder, query_at, BIT16),
            pointer(builder, score_at, FLOAT),
        )
        rows = range(heads.literal_value)
        ones = [(queries, builder.mul(depth, _INT64(row))) for row in rows]
        groups = []
        for group in range(TOKENS // _AT_ONCE):
            tokens = [group + _AT_ONCE * quarter for quarter in range(_AT_ONCE)]
            starts = [builder.mul(depth, _INT64(token)) for token in tokens]
            groups.append(_score(builder, keys, starts, ones, depth, following))
        for row in rows:
            total = _merge(builder, [group[row] for group in groups], _MERGES[2:])
            store(builder, total, scores, builder.mul(width, _INT64(row)))
        return context.get_dummy_value()

    number = numba.int64
    return numba.void(heads, *[number] * 6), generate


@intrinsic  # type: ignore[untyped-decorator]
def bend_scores(_typing: Any, scores: Any, vectors: Any, scale: Any, softcap: Any) -> Any:
    """Bend `vectors` of scores to ``softcap * tanh(score * scale / softcap)``, in place."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        data = pointer(builder, args[0], FLOAT)
        cap = splat(builder, args[3])
        slope = builder.fdiv(splat(builder, args[2]), cap)
        one, exponent = constant(1.0), constant(-2.0 * _LOG2_E)

        def bend(index: Any, _: Sequence[Any]) -> Sequence[Any]:
            place = builder.mul(index, _INT64(LANES))
            scaled = builder.fmul(load(builder, data, place, FLOATS), slope)
            size = larger(builder, scaled, builder.fneg(scaled))
            decay = exp2(builder, builder.fmul(size, exponent))
            bent = builder.fdiv(builder.fsub(one, decay), builder.fadd(one, decay))
            bent = builder.fmul(bent, cap)
            negative = builder.fcmp_ordered("<", scaled, constant(0.0))
            bent = builder.select(negative, builder.fneg(bent), bent)
            store(builder, bent, data, place)
            return ()

        loop(builder, args[1], (), bend)
        return context.get_dummy_value()

    return numba.void(numba.int64, numba.int64, numba.float32, numba.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def find_shift(_typing: Any, scores: Any, vectors: Any, slope: Any, shift: Any) -> Any:
    """Write ``shift [LANES]``, all the same: the least ``-slope * score`` of the scores."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        data = pointer(builder, args[0], FLOAT)

        def find(index: Any, found: Sequence[Any]) -> Sequence[Any]:
            score = load(builder, data, builder.mul(index, _INT64(LANES)), FLOATS)
            return [larger(builder, score, found[0])]

        (most,) = loop(builder, args[1], [constant(_LEAST)], find)
        most = _across(builder, most, lambda x, y: larger(builder, x, y))
        least = builder.fneg(builder.fmul(most, splat(builder, args[2])))
        store(builder, least, pointer(builder, args[3], FLOAT), _INT64(0))
        return context.get_dummy_value()

    return numba.void(numba.int64, numba.int64, numba.float32, numba.int64), generate


def _interleave(builder: Any, first: Any, second: Any) -> list[Any]:
    """Two values' pairs: for the lower 4 of each 8 dimensions, and for the upper."""
    halves = []
    for half in (0, 4):
        lanes = [
            8 * eight + half + one + UNITS * side
            for eight in range(UNITS // 8)
            for one in range(4)
            for side in (0, 1)
        ]
        halves.append(builder.bitcast(_shuffle(builder, first, second, lanes), INTS))
    return halves


def _weigh(
    builder: Any,
    values: Any,
    begin: Any,
    stride: Any,
    weights: Sequence[Any],
    totals: Any,
    ahead: Any,
) -> Sequence[Any]:
    """Add a block's values by each row's ``weights [TOKENS / 2]`` to `totals` ``[row][half]``.

    `begin` are the indices of the first value's vectors. The same places of `ahead` are fetched.
    """

    def step(pair: Any, sums: Sequence[Any]) -> Sequence[Any]:
        token = builder.mul(pair, builder.mul(stride, _INT64(2)))
        halves = []
        for place in begin:
            first = builder.add(place, token)
            neighbours = (first, builder.add(first, stride))
            for at in neighbours:
                fetch(builder, ahead, at, second_cache=True)
            both = [load(builder, values, at, BITS) for at in neighbours]
            halves += _interleave(builder, *both)
        units = [splat(builder, builder.load(builder.gep(row, [pair]), align=4)) for row in weights]
        pairs = [(half, unit) for unit in units for half in halves]
        return [_dot(builder, total, *one) for total, one in zip(sums, pairs, strict=True)]

    return loop(builder, _INT64(TOKENS // 2), totals, step)


@intrinsic  # type: ignore[untyped-decorator]
def weigh_scores(
    _typing: Any, scores: Any, vectors: Any, slope: Any, shift: Any, total: Any
) -> Any:
    """Put ``2 ** (slope * score + shift)``, bfloat16, in place of `vectors` of scores.

    They are packed from the first score on. ``total [LANES]`` becomes their sums by lanes.
    """

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        scores, total = (pointer(builder, args[index], FLOAT) for index in (0, 4))
        weights = pointer(builder, args[0], BIT16)
        slopes = splat(builder, args[2])
        shift = load(builder, pointer(builder, args[3], FLOAT), _INT64(0), FLOATS)

        def weigh(index: Any, sums: Sequence[Any]) -> Sequence[Any]:
            place = builder.mul(index, _INT64(LANES))
            score = load(builder, scores, place, FLOATS)
            weight = exp2(builder, add_scaled(builder, score, slopes, shift))
            store(builder, _round(builder, weight), weights, place)
            return [builder.fadd(sums[0], weight)]

        (sums,) = loop(builder, args[1], [constant(0.0)], weigh)
        store(builder, sums, total, _INT64(0))
        return context.get_dummy_value()

    number = numba.int64
    return numba.void(number, number, numba.float32, number, number), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def weigh_values(
    _typing: Any,
    heads: Any,
    values: Any,
    stride: Any,
    weights: Any,
    width: Any,
    sums: Any,
    depth: Any,
    ahead: Any,
) -> Any:
    """``sums[h] += weights[h] . values`` for `heads` h, a constant, and a block's tokens.

    ``weights [heads, width]`` are bfloat16 with an even `width`, ``sums [heads, depth]`` float32.
    Values are bfloat16 and begin every `stride` numbers. The same places from `ahead` on are
    fetched.
    """
    if not isinstance(heads, numba.types.IntegerLiteral):
        return None

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, value_at, step, weight_at, width, sum_at, depth, ahead = args
        following = pointer(builder, ahead, BIT16)
        values, sums = pointer(builder, value_at, BIT16), pointer(builder, sum_at, FLOAT)
        units, pairs = pointer(builder, weight_at, _INT32), builder.udiv(width, _INT64(2))
        rows = range(heads.literal_value)
        weights = [builder.gep(units, [builder.mul(pairs, _INT64(row))]) for row in rows]

        def add_dimensions(index: Any, _: Sequence[Any]) -> Sequence[Any]:
            dimension = builder.mul(index, _INT64(DIMENSIONS))
            places = [
                builder.add(builder.mul(depth, _INT64(row)), builder.add(dimension, _INT64(half)))
                for row in rows
                for half in range(0, DIMENSIONS, LANES)
            ]
            vectors = [builder.add(dimension, _INT64(UNITS * vector)) for vector in range(_VECTORS)]
            carried = [load(builder, sums, place, FLOATS) for place in places]
            results = _weigh(builder, values, vectors, step, weights, carried, following)
            for place, result in zip(places, results, strict=True):
                store(builder, result, sums, place)
            return ()

        loop(builder, builder.udiv(depth, _INT64(DIMENSIONS)), (), add_dimensions)
        return context.get_dummy_value()

    number = numba.int64
    return numba.void(heads, *[number] * 7), generate


@intrinsic  # type: ignore[untyped-decorator]
def write_head(_typing: Any, sums: Any, totals: Any, depth: Any, out: Any) -> Any:
    """Write ``sums [depth]`` divided by the sum of ``totals [LANES]`` to ``out [depth]``."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        sums, totals = (pointer(builder, args[index], FLOAT) for index in (0, 1))
        out = pointer(builder, args[3], BIT16)
        total = _across(builder, load(builder, totals, _INT64(0), FLOATS), builder.fadd)

        def write(index: Any, _: Sequence[Any]) -> Sequence[Any]:
            place = builder.mul(index, _INT64(UNITS))
            halves = [
                load(builder, sums, builder.add(place, _INT64(at)), FLOATS) for at in (0, LANES)
            ]
            for at in (0, LANES):
                quarters = [at // 8, at // 8 + 1]
                lanes = [
                    LANES * half + 4 * quarter + one
                    for quarter in quarters
                    for half in (0, 1)
                    for one in range(4)
                ]
                natural = builder.fdiv(_shuffle(builder, halves[0], halves[1], lanes), total)
                store(builder, _round(builder, natural), out, builder.add(place, _INT64(at)))
            return ()

        loop(builder, builder.udiv(args[2], _INT64(UNITS)), (), write)
        return context.get_dummy_value()

    number = numba.int64
    return numba.void(number, number, number, number), generate
