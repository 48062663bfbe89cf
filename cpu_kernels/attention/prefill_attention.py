"""Prefill attention on a CPU: many query rows of a sequence over its pages, tile by tile.

A chunk of a sequence has the rows ``token * group + g``, for its query heads that share a head of
keys and values. `LANES` rows are a vector, up to `VECTORS` vectors a tile, several tiles a strip. A
strip's tiles have equally many vectors, or one less::

    queries  [tiles, depth, ROWS]     a lane a row
    keys     [block, depth]           in pages where they are units there, else copied
    scores   [block, ROWS]            float32, of a tile with a block of tokens
    weights  [block / k, ROWS]        by the online softmax
    values   [block / k, width]       copied from pages, for a strip at a time
    sums     [tiles, width, ROWS]     float32, scaled down when a larger score comes

`k` numbers make a unit (`lanes`): two bfloat16 where the processor multiplies such pairs,
else one float32. Only weights are rounded to them, as in torch's fused attention.

Blocks begin at the same tokens of a sequence in every tile, and an unseen token adds exactly
nothing if it is finite. So a row's result depends neither on the chunk nor on its neighbours. A
value that is not finite also reaches earlier rows of its strip, as 0 times it is NaN. These are
rows of its tile, and of tiles that end less than 8 tokens before it (32 where the processor
multiplies 32 together). A key that is not finite reaches none.

Where the processor multiplies tiles by itself (`prefill_tiles`), the arrays are the same, but
values are transposed to a row a dimension (`columns`). Softmax then takes most of the time.

While a block is computed the next one is fetched, line by line: hardware cannot foresee where
pages lie.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvrelay.cpu_kernels.arrays import Array
from kvrelay.cpu_kernels.attention.pair_lanes import bend_scores
from kvrelay.cpu_kernels.attention.prefill_lanes import (
    OTHERS,
    STEP,
    VECTORS,
    hide_scores,
    score_tile,
    value_tile,
    weigh_block,
)
from kvrelay.cpu_kernels.attention.prefill_pages import (
    BLOCK,
    WORD,
    PrefillHeads,
    copy_keys,
    copy_values,
    pack,
    view_units,
)
from kvrelay.cpu_kernels.attention.prefill_scratch import (
    GROUPS,
    ROW_BYTES,
    PrefillScratch,
    Room,
    find_room,
    keep,
    make_scratch,
    round_up,
)
from kvrelay.cpu_kernels.attention.prefill_tiles import (
    fetch_lines,
    scores_in_tiles,
    transpose_units,
    values_in_tiles,
)
from kvrelay.cpu_kernels.jit import array_at, inlined, kernel, store, team_part
from kvrelay.cpu_kernels.lanes import LANES
from kvrelay.cpu_kernels.pair_memory import address_of, read_float, read_int32, read_int64
from kvrelay.cpu_kernels.products.tiles import (
    TILE_BYTES,
    TILE_NUMBERS,
    TILE_ROWS,
    drop_tiles,
    shape_tiles,
)
from kvrelay.cpu_kernels.team import run_on_team, take

_LOG2_E = np.float32(1.44269504)
_LEAST = np.float32(-1e30)
"""A number less than any score, and finite: differences to it are numbers."""


class Strip(NamedTuple):
    """The rows of a head that see the tokens ``[oldest, end)``."""

    vectors: int
    tiles: int
    oldest: int
    end: int
    page_ids: int
    """The address of its sequence's page ids."""
    start: int
    """The address of its head's first key in the layer's first page."""


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
    sinks: int,
    new: int,
    shape: tuple[int, int, int],
    num_heads: int,
    value_dim: int,
    page_table: Array,
    strips: Array,
    unit: Array,
    in_tiles: bool,
    out: int,
) -> None:
    """Attend for `strips` of ``new [T, heads, D]`` into ``out [T, num_heads * value_dim]``.

    ``strips [n, 5]`` has the sequence, the row of `new` where its chunk begins, and that row's
    position. The strip's first row in the chunk and its number of rows follow. `unit` is empty: its
    dtype is that of units. `new` and `out` are as in `decode_attention.attend_rows`.
    """
    tokens, _, head_dim = shape
    new_units = view_units(array_at(new, shape, pages.dtype), unit)
    page_units = view_units(pages, unit)
    length = new_units.shape[2]
    heads = PrefillHeads(
        pages,
        page_units,
        np.zeros(1, unit.dtype)[0],
        length,
        0 if length == head_dim else 1,
        layer_start,
        page_stride,
        page_size,
        (parts - 1) * kv_heads * page_size * head_dim,
        pages.itemsize,
        pages.itemsize * head_dim,
        in_tiles,
        page_units.itemsize == WORD
        and page_size % (TILE_ROWS if in_tiles else OTHERS) == 0
        and length % STEP == 0,
        head_dim,
        value_dim,
        num_heads // kv_heads,
        window,
        np.float32(scale),
        np.float32(softcap),
        sinks,
    )
    counter = np.zeros(1, np.int64)
    results = array_at(out, (tokens, num_heads * value_dim), pages.dtype)
    args = (counter, heads, kv_heads, new_units, page_table, strips, unit, results)
    run_on_team(threads, attend_remaining, args)


