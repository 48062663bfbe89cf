"""A page's part of decode attention in vectors that stay in registers, as LLVM instructions.

A part of a key, or of a value, is loaded once for several query heads that share it, and their sums
stay in registers. Loops of numba would widen it anew for each head, and store and load the sums at
each token. A sum's order depends on its own length alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

from kvrelay.cpu_kernels.lanes import LANES, add_scaled, loop, splat

MOST_HEADS = 4
"""The most heads that are computed at once."""
_TOKENS = 4
"""The tokens whose keys are scored at once."""
_DIMENSIONS = 4 * LANES
"""The dimensions of values that are summed at once: 16 vectors for `MOST_HEADS`."""

_FLOAT, _INT32, _INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)


class _Numbers:
    """The elements of an argument, an array, as float32: a number, or a vector of several."""

    def __init__(self, context: Any, builder: Any, kind: Any, value: Any) -> None:
        array = context.make_array(kind)(context, builder, value)
        self._builder, self._data = builder, array.data
        self._is_half = kind.dtype == numba.int16
        self.width = builder.extract_value(array.shape, kind.ndim - 1)
        """The elements of a row."""

    def load(self, index: Any, lanes: int) -> Any:
        """Load elements from the flat `index` on."""
        builder, element = self._builder, self._data.type.pointee
        kind = _numbers(element, lanes)
        pointer = builder.bitcast(builder.gep(self._data, [index]), kind.as_pointer())
        stored = builder.load(pointer, align=4 if element == _FLOAT else 2)
        return stored if element == _FLOAT else self._widen(stored, lanes)

    def _widen(self, bits: Any, lanes: int) -> Any:
        builder, floats = self._builder, _numbers(_FLOAT, lanes)
        if self._is_half:
            halves = builder.bitcast(bits, _numbers(ir.HalfType(), lanes))
            return builder.fpext(halves, floats)
        ints = _numbers(_INT32, lanes)
        sixteen = ir.Constant(ints, 16 if lanes == 1 else [16] * lanes)
        return builder.bitcast(builder.shl(builder.zext(bits, ints), sixteen), floats)

    def store(self, value: Any, index: Any) -> None:
        """Write float32 from the flat `index` on."""
        pointer = self._builder.gep(self._data, [index])
        pointer = self._builder.bitcast(pointer, value.type.as_pointer())
        self._builder.store(value, pointer, align=4)


def _numbers(element: Any, lanes: int) -> Any:
    return element if lanes == 1 else ir.VectorType(element, lanes)


def _sum_lanes(builder: Any, vectors: Sequence[Any]) -> Any:
    """A vector of the sums of the lanes of each of `vectors`, of which there are 1, 2 or 4.

    One half of a vector's lanes is added to the other, until one is left. Halves of two vectors are
    put together in one, which takes fewer instructions.
    """
    width = LANES
    while width > 1:
        others = vectors[1::2] if len(vectors) > 1 else [None]
        pairs = zip(vectors[::2], others, strict=True)
        vectors = [_add_halves(builder, first, second, width) for first, second in pairs]
        width //= 2
    (sums,) = vectors
    return sums


def _add_halves(builder: Any, first: Any, second: Any, width: int) -> Any:
    """Add up each `width` lanes of one or two vectors to half as many."""
    lanes = first.type.count * (1 if second is None else 2)
    halves = []
    for half in (0, 1):
        kept = [lane for lane in range(lanes) if lane % width // (width // 2) == half]
        mask = ir.Constant(ir.VectorType(_INT32, len(kept)), kept)
        halves.append(builder.shuffle_vector(first, second or first, mask))
    return builder.fadd(*halves)


def _loop_if_any(
    builder: Any,
    count: Any,
    carried: Sequence[Any],
    body: Callable[[Any, Sequence[Any]], Sequence[Any]],
) -> list[Any]:
    """`loop`, or `carried` as it is if `count` is 0."""
    before = builder.block
    with builder.if_then(builder.icmp_signed(">", count, _INT64(0))):
        results = loop(builder, count, carried, body)
        end = builder.block
    merged = []
    for value, result in zip(carried, results, strict=True):
        phi = builder.phi(value.type)
        phi.add_incoming(value, before)
        phi.add_incoming(result, end)
        merged.append(phi)
    return merged


def _in_steps(
    builder: Any, start: Any, end: Any, size: int, body: Callable[[Any, int], None]
) -> Any:
    """Run ``body(at, size)`` for as many steps of `size` as fit between; return where they end."""
    steps = builder.udiv(builder.sub(end, start), _INT64(size))

    def step(index: Any, _: Sequence[Any]) -> Sequence[Any]:
        body(builder.add(start, builder.mul(index, _INT64(size))), size)
        return ()

    _loop_if_any(builder, steps, (), step)
    return builder.add(start, builder.mul(steps, _INT64(size)))


def _rows(builder: Any, first: Any, count: int, width: Any, at: Any) -> list[Any]:
    """Flat indices of column `at` in `count` rows from `first` on."""
    rows = [builder.add(first, _INT64(one)) for one in range(count)]
    return [builder.add(builder.mul(row, width), at) for row in rows]


def _is_constant(number: Any) -> bool:
    """Whether a number is a constant: numba asks with the number, then with its type alone."""
    return isinstance(number, numba.types.IntegerLiteral)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def score_page(
    _typing: Any,
    heads: Any,
    pages: Any,
    at: Any,
    count: Any,
    queries: Any,
    first: Any,
    scores: Any,
    to: Any,
) -> Any:
    """``scores[first + h, to + t] = queries[first + h] . key[t]`` for `heads` h, a constant.

    A page's `count` keys begin at `at` of ``pages [n]``. Shapes are ``queries [num_heads,
    head_dim]`` and ``scores [num_heads, tokens]``.
    """
    if not _is_constant(heads):
        return None

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        page, query, score = (
            _Numbers(context, builder, signature.args[index], args[index]) for index in (1, 4, 6)
        )
        _, _, begin, tokens, _, first_head, _, first_score = args
        query_rows = _rows(builder, first_head, heads.literal_value, query.width, _INT64(0))
        score_rows = _rows(builder, first_head, heads.literal_value, score.width, first_score)
        dim = query.width
        vectors, rest = builder.udiv(dim, _INT64(LANES)), builder.urem(dim, _INT64(LANES))

        def score_tokens(token: Any, some: int) -> None:
            """Score `some` tokens from `token` on."""
            keys = _rows(builder, token, some, dim, begin)

            def add_vector(index: Any, sums: Sequence[Any]) -> Sequence[Any]:
                i = builder.mul(index, _INT64(LANES))
                numbers = [page.load(builder.add(key, i), LANES) for key in keys]
                of_heads = [query.load(builder.add(row, i), LANES) for row in query_rows]
                pairs = [(one, number) for one in of_heads for number in numbers]
                return [
                    add_scaled(builder, *pair, total)
                    for pair, total in zip(pairs, sums, strict=True)
                ]

            def add_one(index: Any, totals: Sequence[Any]) -> Sequence[Any]:
                i = builder.add(builder.sub(dim, rest), index)
                numbers = ir.Constant(ir.VectorType(_FLOAT, some), ir.Undefined)
                for lane, key in enumerate(keys):
                    number = page.load(builder.add(key, i), 1)
                    numbers = builder.insert_element(numbers, number, _INT32(lane))
                of_heads = [query.load(builder.add(row, i), 1) for row in query_rows]
                return [
                    add_scaled(builder, splat(builder, one, some), numbers, total)
                    for one, total in zip(of_heads, totals, strict=True)
                ]

            nothing = ir.Constant(ir.VectorType(_FLOAT, LANES), [0.0] * LANES)
            sums = _loop_if_any(builder, vectors, [nothing] * (len(query_rows) * some), add_vector)
            of_heads = [sums[first : first + some] for first in range(0, len(sums), some)]
            totals = [_sum_lanes(builder, each) for each in of_heads]
            totals = _loop_if_any(builder, rest, totals, add_one)
            for row, total in zip(score_rows, totals, strict=True):
                score.store(total, builder.add(row, token))

        end = _in_steps(builder, _INT64(0), tokens, _TOKENS, score_tokens)
        _in_steps(builder, end, tokens, 1, score_tokens)
        return context.get_dummy_value()

    number = numba.int64
    return numba.void(heads, pages, number, number, queries, number, scores, number), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def weigh_page(
    _typing: Any,
    heads: Any,
    pages: Any,
    at: Any,
    count: Any,
    stride: Any,
    weights: Any,
    of: Any,
    sums: Any,
    first: Any,
) -> Any:
    """``sums[first + h] += weights[first + h, of + t] * value[t]`` for `heads` h, a constant.

    A page's `count` values begin every `stride` elements from `at` of ``pages [n]`` on. Shapes are
    ``weights [num_heads, tokens]`` and ``sums [num_heads, value_dim]``.
    """
    if not _is_constant(heads):
        return None

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        page, weight, total = (
            _Numbers(context, builder, signature.args[index], args[index]) for index in (1, 5, 7)
        )
        _, _, begin, tokens, step, _, first_weight, _, first_head = args
        weight_rows = _rows(builder, first_head, heads.literal_value, weight.width, first_weight)

        def add_dimensions(place: Any, size: int) -> None:
            """Add `size` dimensions from `place` on, of all tokens."""
            lanes = min(size, LANES)
            places = [builder.add(place, _INT64(at)) for at in range(0, size, lanes)]
            targets = [
                target
                for at in places
                for target in _rows(builder, first_head, heads.literal_value, total.width, at)
            ]

            def token(index: Any, carried: Sequence[Any]) -> Sequence[Any]:
                value = builder.add(begin, builder.mul(index, step))
                numbers = [page.load(builder.add(value, at), lanes) for at in places]
                factors = [weight.load(builder.add(row, index), 1) for row in weight_rows]
                if lanes > 1:
                    factors = [splat(builder, factor) for factor in factors]
                pairs = [(factor, number) for number in numbers for factor in factors]
                return [
                    add_scaled(builder, *pair, old)
                    for pair, old in zip(pairs, carried, strict=True)
                ]

            carried = [total.load(target, lanes) for target in targets]
            for target, new in zip(
                targets, _loop_if_any(builder, tokens, carried, token), strict=True
            ):
                total.store(new, target)

        end = _INT64(0)
        for size in (_DIMENSIONS, LANES, 1):
            end = _in_steps(builder, end, total.width, size, add_dimensions)
        return context.get_dummy_value()

    number = numba.int64
    return (
        numba.void(heads, pages, number, number, number, weights, number, sums, number),
        generate,
    )
