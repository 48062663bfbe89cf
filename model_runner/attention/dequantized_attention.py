"""Attention over pages in FP8 by a backend that knows only the model's own dtype.

Before each layer the pages that the step reads are widened into scratch pages, which all layers
share. New tokens are rounded before they are attended to. So attention reads the same numbers of a
page in each step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvrelay.mem_cache.geometry import KVGeometry, PageOrder
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.attention.fp8_pages import Fp8Pages
from kvrelay.model_runner.attention.new_tokens import NewTokens
from kvrelay.model_runner.attention.paged_plan import visible_pages
from kvrelay.model_runner.batch import ForwardBatch, Int32Array, Int64Array
from kvrelay.model_runner.config.query_heads import QueryHeads

if TYPE_CHECKING:  # the protocols, whose file imports this one
    from kvrelay.model_runner.attention.backend import AttentionBackend, StepAttention


class DequantizedAttention:
    """The `AttentionBackend` of pages in FP8 where no kernels read them.

    Args:
        pages: the pool's pages.
        heads: the query heads, with scale and softcap.
        make: makes the backend that computes over a pool in the model's dtype.
    """

    def __init__(
        self, pages: Fp8Pages, heads: QueryHeads, make: Callable[[KVPool], AttentionBackend]
    ) -> None:
        self.pages = pages
        self.heads = heads
        self._make = make
        self._widened: tuple[KVPool, AttentionBackend] | None = None
        """The scratch pages and their backend; None: memory for enough pages was lacking."""
        self._grow(1)

    @property
    def scratch(self) -> KVPool:
        """The scratch pages: one layer in the model's dtype."""
        assert self._widened is not None
        return self._widened[0]

    @property
    def inner(self) -> AttentionBackend:
        """The backend that computes over `scratch`."""
        assert self._widened is not None
        return self._widened[1]

    def plan(self, batch: ForwardBatch, page_table: Int32Array) -> DequantizedStepAttention:
        """Find the pages that `batch` reads; see `AttentionBackend`.

        Two steps in flight share the scratch pages: they run one after the other.
        """
        page_ids, scratch_table = gather_pages(batch, page_table, self.pages.pool.geometry)
        there = 0 if self._widened is None else self.scratch.total_pages
        if len(page_ids) > there:
            self._grow(min(self.pages.pool.total_pages, max(len(page_ids), 2 * there)))
        new_tokens = NewTokens(batch, page_table, self.pages.pool)
        step = self.inner.plan(batch, scratch_table)
        return DequantizedStepAttention(self, step, page_ids, new_tokens)

    def _grow(self, total_pages: int) -> None:
        pool = self.pages.pool
        self._widened = None  # else there would be both for a moment
        geometry = scratch_geometry(pool.geometry, self.pages.dtype)
        scratch = KVPool(geometry, total_pages, pool.data.device)
        # Both or neither: the backend must not read other pages than are widened.
        self._widened = scratch, self._make(scratch)


def scratch_geometry(geometry: KVGeometry, dtype: torch.dtype) -> KVGeometry:
    """The geometry of the scratch pages, which one layer after the other is widened into."""
    return replace(geometry, dtype=dtype, num_layers=1, order=PageOrder.PAGE_FIRST)


class DequantizedStepAttention:
    """The `StepAttention` of `DequantizedAttention`."""

    def __init__(
        self,
        backend: DequantizedAttention,
        step: StepAttention,
        page_ids: Int64Array,
        new_tokens: NewTokens,
    ) -> None:
        self._backend = backend
        self._step = step
        self._page_ids = page_ids
        self._new_tokens = new_tokens

    def attend(
        self, layer: int, rows: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Write and attend, as `StepAttention.attend`. Rounds new keys and values in `rows`."""
        pages = self._backend.pages
        new = rows[:, self._backend.heads.num_heads :]
        stored = pages.quantize(layer, new)
        new.copy_(pages.dequantize(layer, stored))
        self._new_tokens.write(pages.pool.layer(layer), stored)
        pages.read_pages(
            layer, self._page_ids, self._backend.scratch.layer(0)[: len(self._page_ids)]
        )
        return self._step.attend(0, rows, sinks)


def gather_pages(
    batch: ForwardBatch, page_table: Int32Array, geometry: KVGeometry
) -> tuple[Int64Array, Int32Array]:
    """The pages ``[n]`` that a step reads or writes, each once, and the table of their places.

    The table is shaped like `page_table`; entries of pages that are not read are -1.
    """
    first, end = visible_pages(batch, geometry)
    columns = np.arange(page_table.shape[1])
    visible = (columns >= first[:, None]) & (columns < end[:, None])
    page_ids, places = np.unique(page_table[visible], return_inverse=True)
    table = np.full(page_table.shape, -1, np.int32)
    table[visible] = places
    return page_ids.astype(np.int64), table