@team_part
def attend_remaining(
    counter: Array,
    heads: PrefillHeads,
    kv_heads: int,
    new: Array,
    page_table: Array,
    strips: Array,
    unit: Array,
    out: Array,
) -> None:
    """Attend for the next strip and head until there is none left."""
    tiles = count_tiles(count_vectors(strips[:, 4].max()))
    scratch = make_scratch(tiles, heads, unit, out)
    room = find_room(scratch, heads.token)
    layer = address_of(heads.pages) + heads.layer_start * heads.item
    if heads.in_tiles:
        shape_tiles(TILE_ROWS, TILE_ROWS)
    while True:
        index = take(counter, 1)
        if index >= len(strips) * kv_heads:
            break
        sequence, start, position, first, count = strips[index // kv_heads]
        head, page_ids = index % kv_heads, page_table[sequence]
        vectors = count_vectors(count)
        strip = Strip(
            vectors,
            count_tiles(vectors),
            max(0, position + first // heads.group + 1 - heads.window),
            position + (first + count - 1) // heads.group + 1,
            address_of(page_ids),
            layer + head * heads.page_size * heads.token,
        )
        load_queries(heads, new[start:], head, position, first, count, strip, scratch)
        attend_strip(heads, strip, head, page_ids, scratch, room)
        write_sums(heads, head, first, count, strip, scratch, out[start:])
    if heads.in_tiles:
        drop_tiles()
    keep(scratch)


@inlined
def count_vectors(rows: int) -> int:
    """The vectors that `rows` rows need."""
    return (rows + LANES - 1) // LANES


@inlined
def count_tiles(vectors: int) -> int:
    """The tiles that `vectors` vectors need."""
    return (vectors + VECTORS - 1) // VECTORS


@inlined
def find_tile(strip: Strip, tile: int) -> int:
    """The first of a tile's vectors; for the tile behind the last, the number of vectors."""
    return (strip.vectors * tile + strip.tiles - 1) // strip.tiles


@inlined
def load_queries(
    heads: PrefillHeads,
    new: Array,
    head: int,
    position: int,
    first: int,
    count: int,
    strip: Strip,
    scratch: PrefillScratch,
) -> None:
    """Load the strip's `count` rows from `first` on, of the chunk that `new` begins with.

    The last vector is filled up with copies of the last row.
    """
    group = heads.group
    for tile in range(strip.tiles):
        begin = LANES * find_tile(strip, tile)
        for lane in range(LANES * find_tile(strip, tile + 1) - begin):
            row = first + min(begin + lane, count - 1)
            scratch.positions[tile, lane] = position + row // group
            query = new[row // group, head * group + row % group]
            pack(query, scratch.queries[tile, :, lane])


@inlined
def attend_strip(
    heads: PrefillHeads,
    strip: Strip,
    head: int,
    page_ids: Array,
    scratch: PrefillScratch,
    room: Room,
) -> None:
    """Attend for the rows whose queries are loaded: compute their `sums` and `totals`."""
    scratch.largest[:] = _LEAST
    scratch.totals[:] = 0
    scratch.sums[: strip.tiles] = 0
    for begin in range(strip.oldest // BLOCK * BLOCK, strip.end, BLOCK):
        skipped, seen = max(0, strip.oldest - begin), min(BLOCK, strip.end - begin)
        place_keys(heads, strip, begin, room, scratch.starts)
        if not heads.in_place:
            copy_keys(heads, head, page_ids, begin, skipped, seen, scratch.keys)
        copy_values(heads, head, page_ids, begin, skipped, seen, scratch.values)
        if heads.in_tiles:
            transpose_units(room.values, len(scratch.values), room.width, room.columns)
        for tile in range(strip.tiles):
            attend_block(heads, strip, tile, begin, room)


@inlined
def place_keys(heads: PrefillHeads, strip: Strip, begin: int, room: Room, starts: Array) -> None:
    """Find where the keys of a block and of the next one begin, by groups of `OTHERS`.

    A block's keys are read in its pages, or from their copies; the next one's are only fetched.
    """
    for group in range(GROUPS):
        copy = room.keys + group * OTHERS * room.depth * WORD
        token = begin + group * OTHERS
        starts[group] = find_key(heads, strip, token) if heads.in_place else copy
        starts[GROUPS + group] = find_key(heads, strip, token + BLOCK)


@inlined
def find_key(heads: PrefillHeads, strip: Strip, token: int) -> int:
    """The address of a strip's key; that of any seen key if no row sees this one."""
    seen = min(max(token, strip.oldest), strip.end - 1)
    page = read_int32(strip.page_ids, seen // heads.page_size)
    place: int = strip.start + page * heads.page_stride * heads.item
    return place + token % heads.page_size * heads.token


@inlined
def attend_block(heads: PrefillHeads, strip: Strip, tile: int, begin: int, room: Room) -> None:
    """Add to a tile's sums what its rows see of the current block."""
    vectors = find_tile(strip, tile + 1) - find_tile(strip, tile)
    positions = room.positions + tile * ROW_BYTES
    first, last = read_int32(positions, 0), read_int32(positions, LANES * vectors - 1)
    count = round_up(min(BLOCK, last + 1 - begin), TILE_NUMBERS if heads.in_tiles else OTHERS)
    if count <= 0:
        return
    if heads.in_tiles:
        add_scores_in_tiles(heads, strip, tile, vectors, count, room)
    else:
        add_scores(heads, strip, tile, vectors, count, room)
    factor = heads.scale * _LOG2_E
    if heads.softcap > 0:
        bend_scores(room.scores, count * VECTORS, heads.scale, heads.softcap)
        factor = _LOG2_E
    hide(vectors, begin, max(0, first + 1 - begin), count, positions, heads.window, room)
    hide(
        vectors,
        begin,
        0,
        min(count, last + 1 - heads.window - begin),
        positions,
        heads.window,
        room,
    )
    weigh(heads, tile, vectors, count, factor, room)
    if heads.in_tiles:
        add_values_in_tiles(tile, vectors, count, room)
    else:
        add_values(heads, tile, vectors, count, room)


@inlined
def add_scores_in_tiles(
    heads: PrefillHeads, strip: Strip, tile: int, vectors: int, count: int, room: Room
) -> None:
    """Compute scores as `add_scores` does, for multiples of `TILE_NUMBERS` keys."""
    queries = room.queries + tile * room.depth * ROW_BYTES
    steps, groups = room.depth // TILE_ROWS, TILE_ROWS // OTHERS
    for key in range(0, count, TILE_NUMBERS):
        group = key // OTHERS
        keys, more = read_int64(room.starts, group), read_int64(room.starts, group + groups)
        scores = room.scores + key * ROW_BYTES
        scores_in_tiles(vectors, keys, more, heads.token, queries, ROW_BYTES, steps, scores)
        for each in range(group, group + 2 * groups):
            if each % strip.tiles == tile:
                ahead = read_int64(room.starts, GROUPS + each)
                lines = OTHERS * heads.token // TILE_BYTES
                fetch_lines(ahead, lines)
                if heads.value_offset:
                    fetch_lines(ahead + heads.value_offset * heads.item, lines)


@inlined
def add_values_in_tiles(tile: int, vectors: int, count: int, room: Room) -> None:
    """Add values like `add_values`, for a number of tokens that is a multiple of `TILE_NUMBERS`."""
    steps, value_bytes = count // TILE_NUMBERS, BLOCK // room.numbers * WORD
    for dimension in range(0, room.width, TILE_NUMBERS):
        values = room.columns + dimension * value_bytes
        sums = room.sums + (tile * room.width + dimension) * ROW_BYTES
        values_in_tiles(
            vectors,
            values,
            value_bytes,
            room.weights,
            ROW_BYTES,
            steps,
            room.decay,
            sums,
        )


@inlined
def add_scores(
    heads: PrefillHeads, strip: Strip, tile: int, vectors: int, count: int, room: Room
) -> None:
    """Compute the scores of `count` keys of the block; each tile fetches a part of the next one."""
    depth = room.depth
    queries = room.queries + tile * depth * ROW_BYTES
    for key in range(0, count, OTHERS):
        group, scores = key // OTHERS, room.scores + key * ROW_BYTES
        keys = read_int64(room.starts, group)
        ahead, values, line = keys, 0, 0
        if group % strip.tiles == tile:
            ahead = read_int64(room.starts, GROUPS + group)
            values, line = heads.value_offset * heads.item, room.line
        if vectors == 3:
            score_tile(3, heads.unit, queries, keys, depth, scores, ahead, values, line)
        elif vectors == 2:
            score_tile(2, heads.unit, queries, keys, depth, scores, ahead, values, line)
        else:
            score_tile(1, heads.unit, queries, keys, depth, scores, ahead, values, line)


@inlined
def hide(
    vectors: int, begin: int, skipped: int, count: int, positions: int, window: int, room: Room
) -> None:
    """Hide the tokens ``begin + [skipped, count)`` from rows that do not see them."""
    if skipped >= count:
        return
    scores, token = room.scores + skipped * ROW_BYTES, begin + skipped
    if vectors == 3:
        hide_scores(3, scores, count - skipped, token, positions, window)
    elif vectors == 2:
        hide_scores(2, scores, count - skipped, token, positions, window)
    else:
        hide_scores(1, scores, count - skipped, token, positions, window)


@inlined
def weigh(
    heads: PrefillHeads, tile: int, vectors: int, count: int, factor: Any, room: Room
) -> None:
    """Make weights of the scores of `count` tokens."""
    scores, weights, decay = room.scores, room.weights, room.decay
    most, totals = room.largest + tile * ROW_BYTES, room.totals + tile * ROW_BYTES
    if vectors == 3:
        weigh_block(3, heads.unit, scores, count, factor, most, totals, decay, weights)
    elif vectors == 2:
        weigh_block(2, heads.unit, scores, count, factor, most, totals, decay, weights)
    else:
        weigh_block(1, heads.unit, scores, count, factor, most, totals, decay, weights)


@inlined
def add_values(heads: PrefillHeads, tile: int, vectors: int, count: int, room: Room) -> None:
    """Add `count` tokens' values by their weights to a tile's sums."""
    weights, decay, width, length = room.weights, room.decay, room.width, count // room.numbers
    for dimension in range(0, width, OTHERS):
        values = room.values + dimension * WORD
        sums = room.sums + (tile * width + dimension) * ROW_BYTES
        if vectors == 3:
            value_tile(3, heads.unit, weights, values, length, width, decay, sums)
        elif vectors == 2:
            value_tile(2, heads.unit, weights, values, length, width, decay, sums)
        else:
            value_tile(1, heads.unit, weights, values, length, width, decay, sums)


@inlined
def add_sinks(
    heads: PrefillHeads, head: int, first: int, lanes: int, largest: Array, totals: Array
) -> None:
    """Add to a tile's ``totals [lanes]`` the weights of the sinks of its rows from `first` on.

    `head` is the first query head of its group. A weight is infinite if a sink is far above all
    scores: values then weigh nothing.
    """
    factor = _LOG2_E if heads.softcap > 0 else heads.scale * _LOG2_E
    for r in range(lanes):
        sink = read_float(heads.sinks, head + (first + r) % heads.group)
        totals[r] += np.exp2(sink * _LOG2_E - largest[r] * factor)


@inlined
def write_sums(
    heads: PrefillHeads,
    head: int,
    first: int,
    count: int,
    strip: Strip,
    scratch: PrefillScratch,
    out: Array,
) -> None:
    """Divide a strip's `sums` by its `totals` into ``out [T, num_heads * value_dim]``."""
    group, rounded = heads.group, scratch.rounded
    for tile in range(strip.tiles):
        begin = LANES * find_tile(strip, tile)
        lanes = LANES * find_tile(strip, tile + 1) - begin
        sums, totals = scratch.sums[tile], scratch.totals[tile]
        if heads.sinks:
            add_sinks(heads, head * group, first + begin, lanes, scratch.largest[tile], totals)
        for d in range(heads.value_dim):
            for r in range(lanes):
                store(rounded[d], r, sums[d, r] / totals[r])
        for r in range(min(lanes, count - begin)):
            row = first + begin + r
            at = (head * group + row % group) * heads.value_dim
            to = out[row // group, at : at + heads.value_dim]
            for d in range(heads.value_dim):
                to[d] = rounded[d, r]
