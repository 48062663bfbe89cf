"""A pool's page tables on the device, where a step sends only what has changed of them.

Nobody says what has changed: the host keeps what it sent last, and compares. So whatever makes a
table differ (requests that join, leave or are taken back, windows that slide, drafts that are
refused) is sent, and nothing else is. Tables of steps in flight are the same memory: what is sent
for the next step is written behind the kernels of the one before, by work on the same stream.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from kvrelay.model_runner.attention.paged_plan import PagedPlan
from kvrelay.model_runner.batch import Int32Array
from kvrelay.model_runner.torch_options import copy_array

COLUMNS: Final = 64
"""The columns of a table on the device are a multiple of so many."""
_NOTHING: Final[Int32Array] = np.empty((0, 0), np.int32)


def table_changes(sent: Int32Array, table: Int32Array) -> Int32Array:
    """``[2, n]``: places in the flat `table` that differ from `sent`, and their page ids now.

    Both are ``[B, max_pages]``.
    """
    places = np.flatnonzero(sent != table)
    return np.stack((places.astype(np.int32), table.ravel()[places]))


class DeviceTable:
    """The page table of the latest step over one pool, ``[B, max_pages]``, on its device.

    Its rows are some columns wider there than a step's table, so that the longest sequence can grow
    without all rows being sent anew.

    Args:
        device: of the pool.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sent: Int32Array = _NOTHING
        self._pages = torch.empty(0, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Device memory that is taken."""
        return self._pages.nbytes

    def update(self, table: Int32Array) -> torch.Tensor:
        """Let the device have ``table [B, max_pages]``, by work on the current stream.

        The whole is sent if its shape is another than before, or if less than half would be saved.

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
        self._sent = _NOTHING  # if this fails, nobody knows what is there
        if table.size > len(self._pages):
            # What runs may still read the memory before: it is given to nobody until then.
            self._pages = torch.empty(2 * table.size, dtype=torch.int32, device=self._device)
        copy_array(table.ravel(), self._pages[: table.size])

    def _send(self, changes: Int32Array) -> None:
        arrived = torch.empty(changes.shape, dtype=torch.int32, device=self._device)
        copy_array(changes, arrived)
        self._pages.index_copy_(0, arrived[0].long(), arrived[1])


def _widened(table: Int32Array) -> Int32Array:
    """A copy of ``[B, max_pages]`` with as many columns as `COLUMNS` divides, filled up by -1."""
    rows, columns = table.shape
    wide = np.full((rows, -(-columns // COLUMNS) * COLUMNS), -1, np.int32)
    wide[:, :columns] = table
    return wide


def gather_page_ids(pages: torch.Tensor, plan: PagedPlan, first_pages: Int32Array) -> torch.Tensor:
    """``plan.page_ids`` on the device, of what `DeviceTable.update` returns.

    Args:
        pages: ``[B, columns]``
        plan: its `kv_indptr` is read.
        first_pages: ``[B]`` of each sequence's row, the first that is seen: `visible_pages`.
    """
    count, starts = int(plan.kv_indptr[-1]), plan.kv_indptr[:-1]
    rows = np.arange(len(starts), dtype=np.int32) * pages.shape[1]
    # A sequence's pages lie one behind the other: its first place less its first index.
    offsets = np.stack((rows + first_pages - starts, np.diff(plan.kv_indptr))).astype(np.int32)
    arrived = torch.empty(offsets.shape, dtype=torch.int32, device=pages.device)
    copy_array(offsets, arrived)
    shifts = torch.repeat_interleave(arrived[0], arrived[1], output_size=count)
    return pages.view(-1)[shifts + torch.arange(count, dtype=torch.int32, device=pages.device)]
