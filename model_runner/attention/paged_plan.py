"""A batch over one pool as the flat arrays that paged attention kernels of GPUs take.

All arrays are int32 and on the host. Sequence `b` is, as in a sparse matrix by rows (CSR)::

    queries     rows [query_indptr[b], query_indptr[b + 1]) of the batch
    pages       kv_indptr[b + 1] - kv_indptr[b] entries of its page table from
                first_pages[b] on, the last one filled with last_page_len[b] tokens

A window's pages begin with the oldest token that the first new one sees. So positions in these
arrays count from there. Kernels count positions from the end of a sequence, where its new tokens
are. So causality and windows are the same as over the whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvrelay.mem_cache.geometry import KVGeometry
from kvrelay.model_runner.batch import ForwardBatch, Int32Array


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """The arrays for a step's queries over one pool; the same for all of the pool's layers."""

    query_indptr: Int32Array
    """``[B + 1]``"""
    kv_indptr: Int32Array
    """``[B + 1]``: no page is below a window, and none is past a sequence's end."""
    first_pages: Int32Array
    """``[B]`` places in the page table."""
    last_page_len: Int32Array
    """``[B]`` from 1 to `page_size`; 0 if the sequence has no pages here."""
    kv_lens: Int32Array
    """``[B]`` tokens in the pages, up to the last new one."""

    @property
    def is_decode(self) -> bool:
        """Whether each sequence brings one token."""
        return self.num_decodes == len(self.last_page_len)

    @property
    def tokens_each(self) -> int:
        """The new tokens of each sequence, of which all bring the same number."""
        return int(self.query_indptr[1])

    @property
    def num_pages(self) -> int:
        """The pages of all sequences; one that sequences share counts for each."""
        return int(self.kv_indptr[-1])

    @property
    def num_decodes(self) -> int:
        """The sequences at the beginning that bring one token each."""
        others = np.flatnonzero(np.diff(self.query_indptr) != 1)
        return int(others[0]) if len(others) else len(self.last_page_len)

    def part(self, first: int, end: int) -> PagedPlan:
        """The sequences ``[first, end)`` alone."""
        queries, pages = self.query_indptr[first : end + 1], self.kv_indptr[first : end + 1]
        return PagedPlan(
            query_indptr=queries - queries[0],
            kv_indptr=pages - pages[0],
            first_pages=self.first_pages[first:end],
            last_page_len=self.last_page_len[first:end],
            kv_lens=self.kv_lens[first:end],
        )


def plan_pages(batch: ForwardBatch, geometry: KVGeometry) -> PagedPlan:
    """Lay out `batch` for the pool of `geometry`."""
    first_pages, end_pages = visible_pages(batch, geometry)
    counts = end_pages - first_pages
    kv_indptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    kv_lens = np.where(counts > 0, batch.seq_lens - first_pages * geometry.page_size, 0)
    return PagedPlan(
        query_indptr=np.ascontiguousarray(batch.query_start, np.int32),
        kv_indptr=kv_indptr,
        first_pages=first_pages.astype(np.int32),
        last_page_len=(kv_lens - np.maximum(counts - 1, 0) * geometry.page_size).astype(np.int32),
        kv_lens=kv_lens.astype(np.int32),
    )


def visible_pages(batch: ForwardBatch, geometry: KVGeometry) -> tuple[Int32Array, Int32Array]:
    """The pages ``[first, end)`` of each sequence's table that its new tokens see, ``[B]`` each."""
    ends = -(-batch.seq_lens // geometry.page_size)
    if geometry.window is None:
        return np.zeros_like(ends), ends
    first_new = batch.seq_lens - np.diff(batch.query_start)
    oldest = np.maximum(first_new + 1 - geometry.window, 0)
    # Without new tokens a sequence may have no token that the next one would see.
    return np.where(oldest < batch.seq_lens, oldest // geometry.page_size, ends), ends
