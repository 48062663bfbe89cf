"""Prefill attention on a CPU: many query rows of a sequence over its pages, tile by tile.

A chunk of a sequence has the rows ``token * group + g``: those of its query heads that
share a head of keys and values. A tile is `ROWS` of them, a strip at most `TILES` tiles::

    queries  [TILES, depth, ROWS]     a lane a row
    keys     [block, depth]           copied from pages, for a strip at a time
    scores   [block, ROWS]            float32, of a tile with a block of tokens
    weights  [block / k, ROWS]        by the online softmax
    values   [block / k, width]       copied from pages
    sums     [TILES, width, ROWS]     float32, scaled down when a larger score comes

`k` numbers make a unit (`lanes`): two bfloat16 where the processor multiplies such pairs,
else one float32. Only weights are rounded to them, as in torch's fused attention.

Blocks begin at the same tokens of a sequence in every tile, and what a row does not see
adds exactly nothing if it is finite: its result depends neither on the chunk nor on what
is beside it. A value that is not finite also reaches the earlier rows of its tile, as 0
times it is NaN; a key that is not reaches none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numba.extending import overload

from kvrelay.model_runner.kernels.arrays import Array
from kvrelay.model_runner.kernels.decode_attention import bend
from kvrelay.model_runner.kernels.jit import inlined, kernel, prefetch, store, widen
from kvrelay.model_runner.kernels.lanes import (
    OTHERS,
    ROWS,
    STEP,
    score_tile,
    value_tile,
    weigh_block,
)
from kvrelay.model_runner.kernels.pair_memory import UNITS, copy_pairs
from kvrelay.model_runner.kernels.team import run_on_team, take

TILES = 4
"""Of a strip at most: a block is copied from its pages once for all of them."""
_BLOCK = 128
"""Tokens whose scores are computed before they are weighed: they stay in the first cache."""
_LOG2_E = np.float32(1.44269504)
_NOT_SEEN = np.float32(-np.inf)
_LEAST = np.float32(-1e30)
"""Less than any score, and finite: differences to it are numbers."""


class Heads(NamedTuple):
    """A layer's pages, and how its heads lie in them and are weighed."""

    pages: Array
    units: Array
    """The pages as `view_units`."""
    length: int
    """Of a head in units."""
    shift: int
    """Binary logarithm of the numbers in a unit."""
    layer_start: int
    page_stride: int
    page_size: int
    value_offset: int
    """Elements from a key to its value: 0 for a latent, which is both."""
    head_dim: int
    value_dim: int
    group: int
    """Query heads that share a head of keys and values."""
    window: int
    scale: Any
    softcap: Any
    """0 for none."""


class Scratch(NamedTuple):
    """What a thread works on: the shapes are at the top of this module."""

    queries: Array
    keys: Array
    values: Array
    scores: Array
    weights: Array
    sums: Array
    positions: Array
    """``[TILES, ROWS]`` of rows in their sequence."""
    largest: Array
    """``[TILES, ROWS]``"""
    totals: Array
    """``[TILES, ROWS]``"""
    decay: Array
    """``[ROWS]``"""
    rounded: Array
    """``[value_dim, ROWS]``"""


@kernel
def attend_strips(
    threads: int,
    pages: Array,
    layer_start: int,
    page_stride: int,
    page_size: int,
    kv_heads: int,
    parts: int,
    window: int,
    scale: float,
    softcap: float,
    new: Array,
    num_heads: int,
    page_table: Array,
    strips: Array,
    unit: Array,
    out: Array,
) -> None:
    """Attend for `strips` of ``new [T, heads, D]`` into ``out [T, num_heads * value_dim]``.

    ``strips [n, 5]``: sequence, row of `new` where its chunk begins, position of that, the
    strip's first row of the chunk, how many. `unit` is empty: its dtype is that of units.
    """
    head_dim = new.shape[2]
    new_units = view_units(new, unit)
    heads = Heads(
        pages,
        view_units(pages, unit),
        new_units.shape[2],
        0 if new_units.shape[2] == head_dim else 1,
        layer_start,
        page_stride,
        page_size,
        (parts - 1) * kv_heads * page_size * head_dim,
        head_dim,
        out.shape[1] // num_heads,
        num_heads // kv_heads,
        window,
        np.float32(scale),
        np.float32(softcap),
    )
    counter = np.zeros(1, np.int64)
    args = (counter, heads, kv_heads, new_units, page_table, strips, unit, out)
    run_on_team(threads, attend_remaining, args)


