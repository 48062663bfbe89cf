"""A pool's page tables on the device, where a step sends only what has changed of them.

The host keeps the table that it sent last, and compares. So it sends every difference, whatever the
reason, and nothing else. Reasons are requests that join, leave or are taken back, windows that
slide, and refused drafts. Steps in flight share the table's memory: the next step's changes are
written on the same stream, behind the kernels of the step before.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from kvrelay.model_runner.attention.paged_plan import PagedPlan
from kvrelay.model_runner.batch import Int32Array
from kvrelay.model_runner.torch_options import copy_array

COLUMNS: Final = 64
"""A table on the device has a multiple of this many columns."""
_NOTHING: Final[Int32Array] = np.empty((0, 0), np.int32)


def table_changes(sent: Int32Array, table: Int32Array) -> Int32Array:
    """``[2, n]``: places in the flat `table` that differ from `sent`, and their page ids now.

    Both are ``[B, max_pages]``.
    """
    places = np.flatnonzero(sent != table)
    return np.stack((places.astype(np.int32), table.ravel()[places]))


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

    @property
    def nbytes(self) -> int:
        """The device memory that is taken, in bytes."""
        return self._pages.nbytes

    def update(self, table: Int32Array) -> torch.Tensor:
        """Let the device have ``table [B, max_pages]``, by work on the current stream.

        The whole table is sent if its shape has changed, or if changes would save less than half.

        Returns:
            ``[B, at least max_pages]`` int32 on the device, until the next `update`.
        """
        table = _widened(table)
        whole = table.shape != self._sent.shape
        changes = None if whole else table_changes(self._sent, table)
        if changes is None or 2 * changes.size > table.size:
            self._send_whole(table)
        elif changes.size:
            self._send(changes)
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
        self._pages.index_copy_(0, arrived[0].long(), arrived[1])


def _widened(table: Int32Array) -> Int32Array:
    """A copy of ``[B, max_pages]``, padded with -1 to a multiple of `COLUMNS` columns."""
    rows, columns = table.shape
    wide = np.full((rows, -(-columns // COLUMNS) * COLUMNS), -1, np.int32)
    wide[:, :columns] = table
    return wide


def gather_page_ids(pages: torch.Tensor, plan: PagedPlan, first_pages: Int32Array) -> torch.Tensor:
    """``plan.page_ids`` on the device, gathered from the table of `DeviceTable.update`.

    Args:
        pages: ``[B, columns]``
        plan: the plan, whose `kv_indptr` is read.
        first_pages: ``[B]``, the first visible page of each sequence's row: see `visible_pages`.
    """
    count, starts = int(plan.kv_indptr[-1]), plan.kv_indptr[:-1]
    rows = np.arange(len(starts), dtype=np.int32) * pages.shape[1]
    # A sequence's pages lie one behind the other: its first place less its first index.
    offsets = np.stack((rows + first_pages - starts, np.diff(plan.kv_indptr))).astype(np.int32)
    arrived = torch.empty(offsets.shape, dtype=torch.int32, device=pages.device)
    copy_array(offsets, arrived)
    shifts = torch.repeat_interleave(arrived[0], arrived[1], output_size=count)
    return pages.view(-1)[shifts + torch.arange(count, dtype=torch.int32, device=pages.device)]
