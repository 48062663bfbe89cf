"""Decode attention on a CPU: one query row a sequence over its pages, read in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from kvrelay.model_runner.cpu_kernels import Array
from kvrelay.model_runner.jit import exp_of_negative, inlined, kernel, prefetch, store, widen

_LINE = 32
"""Elements between prefetches: a cache line of bfloat16 (in float32 every other line)."""

DecodeKernel = Callable[[Array, int, int, int, Array, Array, Array, Array, Array], None]


@cache
def make_decode_kernel(kv_heads: int, group: int, head_dim: int) -> DecodeKernel:
    """The kernel for `kv_heads`, each shared by `group` query heads.

    They are constants when it is compiled: unrolling over them makes it three
    times as fast.
    """

    @kernel
    def attend(
        pages: Array,
        layer_start: int,
        page_stride: int,
        page_size: int,
        qkv: Array,
        rows: Array,
        page_tables: Array,
        seq_lens: Array,
        out: Array,
    ) -> None:
        """Rows of ``qkv [T, heads, D]`` to rows of ``out [T, num_heads * D]``, one a sequence.

        Three passes a sequence, all in float32: scores, softmax, weighted sum.
        """
        queries = np.empty((kv_heads * group, head_dim), np.float32)
        sums = np.empty((kv_heads * group, head_dim), np.float32)
        scores = np.empty((kv_heads * group, seq_lens.max()), np.float32)
        run = page_size * head_dim
        for b in range(len(rows)):
            tokens = seq_lens[b]
            page_count = (tokens + page_size - 1) // page_size
            starts = layer_start + page_tables[b, :page_count].astype(np.int64) * page_stride
            load_queries(qkv[rows[b]], queries, head_dim)
            add_scores(pages, starts, run, queries, tokens, scores, kv_heads, group, head_dim)
            softmax(scores, tokens)
            starts += kv_heads * run
            add_values(pages, starts, run, scores, tokens, sums, kv_heads, group, head_dim)
            store_sums(sums, out[rows[b]], head_dim)

    return attend


@inlined
def load_queries(heads: Array, queries: Array, head_dim: int) -> None:
    """Scale the first of ``heads [heads, D]`` into ``queries [num_heads, D]``."""
    scale = np.float32(1.0 / np.sqrt(head_dim))
    for head in range(queries.shape[0]):
        for d in range(head_dim):
            queries[head, d] = widen(heads[head, d]) * scale


@inlined
def store_sums(sums: Array, out: Array, head_dim: int) -> None:
    """Round ``sums [num_heads, D]`` into ``out [num_heads * D]``."""
    for head in range(sums.shape[0]):
        for d in range(head_dim):
            store(out, head * head_dim + d, sums[head, d])


@inlined
def prefetch_next(pages: Array, starts: Array, p: int, offset: int, run: int) -> None:
    """Fetch a head's run of the page after `p`: it lies anywhere, hardware cannot foresee it."""
    ahead = starts[min(p + 1, len(starts) - 1)] + offset
    for line in range(0, run, _LINE):
        prefetch(pages, ahead + line)


@inlined
def add_scores(
    pages: Array,
    starts: Array,
    run: int,
    queries: Array,
    tokens: int,
    scores: Array,
    kv_heads: int,
    group: int,
    head_dim: int,
) -> None:
    """``scores [num_heads, tokens]`` of ``queries [num_heads, D]`` with a sequence's keys.

    Its pages' keys begin at `starts`; a head's `run` is ``page_size * head_dim``.
    """
    page_size = run // head_dim
    for p in range(len(starts)):
        first = p * page_size
        for h in range(kv_heads):
            prefetch_next(pages, starts, p, h * run, run)
            at = starts[p] + h * run
            for token in range(min(page_size, tokens - first)):
                key = pages[at + token * head_dim : at + (token + 1) * head_dim]
                for g in range(group):
                    score = np.float32(0)
                    for d in range(head_dim):
                        score += queries[h * group + g, d] * widen(key[d])
                    scores[h * group + g, first + token] = score


@inlined
def softmax(scores: Array, tokens: int) -> None:
    """Each row's first `tokens`, in place."""
    for head in range(scores.shape[0]):
        row = scores[head, :tokens]
        largest = row[0]
        for token in range(tokens):
            largest = max(largest, row[token])
        total = np.float32(0)
        for token in range(tokens):
            weight = exp_of_negative(row[token] - largest)
            row[token] = weight
            total += weight
        inverse = np.float32(1.0) / total
        for token in range(tokens):
            row[token] *= inverse


@inlined
def add_values(
    pages: Array,
    starts: Array,
    run: int,
    weights: Array,
    tokens: int,
    sums: Array,
    kv_heads: int,
    group: int,
    head_dim: int,
) -> None:
    """``sums [num_heads, D]`` of a sequence's values by ``weights [num_heads, tokens]``.

    Its pages' values begin at `starts`; a head's `run` is ``page_size * head_dim``.
    """
    page_size = run // head_dim
    sums[:] = 0
    for p in range(len(starts)):
        first = p * page_size
        count = min(page_size, tokens - first)
        for h in range(kv_heads):
            prefetch_next(pages, starts, p, h * run, run)
            values = pages[starts[p] + h * run : starts[p] + (h + 1) * run]
            for g in range(group):
                head = h * group + g
                add_weighted(values, weights[head, first : first + count], sums[head], head_dim)


@inlined
def add_weighted(values: Array, weights: Array, total: Array, head_dim: int) -> None:
    """Add rows of ``values [tokens * D]`` to ``total [D]``, by ``weights [tokens]``."""
    fours = len(weights) // 4 * 4
    # Four at a time: the total is then loaded and stored a quarter as often.
    for token in range(0, fours, 4):
        block = values[token * head_dim : (token + 4) * head_dim]
        w0, w1, w2, w3 = weights[token], weights[token + 1], weights[token + 2], weights[token + 3]
        for d in range(head_dim):
            total[d] += (
                w0 * widen(block[d])
                + w1 * widen(block[head_dim + d])
                + w2 * widen(block[2 * head_dim + d])
                + w3 * widen(block[3 * head_dim + d])
            )
    for token in range(fours, len(weights)):
        for d in range(head_dim):
            total[d] += weights[token] * widen(values[token * head_dim + d])