@kernel
def attend_remaining(
    counter: Array,
    heads: Heads,
    kv_heads: int,
    new: Array,
    page_table: Array,
    strips: Array,
    unit: Array,
    out: Array,
) -> None:
    """Attend for the next strip and head until there is none left."""
    scratch = make_scratch(heads.head_dim, heads.value_dim, unit, out)
    while True:
        index = take(counter, 1)
        if index >= len(strips) * kv_heads:
            break
        sequence, start, position, first, count = strips[index // kv_heads]
        head = index % kv_heads
        load_queries(heads, new[start:], head, position, first, count, scratch)
        attend_strip(heads, head, page_table[sequence], count, scratch)
        write_sums(heads, head, first, count, scratch, out[start:])


@inlined
def make_scratch(head_dim: int, value_dim: int, unit: Array, out: Array) -> Scratch:
    """Scratch for strips; zeros where heads are shorter than their rows."""
    scores = np.empty((_BLOCK, ROWS), np.float32)
    weights = make_weights(scores, unit)
    numbers = len(scores) // len(weights)
    depth = round_up((head_dim + numbers - 1) // numbers, STEP)
    width = round_up(value_dim, OTHERS)
    return Scratch(
        np.zeros((TILES, depth, ROWS), unit.dtype),
        np.zeros((_BLOCK, depth), unit.dtype),
        np.zeros((len(weights), width), unit.dtype),
        scores,
        weights,
        np.empty((TILES, width, ROWS), np.float32),
        np.empty((TILES, ROWS), np.int64),
        np.empty((TILES, ROWS), np.float32),
        np.empty((TILES, ROWS), np.float32),
        np.empty(ROWS, np.float32),
        np.empty((value_dim, ROWS), out.dtype),
    )


@inlined
def round_up(number: int, multiple: int) -> int:
    """To the next multiple."""
    return (number + multiple - 1) // multiple * multiple


def make_weights(scores: Any, unit: Any) -> Any:
    """Room for the weights of ``scores [block, ROWS]``, inside kernels.

    It is the scores' own if units are float32.
    """
    raise NotImplementedError("only inside a kernel")


@overload(make_weights)  # type: ignore[untyped-decorator]
def _make_weights(scores: Any, unit: Any) -> Any:
    def use_scores(scores: Any, unit: Any) -> Any:
        return scores

    def make_pairs(scores: Any, unit: Any) -> Any:
        return np.empty((_BLOCK // 2, ROWS), np.uint32)

    return make_pairs if unit.dtype == numba.uint32 else use_scores


def view_units(numbers: Any, unit: Any) -> Any:
    """An array of elements as one of what `to_unit` takes, inside kernels: not copied."""
    raise NotImplementedError("only inside a kernel")


@overload(view_units)  # type: ignore[untyped-decorator]
def _view_units(numbers: Any, unit: Any) -> Any:
    def view_numbers(numbers: Any, unit: Any) -> Any:
        return numbers

    def view_pairs(numbers: Any, unit: Any) -> Any:
        return numbers.view(np.uint32)

    return view_pairs if unit.dtype == numba.uint32 else view_numbers


def to_unit(number: Any) -> Any:
    """A unit of an element, or of a pair of bfloat16, inside kernels."""
    raise NotImplementedError("only inside a kernel")


@overload(to_unit)  # type: ignore[untyped-decorator]
def _to_unit(number: Any) -> Any:
    def keep(number: Any) -> Any:
        return number

    def make_float(number: Any) -> Any:
        return widen(number)

    return keep if number == numba.uint32 else make_float


def pack_value(numbers: Any, token: Any, values: Any) -> None:
    """Copy a token's ``numbers [n]`` into its row of ``values [block / k, width]``.

    Inside kernels. A row of pairs has two tokens, of which the even comes first.
    """
    raise NotImplementedError("only inside a kernel")


@overload(pack_value)  # type: ignore[untyped-decorator]
def _pack_value(numbers: Any, token: Any, values: Any) -> Any:
    def pack_floats(numbers: Any, token: Any, values: Any) -> None:
        row = values[token]
        for i in range(len(numbers)):
            row[i] = widen(numbers[i])

    def pack_pairs(numbers: Any, token: Any, values: Any) -> None:
        row = values[token // 2]
        if token % 2:
            for i in range(len(numbers)):
                row[i] |= np.uint32(np.uint32(numbers[i]) << np.uint32(16))
        else:
            for i in range(len(numbers)):
                row[i] = np.uint32(numbers[i])

    return pack_pairs if values.dtype == numba.uint32 else pack_floats


def copy_together(heads: Any, at: Any, count: Any, keys: Any, values: Any, token: Any) -> Any:
    """Copy up to `count` tokens that follow one another in a page at once: how many.

    Inside kernels. 0 if that is not possible here, and for what is not a pair.
    """
    raise NotImplementedError("only inside a kernel")


@overload(copy_together)  # type: ignore[untyped-decorator]
def _copy_together(heads: Any, at: Any, count: Any, keys: Any, values: Any, token: Any) -> Any:
    def copy_none(heads: Any, at: Any, count: Any, keys: Any, values: Any, token: Any) -> Any:
        return 0

    def copy_in_pairs(heads: Any, at: Any, count: Any, keys: Any, values: Any, token: Any) -> Any:
        pairs = count // 2
        whole = heads.head_dim % UNITS == 0 and heads.value_dim % UNITS == 0
        if pairs == 0 or token % 2 == 1 or not whole:
            return 0
        value_at = at + heads.value_offset
        copy_pairs(heads.pages, at, value_at, heads.head_dim, pairs, keys, values, token)
        return 2 * pairs

    return copy_in_pairs if values.dtype == numba.uint32 else copy_none


@inlined
def pack(numbers: Array, units: Array) -> None:
    """Copy a head's ``numbers [n]``, of `view_units`, into ``units [n]``."""
    for i in range(len(numbers)):
        units[i] = to_unit(numbers[i])


@inlined
def load_queries(
    heads: Heads, new: Array, head: int, position: int, first: int, count: int, scratch: Scratch
) -> None:
    """The strip's `count` rows from `first` on, of the chunk that `new` begins with.

    Rows that its last tile lacks are copies of the last.
    """
    group = heads.group
    for r in range(round_up(count, ROWS)):
        row = first + min(r, count - 1)
        tile, lane = r // ROWS, r % ROWS
        scratch.positions[tile, lane] = position + row // group
        pack(new[row // group, head * group + row % group], scratch.queries[tile, :, lane])


@inlined
def attend_strip(heads: Heads, head: int, page_ids: Array, count: int, scratch: Scratch) -> None:
    """Attend for the `count` rows whose queries are loaded: `sums` and `totals` of them."""
    tiles = (count + ROWS - 1) // ROWS
    scratch.largest[:] = _LEAST
    scratch.totals[:] = 0
    scratch.sums[:] = 0
    end = scratch.positions[tiles - 1, ROWS - 1] + 1
    oldest = max(0, scratch.positions[0, 0] + 1 - heads.window)
    for begin in range(oldest // _BLOCK * _BLOCK, end, _BLOCK):
        copy_block(
            heads,
            head,
            page_ids,
            begin,
            max(0, oldest - begin),
            min(_BLOCK, end - begin),
            scratch.keys,
            scratch.values,
        )
        if begin + _BLOCK < end:
            fetch_block(heads, head, page_ids, begin + _BLOCK, end)
        for tile in range(tiles):
            if begin <= scratch.positions[tile, ROWS - 1]:
                attend_block(heads, tile, begin, scratch)


@inlined
def fetch_block(heads: Heads, head: int, page_ids: Array, begin: int, end: int) -> None:
    """Ask for a head's tokens ``[begin, end)`` of a sequence, a block at most."""
    page_size, head_dim = heads.page_size, heads.head_dim
    token = begin
    while token < min(begin + _BLOCK, end):
        page, slot = token // page_size, token % page_size
        count = page_size - slot
        at = heads.layer_start + page_ids[page] * heads.page_stride
        at += (head * page_size + slot) * head_dim
        for line in range(0, count * head_dim, UNITS):
            prefetch(heads.pages, at + line)
            prefetch(heads.pages, at + heads.value_offset + line)
        token += count


@inlined
def copy_block(
    heads: Heads,
    head: int,
    page_ids: Array,
    begin: int,
    skipped: int,
    seen: int,
    keys: Array,
    values: Array,
) -> None:
    """Copy a head's tokens ``begin + [skipped, seen)`` of a sequence into ``[skipped, seen)``.

    Other rows of values are zero then, so that a weight of 0 makes nothing of them.
    """
    if seen - skipped < len(keys):
        values[:] = 0
    page_size, head_dim = heads.page_size, heads.head_dim
    token = skipped
    while token < seen:
        page, slot = (begin + token) // page_size, (begin + token) % page_size
        start = heads.layer_start + page_ids[page] * heads.page_stride
        at = start + (head * page_size + slot) * head_dim
        together = copy_together(
            heads, at, min(page_size - slot, seen - token), keys, values, token
        )
        if together == 0:
            unit = at >> heads.shift
            pack(heads.units[unit : unit + heads.length], keys[token])
            at += heads.value_offset
            pack_value(heads.pages[at : at + heads.value_dim], token, values)
            together = 1
        token += together


@inlined
def attend_block(heads: Heads, tile: int, begin: int, scratch: Scratch) -> None:
    """Add to a tile's sums what its rows see of the block that is copied."""
    scores, weights, positions = scratch.scores, scratch.weights, scratch.positions[tile]
    queries, sums = scratch.queries[tile], scratch.sums[tile]
    count = round_up(min(_BLOCK, positions[ROWS - 1] + 1 - begin), OTHERS)
    for key in range(0, count, OTHERS):
        score_tile(queries, scratch.keys, queries.shape[0], scores, key)
    factor = heads.scale * _LOG2_E
    if heads.softcap > 0:
        cap(scores, count, heads.scale, heads.softcap)
        factor = _LOG2_E
    hide(scores, count, begin, positions, heads.window)
    largest, totals = scratch.largest[tile], scratch.totals[tile]
    weigh_block(scores, count, factor, largest, totals, scratch.decay, weights)
    length = count * len(weights) // len(scores)
    width = sums.shape[0]
    for dimension in range(0, width, OTHERS):
        value_tile(weights, scratch.values, length, width, scratch.decay, sums, dimension)


@inlined
def cap(scores: Array, count: int, scale: Any, softcap: Any) -> None:
    """``softcap * tanh(score * scale / softcap)`` of ``scores [count, ROWS]``, in place."""
    for key in range(count):
        for r in range(ROWS):
            scores[key, r] = bend(scores[key, r] * scale, softcap)


@inlined
def hide(scores: Array, count: int, begin: int, positions: Array, window: int) -> None:
    """Hide the tokens from `begin` on that a row does not see: later, or before its window."""
    for key in range(max(0, positions[0] + 1 - begin), count):
        for r in range(ROWS):
            if begin + key > positions[r]:
                scores[key, r] = _NOT_SEEN
    for key in range(min(count, positions[ROWS - 1] - window + 1 - begin)):
        for r in range(ROWS):
            if begin + key <= positions[r] - window:
                scores[key, r] = _NOT_SEEN


@inlined
def write_sums(
    heads: Heads, head: int, first: int, count: int, scratch: Scratch, out: Array
) -> None:
    """Divide a strip's `sums` by its `totals` into ``out [T, num_heads * value_dim]``."""
    group, rounded = heads.group, scratch.rounded
    for begin in range(0, count, ROWS):
        tile = begin // ROWS
        sums, totals = scratch.sums[tile], scratch.totals[tile]
        for d in range(heads.value_dim):
            for r in range(ROWS):
                store(rounded[d], r, sums[d, r] / totals[r])
        for r in range(min(ROWS, count - begin)):
            row = first + begin + r
            at = (head * group + row % group) * heads.value_dim
            to = out[row // group, at : at + heads.value_dim]
            for d in range(heads.value_dim):
                to[d] = rounded[d, r]
