"""The padding of a batch of decode to a graph's size, with sequences that belong to no request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvrelay.model_runner.batch import ForwardBatch, Int32Array


def is_decode(batch: ForwardBatch) -> bool:
    """Whether the batch has sequences, and each brings one token."""
    return len(batch.seq_lens) > 0 and bool((np.diff(batch.query_start) == 1).all())


def empty_batch(num_pools: int) -> ForwardBatch:
    """A batch of no sequences."""
    nothing, lengths = np.empty(0, np.int64), np.empty(0, np.int32)
    tables = (np.empty((0, 1), np.int32),) * num_pools
    return ForwardBatch(nothing, nothing, np.zeros(1, np.int32), lengths, tables, nothing)


def pad_batch(batch: ForwardBatch, size: int, dummy_pages: Sequence[int]) -> ForwardBatch:
    """`batch` (of decode) with further sequences, up to `size` in all.

    Each further sequence has one token, 0, at position 0. It is written to the dummy page of each
    pool, and sees nothing else: no page of a request is touched. The logits of all sequences are
    wanted.
    """
    missing = size - len(batch.seq_lens)
    assert missing >= 0
    zeros, ones = np.zeros(missing, np.int64), np.ones(missing, np.int32)
    return replace(
        batch,
        input_ids=np.concatenate((batch.input_ids, zeros)),
        positions=np.concatenate((batch.positions, zeros)),
        query_start=np.arange(size + 1, dtype=np.int32),
        seq_lens=np.concatenate((batch.seq_lens, ones)),
        page_tables=tuple(
            _pad_table(table, missing, page)
            for table, page in zip(batch.page_tables, dummy_pages, strict=True)
        ),
        logit_rows=np.arange(size, dtype=np.int64),
    )


def _pad_table(table: Int32Array, missing: int, dummy_page: int) -> Int32Array:
    rows = np.full((missing, table.shape[1]), -1, np.int32)
    rows[:, 0] = dummy_page
    return np.concatenate((table, rows))
