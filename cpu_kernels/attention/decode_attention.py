"""Decode attention on a CPU: one query row a sequence over its pages, read in place."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvrelay.cpu_kernels.arrays import Array
from kvrelay.cpu_kernels.attention.decode_lanes import MOST_HEADS, score_page, weigh_page
from kvrelay.cpu_kernels.jit import (
    array_at,
    exp_of_negative,
    inlined,
    kernel,
    prefetch,
    store,
    team_part,
    widen,
)
from kvrelay.cpu_kernels.pair_memory import read_float
from kvrelay.cpu_kernels.team import run_on_team, take

_LINE = 32
"""Elements between prefetches: a cache line of bfloat16 (in float32 every other line)."""


@kernel
def attend_rows(
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
    """Attend for rows of ``new [T, heads, D]`` into rows of ``out [T, num_heads * value_dim]``.

    Both are given by their address, `new` with its shape; they have the dtype of `pages`.

    Each sequence has one row, computed in float32 passes: scores (bent by a `softcap` unless it is
    0), softmax, weighted sum. `sinks` is the address of ``[num_heads]`` float32, 0 if there are
    none. `page_table` is read from the page of the first token within the `window` on. With one
    part, keys are also the values, up to the value dimension.
    """
    tokens, _, head_dim = shape
    value_offset = (parts - 1) * kv_heads * page_size * head_dim
    args = (
        np.zeros(1, np.int64),
        pages,
        layer_start,
        page_stride,
        page_size,
        kv_heads,
        value_offset,
        window,
        np.float32(scale),
        np.float32(softcap),
        sinks,
        array_at(new, shape, pages.dtype),
        num_heads,
        rows,
        page_table,
        seq_lens,
        array_at(out, (tokens, num_heads * value_dim), pages.dtype),
    )
    run_on_team(threads, attend_remaining_rows, args)


@team_part
def attend_remaining_rows(
    counter: Array,
    pages: Array,
    layer_start: int,
    page_stride: int,
    page_size: int,
    kv_heads: int,
    value_offset: int,
    window: int,
    scale: Any,
    softcap: Any,
    sinks: int,
    new: Array,
    num_heads: int,
    rows: Array,
    page_table: Array,
    seq_lens: Array,
    out: Array,
) -> None:
    """Attend for the next row until there is none left."""
    head_dim, value_dim = new.shape[2], out.shape[1] // num_heads
    queries = np.empty((num_heads, head_dim), np.float32)
    sums = np.empty((num_heads, value_dim), np.float32)
    longest = min(seq_lens.max(), window + page_size)
    scores = np.empty((num_heads, longest), np.float32)
    while True:
        b = take(counter, 1)
        if b >= len(rows):
            break
        first_page = max(0, seq_lens[b] - window) // page_size
        end_page = (seq_lens[b] + page_size - 1) // page_size
        starts = page_table[b, first_page:end_page].astype(np.int64) * page_stride + layer_start
        # Of these pages' tokens, [skipped, tokens) are visible.
        tokens = seq_lens[b] - first_page * page_size
        skipped = max(0, tokens - window)
        load_queries(new[rows[b]], queries, scale)
        add_scores(pages, starts, page_size, kv_heads, queries, skipped, tokens, scores)
        if softcap > 0:
            cap(scores, skipped, tokens, softcap)
        softmax(scores, skipped, tokens, sinks)
        starts += value_offset
        add_values(pages, starts, page_size, kv_heads, head_dim, scores, skipped, tokens, sums)
        store_sums(sums, out[rows[b]])


@inlined
def load_queries(heads: Array, queries: Array, scale: float) -> None:
    """Scale the first of ``heads [heads, D]`` into ``queries [num_heads, D]``."""
    factor = np.float32(scale)
    for head in range(queries.shape[0]):
        for d in range(queries.shape[1]):
            queries[head, d] = widen(heads[head, d]) * factor


@inlined
def store_sums(sums: Array, out: Array) -> None:
    """Round ``sums [num_heads, value_dim]`` into ``out [num_heads * value_dim]``."""
    value_dim = sums.shape[1]
    for head in range(sums.shape[0]):
        for d in range(value_dim):
            store(out, head * value_dim + d, sums[head, d])


@inlined
def prefetch_next(pages: Array, starts: Array, p: int, offset: int, run: int) -> None:
    """Fetch a head's run of the page after `p`: hardware cannot foresee where it lies.

    The whole run is fetched at once and no earlier: spread over the tokens, or further ahead, it
    gains less.
    """
    ahead = starts[min(p + 1, len(starts) - 1)] + offset
    for line in range(0, run, _LINE):
        prefetch(pages, ahead + line)


@inlined
def add_scores(
    pages: Array,
    starts: Array,
    page_size: int,
    kv_heads: int,
    queries: Array,
    skipped: int,
    tokens: int,
    scores: Array,
) -> None:
    """Compute ``scores [num_heads, tokens]`` of ``queries [num_heads, D]`` with a sequence's keys.

    The pages' keys begin at `starts`. Keys of the first `skipped` tokens are not read.
    """
    num_heads, head_dim = queries.shape
    run, group = page_size * head_dim, num_heads // kv_heads
    for p in range(len(starts)):
        first = p * page_size
        begin, end = max(0, skipped - first), min(page_size, tokens - first)
        for h in range(kv_heads):
            prefetch_next(pages, starts, p, h * run, run)
            at = starts[p] + h * run + begin * head_dim
            score_heads(pages, at, end - begin, queries, h * group, group, scores, first + begin)


@inlined
def score_heads(
    pages: Array,
    at: int,
    count: int,
    queries: Array,
    first: int,
    group: int,
    scores: Array,
    to: int,
) -> None:
    """Call `score_page` for `group` heads, for as many at once as there can be."""
    end = first + group
    while end - first >= MOST_HEADS:
        score_page(MOST_HEADS, pages, at, count, queries, first, scores, to)
        first += MOST_HEADS
    if end - first == 3:
        score_page(3, pages, at, count, queries, first, scores, to)
    elif end - first == 2:
        score_page(2, pages, at, count, queries, first, scores, to)
    elif end - first == 1:
        score_page(1, pages, at, count, queries, first, scores, to)


@inlined
def bend(score: Any, softcap: Any) -> Any:
    """``softcap * tanh(score / softcap)`` of float32 numbers"""
    decay = exp_of_negative(np.float32(-2.0) * abs(score) / softcap)
    bent = softcap * (np.float32(1.0) - decay) / (np.float32(1.0) + decay)
    return bent if score >= 0 else -bent


@inlined
def cap(scores: Array, skipped: int, tokens: int, softcap: float) -> None:
    """Bend each row's ``[skipped, tokens)`` to ``softcap * tanh(score / softcap)``, in place."""
    for head in range(scores.shape[0]):
        row = scores[head, skipped:tokens]
        for token in range(len(row)):
            row[token] = bend(row[token], np.float32(softcap))


