"""Decode attention on a CPU in pairs of bfloat16: a query row a sequence, its pages in place.

A sequence's tokens are computed in blocks of `TOKENS`, which begin at multiples of it. A block
within one page that is visible as a whole is read in place. Other blocks are copied, with zeros in
place of tokens that are not visible. While a block is computed, the same head's part of the next
one is fetched, line by line: hardware cannot foresee where pages lie.

Inner functions take addresses, as numba would count references of arrays. That takes two atomic
operations of 20 cycles each, while 16 tokens of a head should take 100.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvrelay.cpu_kernels.arrays import Array
from kvrelay.cpu_kernels.attention.pair_lanes import (
    TOKENS,
    bend_scores,
    find_shift,
    score_block,
    weigh_scores,
    weigh_values,
    write_head,
)
from kvrelay.cpu_kernels.jit import inlined, kernel, team_part
from kvrelay.cpu_kernels.lanes import LANES
from kvrelay.cpu_kernels.pair_memory import (
    address_of,
    clear,
    copy,
    read_float,
    read_int32,
    read_int64,
    write_float,
    write_int64,
)
from kvrelay.cpu_kernels.team import run_on_team, take

MOST_HEADS = 4
"""The most heads with a shared head of keys and values that are computed at once."""
_AHEAD = 1
"""The blocks from the one that is computed to the one that is fetched."""
_LOG2_E = np.float32(1.44269504)
_NOT_SEEN = np.float32(-np.inf)
_SUMS = 4
"""The bytes of a float32, the type of scores and sums."""
_LANES = LANES * _SUMS
"""The bytes of a vector of float32."""


class DecodeHeads(NamedTuple):
    """A layer's pages, the layout of heads in them, and their weighing. Sizes are in bytes."""

    layer: int
    """The address of the layer's first page."""
    page_stride: int
    token: int
    """The bytes of one token's key, or value, in a head."""
    page_size: int
    """Tokens a page."""
    kv_heads: int
    values: int
    """The distance from a key to its value: 0 for a latent, which is both."""
    head_dim: int
    value_dim: int
    group: int
    """The query heads that share a head of keys and values."""
    window: int
    scale: Any
    softcap: Any
    """The softcap; 0: there is none."""
    sinks: int
    """The address of ``[num_heads]`` float32; 0: there are none."""


class Row(NamedTuple):
    """A query row, and the tokens that it sees: ``[skipped, tokens)`` of its blocks."""

    queries: int
    """The address of ``[num_heads, head_dim]``."""
    page_ids: int
    """The address of its sequence's page ids."""
    first: int
    """The index of the row's first block in the sequence."""
    blocks: int
    skipped: int
    tokens: int


class DecodeScratch(NamedTuple):
    """The addresses of a thread's working memory."""

    starts: int
    """``[blocks + _AHEAD]`` addresses: a block's first key, if in place; then the first values."""
    scores: int
    """``[num_heads, width]`` float32; each row later begins with bfloat16 weights."""
    width: int
    """The tokens of a row of scores."""
    shift: int
    """``[LANES]`` float32: the shift that is added to a head's scaled scores."""
    totals: int
    """``[num_heads, LANES]`` float32: the sums of weights."""
    sums: int
    """``[num_heads, value_dim]`` float32, in the order of `pair_lanes`."""
    copies: int
    """``[TOKENS, head_dim]`` bfloat16 of a block that is not in place."""


@kernel
def attend_rows_in_pairs(
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
    rows: Array,
    page_table: Array,
    seq_lens: Array,
    out: int,
) -> None:
    """Attend as `decode_attention.attend_rows` does, in pairs of bfloat16.

    Queries are those of `new`, and are not scaled. Dimensions are multiples of `DIMENSIONS`.
    """
    _, new_heads, head_dim = shape
    heads = DecodeHeads(
        address_of(pages) + 2 * layer_start,
        2 * page_stride,
        2 * head_dim,
        page_size,
        kv_heads,
        2 * (parts - 1) * kv_heads * page_size * head_dim,
        head_dim,
        value_dim,
        num_heads // kv_heads,
        window,
        np.float32(scale),
        np.float32(softcap),
        sinks,
    )
    counter = np.zeros(1, np.int64)
    query_row = 2 * new_heads * head_dim
    args = (counter, heads, new, query_row, num_heads, rows, page_table, seq_lens, out)
    run_on_team(threads, attend_remaining_rows_in_pairs, args)


