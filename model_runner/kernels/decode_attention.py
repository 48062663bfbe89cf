"""Decode attention on a CPU: one query row a sequence over its pages, read in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from kvrelay.model_runner.kernels.arrays import Array
from kvrelay.model_runner.kernels.jit import (
    exp_of_negative,
    inlined,
    kernel,
    prefetch,
    store,
    widen,
)

_LINE = 32
"""Elements between prefetches: a cache line of bfloat16 (in float32 every other line)."""

DecodeKernel = Callable[
    [Array, int, int, int, int, float, float, Array, Array, Array, Array, Array], None
]


@cache
def make_decode_kernel(
    parts: int, kv_heads: int, group: int, head_dim: int, value_dim: int
) -> DecodeKernel:
    """The kernel for pages of `parts` and `kv_heads`, each shared by `group` query heads.

    They are constants when it is compiled: unrolling over them makes it three
    times as fast. With one part, keys are also the values, up to `value_dim`.
    """

    @kernel
    def attend(
        pages: Array,
        layer_start: int,
        page_stride: int,
        page_size: int,
        window: int,
        scale: float,
        softcap: float,
        new: Array,
        rows: Array,
        page_table: Array,
        seq_lens: Array,
        out: Array,
    ) -> None:
        """Rows of ``new [T, heads, D]`` to rows of ``out [T, num_heads * value_dim]``.

        One row a sequence, in passes that are all in float32: scores (bent by a
        `softcap` that is not 0), softmax, weighted sum. `page_table` is read from
        the page of the first token within the `window` on.
        """
        queries = np.empty((kv_heads * group, head_dim), np.float32)
        sums = np.empty((kv_heads * group, value_dim), np.float32)
        longest = min(seq_lens.max(), window + page_size)
        scores = np.empty((kv_heads * group, longest), np.float32)
        run = page_size * head_dim
        for b in range(len(rows)):
            first_page = max(0, seq_lens[b] - window) // page_size
            end_page = (seq_lens[b] + page_size - 1) // page_size
            starts = page_table[b, first_page:end_page].astype(np.int64) * page_stride + layer_start
            # Of these pages' tokens, [skipped, tokens) are visible.
            tokens = seq_lens[b] - first_page * page_size
            skipped = max(0, tokens - window)
            load_queries(new[rows[b]], queries, scale)
            add_scores(pages, starts, run, queries, skipped, tokens, scores, kv_heads, group)
            if softcap > 0:
                cap(scores, skipped, tokens, softcap)
            softmax(scores, skipped, tokens)
            if parts == 2:
                starts += kv_heads * run
            add_values(pages, starts, run, scores, skipped, tokens, sums, kv_heads, group, head_dim)
            store_sums(sums, out[rows[b]])

    return attend


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
    skipped: int,
    tokens: int,
    scores: Array,
    kv_heads: int,
    group: int,
) -> None:
    """``scores [num_heads, tokens]`` of ``queries [num_heads, D]`` with a sequence's keys.

    Its pages' keys begin at `starts`; a head's `run` is ``page_size * head_dim``.
    Those of the first `skipped` tokens are not read.
    """
    head_dim = queries.shape[1]
    page_size = run // head_dim
    for p in range(len(starts)):
        first = p * page_size
        for h in range(kv_heads):
            prefetch_next(pages, starts, p, h * run, run)
            at = starts[p] + h * run
            for token in range(max(0, skipped - first), min(page_size, tokens - first)):
                key = pages[at + token * head_dim : at + (token + 1) * head_dim]
                for g in range(group):
                    score = np.float32(0)
                    for d in range(head_dim):
                        score += queries[h * group + g, d] * widen(key[d])
                    scores[h * group + g, first + token] = score


@inlined
def bend(score: Any, softcap: Any) -> Any:
    """``softcap * tanh(score / softcap)`` of float32 numbers"""
    decay = exp_of_negative(np.float32(-2.0) * abs(score) / softcap)
    bent = softcap * (np.float32(1.0) - decay) / (np.float32(1.0) + decay)
    return bent if score >= 0 else -bent


@inlined
def cap(scores: Array, skipped: int, tokens: int, softcap: float) -> None:
    """``softcap * tanh(score / softcap)`` of each row's ``[skipped, tokens)``, in place."""
    for head in range(scores.shape[0]):
        row = scores[head, skipped:tokens]
        for token in range(len(row)):
            row[token] = bend(row[token], np.float32(softcap))


@inlined
def softmax(scores: Array, skipped: int, tokens: int) -> None:
    """Each row's ``[skipped, tokens)``, in place."""
    for head in range(scores.shape[0]):
        row = scores[head, skipped:tokens]
        largest = row[0]
        for token in range(len(row)):
            largest = max(largest, row[token])
        total = np.float32(0)
        for token in range(len(row)):
            weight = exp_of_negative(row[token] - largest)
            row[token] = weight
            total += weight
        inverse = np.float32(1.0) / total
        for token in range(len(row)):
            row[token] *= inverse


@inlined
def add_values(
    pages: Array,
    starts: Array,
    run: int,
    weights: Array,
    skipped: int,
    tokens: int,
    sums: Array,
    kv_heads: int,
    group: int,
    head_dim: int,
) -> None:
    """``sums [num_heads, value_dim]`` of a sequence's values by ``weights [num_heads, tokens]``.

    Its pages' values begin at `starts`; a head's `run` is ``page_size * head_dim``.
    Those of the first `skipped` tokens are not read.
    """
    page_size = run // head_dim
    sums[:] = 0
    for p in range(len(starts)):
        first = p * page_size
        begin, end = max(0, skipped - first), min(page_size, tokens - first)
        for h in range(kv_heads):
            prefetch_next(pages, starts, p, h * run, run)
            values = pages[starts[p] + h * run + begin * head_dim : starts[p] + (h + 1) * run]
            for g in range(group):
                head = h * group + g
                add_weighted(
                    values, weights[head, first + begin : first + end], sums[head], head_dim
                )


@inlined
def add_weighted(values: Array, weights: Array, total: Array, head_dim: int) -> None:
    """Add to ``total [value_dim]`` the begins of rows of ``values [tokens * head_dim]``.

    By ``weights [tokens]``.
    """
    value_dim = len(total)
    fours = len(weights) // 4 * 4
    # Four at a time: the total is then loaded and stored a quarter as often.
    for token in range(0, fours, 4):
        block = values[token * head_dim : (token + 4) * head_dim]
        w0, w1, w2, w3 = weights[token], weights[token + 1], weights[token + 2], weights[token + 3]
        for d in range(value_dim):
            total[d] += (
                w0 * widen(block[d])
                + w1 * widen(block[head_dim + d])
                + w2 * widen(block[2 * head_dim + d])
                + w3 * widen(block[3 * head_dim + d])
            )
    for token in range(fours, len(weights)):
        for d in range(value_dim):
            total[d] += weights[token] * widen(values[token * head_dim + d])
