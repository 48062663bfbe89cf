"""A pool's page tables on the device, where a step sends only what has changed of them.

The host keeps the table that it sent last, and compares. So it sends every difference, whatever the
reason, and nothing else. Reasons are requests that join, leave or are taken back, windows that
slide, and refused drafts. Steps in flight share the table's memory: the next step's changes are
written on the same stream, behind the kernels of the step before.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import torch

from kvrelay.model_runner.attention.paged_plan import PagedPlan
from kvrelay.model_runner.batch import Int32Array
from kvrelay.model_runner.torch_options import copy_array, pin_to_device

COLUMNS: Final = 64
"""A table on the device has a multiple of this many columns."""
_NOTHING: Final[Int32Array] = np.empty((0, 0), np.int32)


def table_changes(sent: Int32Array, table: Int32Array) -> Int32Array:
    """``[2, n]``: places in the flat `table` that differ from `sent`, and their page ids now.

    Both are ``[B, max_pages]``.
    """
    places = np.flatnonzero(sent != table)
    return np.stack((places.astype(np.int32), table.ravel()[places]))


class TableUpdate(NamedTuple):
    """The difference between a table and what was sent before it."""

    table: Int32Array
    """The table as it lies on the device."""
    changes: Int32Array | None
    """The result of `table_changes`; None: the whole table is sent."""

    @property
    def is_empty(self) -> bool:
        """Whether the device has this table already."""
        return self.changes is not None and not self.changes.size


class DeviceTable:
    """The page table of the latest step over one pool, ``[B, max_pages]``, on its device.

    Rows are a few columns wider than a step's table, so that the longest sequence can grow without
    all rows being sent anew.

    Args:
        device: the pool's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sent: Int32Array = _NOTHING
        self._pages = torch.empty(0, dtype=torch.int32, device=device)
        self.version = 0
        """A number that grows with each change of the table."""

    @property
    def nbytes(self) -> int:
        """The device memory that is taken, in bytes."""
        return self._pages.nbytes

    def update(self, table: Int32Array) -> torch.Tensor:
        """Let the device have ``table [B, max_pages]``, by work on the current stream.

        Returns:
            ``[B, at least max_pages]`` int32 on the device, until the next `update`.
        """
        return self.apply(self.compare(table))

    def compare(self, table: Int32Array) -> TableUpdate:
        """Compare ``table [B, max_pages]`` with what the device has.

        The whole table is sent if its shape has changed, or if changes would save less than half.
        """
        table = _widened(table)
        if table.shape != self._sent.shape:
            return TableUpdate(table, None)
        changes = table_changes(self._sent, table)
        return TableUpdate(table, None if 2 * changes.size > table.size else changes)

    def apply(self, update: TableUpdate, arrived: torch.Tensor | None = None) -> torch.Tensor:
        """Let the device have the table of the latest `compare`; returns it as `update` does.

        Args:
            update: the result of `compare`.
            arrived: its changes, if they are on the device already.
        """
        table, changes = update
        if not update.is_empty:
            self.version += 1
            if changes is None:
                self._send_whole(table)
            elif arrived is None:
                self._send(changes)
            else:
                self._write(arrived)
        self._sent = table
        return self._pages[: table.size].view(table.shape)

    def _send_whole(self, table: Int32Array) -> None:
        self._sent = _NOTHING  # if this fails, the device's table is unknown
        if table.size > len(self._pages):
            # A running kernel may still read the old memory: it is not reused until then.
            self._pages = torch.empty(2 * table.size, dtype=torch.int32, device=self._device)
        copy_array(table.ravel(), self._pages[: table.size])

    def _send(self, changes: Int32Array) -> None:
        arrived = torch.empty(changes.shape, dtype=torch.int32, device=self._device)
        copy_array(changes, arrived)
        self._write(arrived)

    def _write(self, changes: torch.Tensor) -> None:
        self._pages.index_copy_(0, changes[0].long(), changes[1])


def _widened(table: Int32Array) -> Int32Array:
    """A copy of ``[B, max_pages]``, padded with -1 to a multiple of `COLUMNS` columns."""
    rows, columns = table.shape
    wide = np.full((rows, -(-columns // COLUMNS) * COLUMNS), -1, np.int32)
    wide[:, :columns] = table
    return wide


def page_shifts(plan: PagedPlan, columns: int) -> Int32Array:
    """``[B]``: the place of each sequence's first page in the flat table, less its first index.

    The pages of a sequence lie one behind the other, in the table and among the plan's page ids.

    Args:
        plan: the plan.
        columns: those of the table.
    """
    rows = np.arange(len(plan.first_pages), dtype=np.int32) * columns
    return (rows + plan.first_pages - plan.kv_indptr[:-1]).astype(np.int32)


def gather_page_ids(pages: torch.Tensor, plan: PagedPlan) -> torch.Tensor:
    """The page ids of all sequences on the device, ``[kv_indptr[B]]`` int32.

    Args:
        pages: ``[B, columns]``, the table of `DeviceTable.update`.
        plan: the plan.
    """
    both = np.stack((plan.kv_indptr[1:], page_shifts(plan, pages.shape[1])))
    ends, shifts = pin_to_device(both, pages.device)
    return take_page_ids(pages, ends, shifts, plan.num_pages)


def take_page_ids(
    pages: torch.Tensor,
    ends: torch.Tensor,
    shifts: torch.Tensor,
    count: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`gather_page_ids` with ``kv_indptr[1:]`` and the shifts, ``[B]`` int32 each, on the device.

    Args:
        pages: ``[B, columns]``
        ends: ``[B]``
        shifts: ``[B]``
        count: the number of page ids.
        out: ``[count]``, the memory to write to.
    """
    order = torch.arange(count, dtype=torch.int32, device=pages.device)
    owners = torch.searchsorted(ends, order, right=True)
    return torch.index_select(pages.view(-1), 0, shifts[owners] + order, out=out)