@team_part
def attend_remaining_rows_in_pairs(
    counter: Array,
    heads: DecodeHeads,
    queries: int,
    query_row: int,
    num_heads: int,
    rows: Array,
    page_table: Array,
    seq_lens: Array,
    results: int,
) -> None:
    """Attend for the next row until there is none left.

    `queries` and `results` are addresses; a token has `query_row` bytes of `queries`.
    """
    blocks = min(seq_lens.max(), heads.window) // TOKENS + 2
    starts = np.empty(blocks + _AHEAD, np.int64)
    floats = np.empty(num_heads * (blocks * TOKENS + LANES + heads.value_dim) + LANES, np.float32)
    copies = np.empty(TOKENS * heads.head_dim, np.uint16)
    scores, width = address_of(floats), blocks * TOKENS
    shift = scores + num_heads * width * _SUMS
    totals = shift + _LANES
    sums = totals + num_heads * _LANES
    room = DecodeScratch(address_of(starts), scores, width, shift, totals, sums, address_of(copies))
    result_row = 2 * num_heads * heads.value_dim
    table, table_row = address_of(page_table), 4 * page_table.shape[1]
    while True:
        b = take(counter, 1)
        if b >= len(rows):
            break
        query = queries + rows[b] * query_row
        row = find_blocks(heads, query, table + b * table_row, seq_lens[b], room.starts)
        attend_row(heads, row, room, num_heads, results + rows[b] * result_row)
    # Numba frees an array after its last use.
    starts[0], floats[0], copies[0] = 0, 0, 0


@inlined
def attend_row(heads: DecodeHeads, row: Row, room: DecodeScratch, num_heads: int, out: int) -> None:
    """Attend for a row into ``out [num_heads * value_dim]``."""
    add_scores(heads, row, room)
    weigh(heads, row, room)
    add_values(heads, row, room)
    for head in range(num_heads):
        place = head * heads.value_dim
        sums, totals = room.sums + place * _SUMS, room.totals + head * _LANES
        write_head(sums, totals, heads.value_dim, out + 2 * place)