@inlined
def softmax(scores: Array, skipped: int, tokens: int, sinks: int) -> None:
    """Apply softmax to each row's ``[skipped, tokens)``, in place; a sink takes a share, too."""
    for head in range(scores.shape[0]):
        row = scores[head, skipped:tokens]
        largest = read_float(sinks, head) if sinks else row[0]
        for token in range(len(row)):
            largest = max(largest, row[token])
        total = np.float32(0)
        for token in range(len(row)):
            weight = exp_of_negative(row[token] - largest)
            row[token] = weight
            total += weight
        if sinks:
            total += exp_of_negative(read_float(sinks, head) - largest)
        inverse = np.float32(1.0) / total
        for token in range(len(row)):
            row[token] *= inverse


@inlined
def add_values(
    pages: Array,
    starts: Array,
    page_size: int,
    kv_heads: int,
    head_dim: int,
    weights: Array,
    skipped: int,
    tokens: int,
    sums: Array,
) -> None:
    """Sum values by ``weights [num_heads, tokens]`` into ``sums [num_heads, value_dim]``.

    The pages' values begin at `starts`, one every `head_dim` elements. Values of the first
    `skipped` tokens are not read.
    """
    run, group = page_size * head_dim, len(sums) // kv_heads
    sums[:] = 0
    for p in range(len(starts)):
        first = p * page_size
        begin, end = max(0, skipped - first), min(page_size, tokens - first)
        for h in range(kv_heads):
            prefetch_next(pages, starts, p, h * run, run)
            at = starts[p] + h * run + begin * head_dim
            weigh_heads(
                pages, at, end - begin, head_dim, weights, first + begin, sums, h * group, group
            )


@inlined
def weigh_heads(
    pages: Array,
    at: int,
    count: int,
    head_dim: int,
    weights: Array,
    of: int,
    sums: Array,
    first: int,
    group: int,
) -> None:
    """Call `weigh_page` for `group` heads, for as many at once as there can be."""
    end = first + group
    while end - first >= MOST_HEADS:
        weigh_page(MOST_HEADS, pages, at, count, head_dim, weights, of, sums, first)
        first += MOST_HEADS
    if end - first == 3:
        weigh_page(3, pages, at, count, head_dim, weights, of, sums, first)
    elif end - first == 2:
        weigh_page(2, pages, at, count, head_dim, weights, of, sums, first)
    elif end - first == 1:
        weigh_page(1, pages, at, count, head_dim, weights, of, sums, first)
