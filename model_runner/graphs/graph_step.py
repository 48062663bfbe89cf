"""The attention of a graph's steps over one pool: laid out, brought to fixed addresses, planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvrelay.model_runner.attention.device_table import TableUpdate, page_shifts
from kvrelay.model_runner.attention.flashinfer_attention import FlashInferAttention, PlannedRows
from kvrelay.model_runner.attention.flashinfer_buffers import MOST_CHANGES
from kvrelay.model_runner.attention.paged_plan import PagedPlan
from kvrelay.model_runner.batch import Int32Array
from kvrelay.model_runner.config.cuda_graphs import GraphShape
from kvrelay.model_runner.graphs.padding import PaddedBatch


class LaidOutStep(NamedTuple):
    """A step over one pool, laid out on the host."""

    plan: PagedPlan
    table: TableUpdate
    shifts: Int32Array
    """The result of `page_shifts`."""
    arrays: Sequence[Int32Array]
    """The arrays of a `PoolArrays`, in its order."""

    @property
    def changes(self) -> Int32Array | None:
        """The changes of the page table that come with the other arrays; None: none do."""
        changes = self.table.changes
        if changes is None or not 0 < changes.shape[1] <= MOST_CHANGES * len(self.shifts):
            return None
        return changes


class GraphStep:
    """The `StepAttention` of all steps of one shape.

    Kernels of `attend` read the arrays that the latest step has left on the device.

    Args:
        backend: of the pool.
        pool: the pool's index.
        shape: the shape of the steps.
    """

    def __init__(self, backend: FlashInferAttention, pool: int, shape: GraphShape) -> None:
        assert backend.flashinfer.graph_buffers is not None
        self._backend = backend
        self.buffers = backend.flashinfer.graph_buffers
        """The memory of all graphs."""
        self._arrays = self.buffers.block.arrays(shape).pools[pool]
        self._pages = self.buffers.pages[pool]
        wrapper = backend.flashinfer.graph_wrapper(pool, shape)
        empty_heads = backend.empty_heads(is_decode=shape.each == 1)
        self._parts = [PlannedRows(wrapper, slice(None), empty_heads)]
        self._new_tokens = backend.static_tokens(self._arrays.new_pages, self._arrays.new_slots)
        self._is_captured = False
        """Whether a plan was made by which the graph is captured."""
        self._planned: Int32Array | None = None
        """The `PagedPlan.kv_indptr` of the plan that the device has; None: it is unknown."""

    def lay_out(self, padded: PaddedBatch, page_table: Int32Array) -> LaidOutStep:
        """Lay a step out on the host."""
        pool = self._backend.pool
        plan = padded.plan(pool.geometry)
        table = self._backend.table.compare(page_table)
        shifts = page_shifts(plan, table.table.shape[1])
        dummy_page = pool.total_pages - 1
        new = padded.new_token_slots(page_table, pool.geometry.page_size, dummy_page)
        lengths = plan.kv_lens if pool.geometry.latent else plan.last_page_len
        arrays = [*new, plan.kv_indptr, lengths, shifts]
        return LaidOutStep(plan, table, shifts, arrays)

    def place(
        self, layout: LaidOutStep, changes: torch.Tensor | None, before_plan: Callable[[], None]
    ) -> None:
        """Gather the page ids, and plan; the layout's arrays are on the device. Not to be captured.

        Args:
            layout: the result of `lay_out`.
            changes: its changes on the device.
            before_plan: called before kernels are planned anew.
        """
        plan, table = layout.plan, self._backend.table
        on_device = table.apply(layout.table, changes)
        ids = self._pages.gather(on_device, table.version, plan, layout.shifts, self._arrays)
        if not self._needs_plan(plan):
            return
        before_plan()
        [part] = self._parts
        plan_kernels = (
            self._backend.replan_decode if self._is_captured else self._backend.plan_decode
        )
        self._planned = None  # if this fails, the device's plan is unknown
        plan_kernels(part.wrapper, plan, ids)
        self._is_captured, self._planned = True, plan.kv_indptr

    def _needs_plan(self, plan: PagedPlan) -> bool:
        """Whether kernels would be planned in another way than by the latest plan.

        FlashInfer divides steps of one shape by nothing but the number of each sequence's pages:
        DecodePlan and PrefillPlan read no lengths. Kernels read how full last pages are from the
        graph's buffers.
        A plan of latents has the lengths themselves.
        """
        if self._planned is None or self._backend.pool.geometry.latent:
            return True
        return not np.array_equal(self._planned, plan.kv_indptr)

    def attend(
        self, layer: int, rows: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Write and attend; shapes as in `StepAttention.attend`."""
        return self._backend.attend(self._parts, self._new_tokens, layer, rows, sinks)