@inlined
def find_blocks(heads: DecodeHeads, queries: int, page_ids: int, seq_len: int, starts: int) -> Row:
    """Find the blocks that a sequence's last token sees, and their addresses (`starts`)."""
    oldest = max(0, seq_len - heads.window)
    first, end = oldest // TOKENS, (seq_len + TOKENS - 1) // TOKENS
    for block in range(first, end):
        # Of a block in several pages the first may be one that is no longer held.
        token = max(oldest, block * TOKENS)
        page = read_int32(page_ids, token // heads.page_size)
        slot = block * TOKENS % heads.page_size
        start = heads.layer + page * heads.page_stride + slot * heads.token
        write_int64(starts, block - first, start)
    for block in range(_AHEAD):
        write_int64(starts, end - first + block, read_int64(starts, block) + heads.values)
    below = first * TOKENS
    return Row(queries, page_ids, first, end - first, oldest - below, seq_len - below)


@inlined
def find_head(
    heads: DecodeHeads, row: Row, room: DecodeScratch, block: int, head: int, offset: int
) -> int:
    """The address of a head's keys of a block, or at an `offset` its values."""
    at = head * heads.page_size * heads.token + offset
    begin = max(0, row.skipped - block * TOKENS)
    end = min(TOKENS, row.tokens - block * TOKENS)
    if heads.page_size % TOKENS == 0 and begin == 0 and end == TOKENS:
        start: int = read_int64(room.starts, block)
        return start + at
    copy_block(heads, row, block, at, begin, end, room.copies)
    return room.copies


@inlined
def find_ahead(
    heads: DecodeHeads, row: Row, room: DecodeScratch, block: int, head: int, offset: int
) -> int:
    """The address of the block `_AHEAD` blocks after `find_head`'s, for the same head."""
    ahead: int = read_int64(room.starts, block + _AHEAD) + head * heads.page_size * heads.token
    return ahead + offset if block + _AHEAD < row.blocks else ahead


@inlined
def copy_block(
    heads: DecodeHeads, row: Row, block: int, offset: int, begin: int, end: int, copies: int
) -> None:
    """Copy the tokens ``[begin, end)`` of a block; zeros in place of the others."""
    clear(copies, TOKENS * heads.token)
    page_size, token = heads.page_size, begin
    while token < end:
        position = (row.first + block) * TOKENS + token
        page, slot = read_int32(row.page_ids, position // page_size), position % page_size
        count = min(page_size - slot, end - token)
        start = heads.layer + page * heads.page_stride + slot * heads.token
        copy(copies + token * heads.token, start + offset, count * heads.token)
        token += count


@inlined
def add_scores(heads: DecodeHeads, row: Row, room: DecodeScratch) -> None:
    """Compute the scores of the queries with all blocks' keys."""
    for block in range(row.blocks):
        for head in range(heads.kv_heads):
            keys = find_head(heads, row, room, block, head, 0)
            ahead = find_ahead(heads, row, room, block, head, 0)
            score_heads(heads, keys, row.queries, head * heads.group, block, room, ahead)


@inlined
def score_heads(
    heads: DecodeHeads,
    keys: int,
    queries: int,
    first: int,
    block: int,
    room: DecodeScratch,
    ahead: int,
) -> None:
    """Call `score_block` for a group of heads, for as many at once as there can be."""
    left, depth, width = heads.group, heads.head_dim, room.width
    query = queries + first * heads.token
    to = room.scores + (first * width + block * TOKENS) * _SUMS
    while left >= MOST_HEADS:
        score_block(MOST_HEADS, keys, query, depth, to, width, ahead)
        left -= MOST_HEADS
        query += MOST_HEADS * heads.token
        to += MOST_HEADS * width * _SUMS
    if left == 3:
        score_block(3, keys, query, depth, to, width, ahead)
    elif left == 2:
        score_block(2, keys, query, depth, to, width, ahead)
    elif left == 1:
        score_block(1, keys, query, depth, to, width, ahead)


@inlined
def weigh(heads: DecodeHeads, row: Row, room: DecodeScratch) -> None:
    """Make weights and totals of scores, which are bent, and hidden where tokens are not seen."""
    for head in range(heads.kv_heads * heads.group):
        scores = room.scores + head * room.width * _SUMS
        if heads.softcap > 0:
            bend_scores(scores, row.blocks, heads.scale, heads.softcap)
        for token in range(row.skipped):
            write_float(scores, token, _NOT_SEEN)
        for token in range(row.tokens, row.blocks * TOKENS):
            write_float(scores, token, _NOT_SEEN)
        slope = _LOG2_E if heads.softcap > 0 else heads.scale * _LOG2_E
        find_shift(scores, row.blocks, slope, room.shift)
        totals = room.totals + head * _LANES
        weigh_scores(scores, row.blocks, slope, room.shift, totals)
        if heads.sinks:
            # Infinite for a sink far above all scores: values then weigh nothing.
            weight = np.exp2(read_float(heads.sinks, head) * _LOG2_E + read_float(room.shift, 0))
            write_float(totals, 0, read_float(totals, 0) + weight)


@inlined
def add_values(heads: DecodeHeads, row: Row, room: DecodeScratch) -> None:
    """Add up all blocks' values by their weights."""
    clear(room.sums, heads.kv_heads * heads.group * heads.value_dim * _SUMS)
    for block in range(row.blocks):
        for head in range(heads.kv_heads):
            values = find_head(heads, row, room, block, head, heads.values)
            ahead = find_ahead(heads, row, room, block, head, heads.values)
            weigh_heads(heads, values, head * heads.group, block, room, ahead)


@inlined
def weigh_heads(
    heads: DecodeHeads, values: int, first: int, block: int, room: DecodeScratch, ahead: int
) -> None:
    """Call `weigh_values` for a group of heads, for as many at once as there can be."""
    left, step, depth, width = heads.group, heads.head_dim, heads.value_dim, 2 * room.width
    weights = room.scores + first * room.width * _SUMS + block * TOKENS * 2
    sums = room.sums + first * depth * _SUMS
    while left >= MOST_HEADS:
        weigh_values(MOST_HEADS, values, step, weights, width, sums, depth, ahead)
        left -= MOST_HEADS
        weights += MOST_HEADS * width * 2
        sums += MOST_HEADS * depth * _SUMS
    if left == 3:
        weigh_values(3, values, step, weights, width, sums, depth, ahead)
    elif left == 2:
        weigh_values(2, values, step, weights, width, sums, depth, ahead)
    elif left == 1:
        weigh_values(1, values, step, weights, width, sums, depth, ahead)
