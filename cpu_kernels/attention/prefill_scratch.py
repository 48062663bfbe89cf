"""The working memory of a thread of prefill attention: its arrays, and their addresses."""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numba.extending import overload

from kvrelay.cpu_kernels.arrays import Array
from kvrelay.cpu_kernels.attention.prefill_lanes import OTHERS, ROWS, STEP
from kvrelay.cpu_kernels.attention.prefill_pages import BLOCK, WORD, PrefillHeads
from kvrelay.cpu_kernels.jit import inlined
from kvrelay.cpu_kernels.pair_memory import address_of, make_lines

GROUPS = BLOCK // OTHERS
"""The groups of `OTHERS` tokens that a block has."""
ROW_BYTES = ROWS * WORD
"""The bytes of one number for each row of a tile."""


class PrefillScratch(NamedTuple):
    """The arrays of a thread; their shapes are at the top of `prefill_attention`, or here."""

    queries: Array
    keys: Array
    values: Array
    columns: Array
    """``[width, block / k]``: `values` for tiles, whose rows are dimensions."""
    scores: Array
    weights: Array
    sums: Array
    positions: Array
    """``[tiles, ROWS]`` int32: the rows' positions in their sequence."""
    largest: Array
    """``[tiles, ROWS]``"""
    totals: Array
    """``[tiles, ROWS]``"""
    decay: Array
    """``[ROWS]``"""
    starts: Array
    """``[2 * GROUPS]`` addresses: see `prefill_attention.place_keys`."""
    rounded: Array
    """``[value_dim, ROWS]``"""


class Room(NamedTuple):
    """The addresses of a `PrefillScratch`, and its sizes."""

    queries: int
    keys: int
    values: int
    columns: int
    scores: int
    weights: int
    sums: int
    positions: int
    largest: int
    totals: int
    decay: int
    starts: int
    depth: int
    """The units of a query and of a key."""
    width: int
    """The units of a row of values, one a dimension."""
    numbers: int
    """The numbers in a unit."""
    line: int
    """The bytes of the next block that are fetched in a turn of a tile's loop."""


@inlined
def make_scratch(tiles: int, heads: PrefillHeads, unit: Array, out: Array) -> PrefillScratch:
    """Make scratch for strips of `tiles` tiles; zeros where heads are shorter than rows."""
    scores = make_lines(BLOCK, ROWS, np.float32)
    weights = make_weights(scores, unit)
    numbers = len(scores) // len(weights)
    depth = round_up((heads.head_dim + numbers - 1) // numbers, STEP)
    width = round_up(heads.value_dim, OTHERS)
    queries = make_lines(tiles * depth, ROWS, unit.dtype)
    keys = make_lines(0 if heads.in_place else BLOCK, depth, unit.dtype)
    values = make_lines(len(weights), width, unit.dtype)
    columns = make_lines(width if heads.in_tiles else 0, len(weights), unit.dtype)
    queries[:], keys[:], values[:], scores[:] = 0, 0, 0, 0
    return PrefillScratch(
        queries.reshape((tiles, depth, ROWS)),
        keys,
        values,
        columns,
        scores,
        weights,
        make_lines(tiles * width, ROWS, np.float32).reshape((tiles, width, ROWS)),
        make_lines(tiles, ROWS, np.int32),
        make_lines(tiles, ROWS, np.float32),
        make_lines(tiles, ROWS, np.float32),
        make_lines(1, ROWS, np.float32)[0],
        np.empty(2 * GROUPS, np.int64),
        np.empty((heads.value_dim, ROWS), out.dtype),
    )


@inlined
def find_room(scratch: PrefillScratch, token: int) -> Room:
    """The addresses of `scratch`, valid until `keep`, for keys of `token` bytes."""
    depth = scratch.keys.shape[1]
    return Room(
        address_of(scratch.queries),
        address_of(scratch.keys),
        address_of(scratch.values),
        address_of(scratch.columns),
        address_of(scratch.scores),
        address_of(scratch.weights),
        address_of(scratch.sums),
        address_of(scratch.positions),
        address_of(scratch.largest),
        address_of(scratch.totals),
        address_of(scratch.decay),
        address_of(scratch.starts),
        depth,
        scratch.values.shape[1],
        BLOCK // len(scratch.weights),
        OTHERS * token * STEP // depth,
    )


@inlined
def keep(scratch: PrefillScratch) -> None:
    """Keep the arrays alive up to here, by a use of the whole tuple.

    numba frees an array after the last use of its holder; addresses do not count.
    """
    scratch.scores[0, 0] = scratch.weights[0, 0] = scratch.decay[0] = 0


@inlined
def round_up(number: int, multiple: int) -> int:
    """Round up to the next multiple."""
    return (number + multiple - 1) // multiple * multiple


def make_weights(scores: Any, unit: Any) -> Any:
    """Room for the weights of ``scores [block, ROWS]``, inside kernels.

    It is the scores' own memory if units are float32.
    """
    raise NotImplementedError("only inside a kernel")


@overload(make_weights)  # type: ignore[untyped-decorator]
def _make_weights(scores: Any, unit: Any) -> Any:
    def use_scores(scores: Any, unit: Any) -> Any:
        return scores

    def make_pairs(scores: Any, unit: Any) -> Any:
        return make_lines(BLOCK // 2, ROWS, np.uint32)

    return make_pairs if unit.dtype == numba.uint32 else use_scores
