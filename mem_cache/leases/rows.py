"""The rows of the page tables: leases' lengths, promises and pages, as arrays.

SGLang calls this table `req_to_token`. It is one array for all requests, so that a step of many of
them is a few numpy operations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvrelay.mem_cache.account import NO_PAGE, Pages
from kvrelay.mem_cache.shape import Ints


class Rows:
    """The lengths, promises and page tables of all leases.

    The last entry of each array, which -1 indexes, belongs to no lease and stays 0. A released
    lease has row -1, and so its lengths are 0.

    Args:
        pools: the number of pools.
        total: the number of rows.
        row_pages: pages of each pool that a row can have.
    """

    def __init__(self, pools: int, total: int, row_pages: int) -> None:
        self.row_pages = row_pages
        self.times_cleared = 0
        """How often a row was taken from its lease."""
        self.states = np.zeros(total + 1, np.uint8)
        """The `lease.LeaseState` of each row, ``[rows]``."""
        self.committed = np.zeros(total + 1, np.int64)
        self.allocated = np.zeros(total + 1, np.int64)
        self.protected = np.zeros(total + 1, np.int64)
        self.promised_tokens = np.zeros(total + 1, np.int64)
        self.promised_pages = np.zeros((pools, total + 1), np.int64)
        """Pages that were promised and not yet taken, ``[pools, rows]``."""
        self.frontiers = np.zeros((pools, total + 1), np.int64)
        """The first page of each table that has not left the window, ``[pools, rows]``."""
        self.page_tables = np.full((pools, total + 1, row_pages), NO_PAGE, np.int32)

    def put_prefix(self, row: int, pages: Sequence[Pages], tokens: int) -> None:
        """Begin a row's tables with the pages of `tokens` tokens that the prefix index owns.

        Args:
            row: of the lease that has locked them.
            pages: for each pool; `NO_PAGE` where its window has passed.
            tokens: whole pages of them.
        """
        for pool, known in enumerate(pages):
            self.page_tables[pool, row, : len(known)] = known
            present = np.flatnonzero(known != NO_PAGE)
            first = int(present[0]) if len(present) else 0
            self.frontiers[pool, row] = max(self.frontiers[pool, row], first)
        self.protected[row] = tokens

    def clear(self, row: int) -> None:
        """Clear a row's lengths and tables; running forwards read their own copies."""
        for lengths in (self.committed, self.allocated, self.protected, self.promised_tokens):
            lengths[row] = 0
        self.times_cleared += 1
        self.states[row] = 0
        self.promised_pages[:, row] = self.frontiers[:, row] = 0
        self.page_tables[:, row] = NO_PAGE


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """Join the ranges ``[starts[i], starts[i] + lengths[i])``, one after the other."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - ends + lengths, lengths) + np.arange(ends[-1])
