"""A step's batch, padded to the shape of a graph.

There are as many sequences as the graph has, and each takes as many rows. A sequence's own tokens
are in the last of its rows. In the rows before them, as in those of the sequences that are missing,
stands token 0, written to the dummy page. So no page of a request is touched. Queries of such rows
see tokens that exist, and nobody reads their results::

    sequence          0                   1              none
    row         0   1   2   3       4   5   6   7      8 ... 11
    token       .   .   5   6       7   8   9  10      .   .   .        (. is a dummy)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvrelay.mem_cache.geometry import KVGeometry
from kvrelay.model_runner.attention.paged_plan import PagedPlan, plan_pages
from kvrelay.model_runner.batch import ForwardBatch, Int32Array, Int64Array, new_token_slots
from kvrelay.model_runner.config.cuda_graphs import GraphShape


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """A batch in the shape of a graph."""

    batch: ForwardBatch
    """The batch, with the sequences that were missing behind its own ones."""
    shape: GraphShape
    rows: Int64Array
    """``[T]`` the row of each of the batch's tokens."""

    def spread(self, values: Int64Array, dummy: int = 0) -> Int64Array:
        """``[rows]``: the values of the batch's tokens in their rows, and `dummy` in others."""
        spread = np.full(self.shape.rows, dummy, np.int64)
        spread[self.rows] = values
        return spread

    def plan(self, geometry: KVGeometry) -> PagedPlan:
        """Lay the batch out for a pool: each sequence has queries in all of its rows."""
        starts = np.arange(self.shape.size + 1, dtype=np.int32) * np.int32(self.shape.each)
        return replace(plan_pages(self.batch, geometry), query_indptr=starts)

    def new_token_slots(
        self, page_table: Int32Array, page_size: int, dummy_page: int
    ) -> tuple[Int32Array, Int32Array]:
        """The pages that tokens of all rows are written to, and their places there."""
        pages, slots = new_token_slots(self.batch, page_table, page_size)
        spread = self.spread(pages, dummy_page), self.spread(slots)
        return spread[0].astype(np.int32), spread[1].astype(np.int32)


def tokens_each(batch: ForwardBatch) -> int:
    """The most new tokens of a sequence; 0 if there are none, or a sequence brings none."""
    counts = np.diff(batch.query_start)
    return int(counts.max()) if len(counts) and counts.min() > 0 else 0


def empty_batch(num_pools: int, max_pages: int) -> ForwardBatch:
    """A batch of no sequences, whose page tables have so many columns."""
    nothing, lengths = np.empty(0, np.int64), np.empty(0, np.int32)
    tables = (np.empty((0, max_pages), np.int32),) * num_pools
    return ForwardBatch(nothing, nothing, np.zeros(1, np.int32), lengths, tables, nothing)


def pad_batch(
    batch: ForwardBatch, shape: GraphShape, dummy_pages: Sequence[int], page_size: int
) -> PaddedBatch:
    """Pad `batch`, whose sequences are no shorter than the rows that each takes.

    Each further sequence consists of the tokens that it brings, on the dummy page of each pool.
    """
    size, each = shape
    missing = size - len(batch.seq_lens)
    counts = np.diff(batch.query_start)
    assert missing >= 0
    assert not len(counts) or counts.max() <= each <= batch.seq_lens.min()
    zeros, pages = np.zeros(missing * each, np.int64), -(-each // page_size)
    starts = batch.query_start[-1] + np.arange(1, missing + 1, dtype=np.int32) * each
    padded = replace(
        batch,
        input_ids=np.concatenate((batch.input_ids, zeros)),
        positions=np.concatenate((batch.positions, np.tile(np.arange(each), missing))),
        query_start=np.concatenate((batch.query_start, starts.astype(np.int32))),
        seq_lens=np.concatenate((batch.seq_lens, np.full(missing, each, np.int32))),
        page_tables=tuple(
            _pad_table(table, missing, pages, page)
            for table, page in zip(batch.page_tables, dummy_pages, strict=True)
        ),
    )
    # The last row of each sequence, less the tokens that follow a token in it.
    ends = np.arange(1, size + 1) * each - padded.query_start[1:]
    rows = np.arange(len(padded.input_ids)) + np.repeat(ends, np.diff(padded.query_start))
    return PaddedBatch(padded, shape, rows)


def _pad_table(table: Int32Array, missing: int, pages: int, dummy_page: int) -> Int32Array:
    rows = np.full((missing, table.shape[1]), -1, np.int32)
    assert pages <= table.shape[1]
    rows[:, :pages] = dummy_page
    return np.concatenate((table, rows))
