"""What the leases have recorded, by row, so that a step of all is a few numpy operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvrelay.mem_cache.prefix_index import NO_PAGE

Ints = npt.NDArray[np.signedinteger[Any]]
"""One number a lease."""


class Rows:
    """Lengths, promises and page tables; the books' own, which leases read.

    The last entry of each array, which -1 indexes, is nobody's and stays 0: it
    is what a released lease has.

    Args:
        pools: how many.
        total: rows.
        row_pages: pages of each pool that a row can have.
    """

    def __init__(self, pools: int, total: int, row_pages: int) -> None:
        self.total = total
        self.row_pages = row_pages
        self.released = 0
        """How often a row was taken from its lease."""
        self.states = np.zeros(total + 1, np.uint8)
        """``[rows]`` of `lease.LeaseState`."""
        self.committed = np.zeros(total + 1, np.int64)
        self.allocated = np.zeros(total + 1, np.int64)
        self.protected = np.zeros(total + 1, np.int64)
        self.promised_tokens = np.zeros(total + 1, np.int64)
        self.promised_pages = np.zeros((pools, total + 1), np.int64)
        """``[pools, rows]``, not yet taken."""
        self.frontiers = np.zeros((pools, total + 1), np.int64)
        """``[pools, rows]`` the first page of each table that has not left the window."""
        self.page_tables = np.full((pools, total + 1, row_pages), NO_PAGE, np.int32)

    def clear(self, row: int) -> None:
        """Its lease has been released; what running forwards read is their own snapshot."""
        for lengths in (self.committed, self.allocated, self.protected, self.promised_tokens):
            lengths[row] = 0
        self.released += 1
        self.states[row] = 0
        self.promised_pages[:, row] = self.frontiers[:, row] = 0
        self.page_tables[:, row] = NO_PAGE


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """``[starts[0], starts[0] + lengths[0])`` and so on, one after the other."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - ends + lengths, lengths) + np.arange(ends[-1])
