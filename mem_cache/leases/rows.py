"""The rows of the page tables: leases' lengths, promises and pages, as arrays, and their writer.

SGLang calls this table `req_to_token`. It is one array for all requests, so that a step of many of
them is a few numpy operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvrelay.mem_cache.account import NO_PAGE, Pages
from kvrelay.mem_cache.shape import Ints

_Array = TypeVar("_Array", bound=npt.NDArray[np.generic])


class Rows:
    """The lengths, promises and page tables of all leases. Only the methods here change them.

    Each change of a length asserts that for its rows::

        0 <= protected <= committed <= allocated, and protected is of whole pages

    Arrays are shown read only. The last entry of each, which -1 indexes, belongs to no lease and
    stays 0. A released lease has row -1, and so its lengths are 0.

    Args:
        pools: the number of pools.
        total: the number of rows.
        row_pages: pages of each pool that a row can have.
        page_size: tokens a page.
    """

    def __init__(self, pools: int, total: int, row_pages: int, page_size: int) -> None:
        self.row_pages = row_pages
        self.times_cleared = 0
        """How often a row was taken from its lease."""
        self._page_size = page_size
        self._states = np.zeros(total + 1, np.uint8)
        self._committed = np.zeros(total + 1, np.int64)
        self._allocated = np.zeros(total + 1, np.int64)
        self._protected = np.zeros(total + 1, np.int64)
        self._promised_tokens = np.zeros(total + 1, np.int64)
        self._promised_pages = np.zeros((pools, total + 1), np.int64)
        self._frontiers = np.zeros((pools, total + 1), np.int64)
        self._page_tables = np.full((pools, total + 1, row_pages), NO_PAGE, np.int32)
        self.states = _read_only(self._states)
        """The `lease.LeaseState` of each row, ``[rows]``."""
        self.committed = _read_only(self._committed)
        self.allocated = _read_only(self._allocated)
        self.protected = _read_only(self._protected)
        self.promised_tokens = _read_only(self._promised_tokens)
        self.promised_pages = _read_only(self._promised_pages)
        """Pages that were promised and not yet taken, ``[pools, rows]``."""
        self.frontiers = _read_only(self._frontiers)
        """The first page of each table that has not left the window, ``[pools, rows]``."""
        self.page_tables = _read_only(self._page_tables)
        """The pages of each row, ``[pools, rows, row_pages]``."""

    # Lengths

    def raise_allocated(self, rows: Ints, tokens: Ints) -> None:
        """Raise the allocated length of each row to its number of tokens; lower none."""
        self._allocated[rows] = np.maximum(tokens, self._allocated[rows])

    def raise_committed(self, rows: Ints, tokens: Ints) -> Ints:
        """Raise the committed length of each row to its number of tokens, or of none.

        Returns:
            The places in `rows` that refused: less is asked than is committed, or more than is
            allocated.
        """
        wrong = (tokens < self._committed[rows]) | (tokens > self._allocated[rows])
        refused = np.flatnonzero(wrong)
        if not len(refused):
            self._committed[rows] = tokens
        return refused

    def set_allocated(self, row: int, tokens: int) -> None:
        """Set the allocated length of a row."""
        assert self._committed[row] <= tokens, "less than is committed"
        self._allocated[row] = tokens

    def set_committed(self, row: int, tokens: int) -> None:
        """Set the committed length of a row."""
        assert self._protected[row] <= tokens <= self._allocated[row], "lengths out of order"
        self._committed[row] = tokens

    def protect(self, row: int, pages: Sequence[Pages], tokens: int) -> None:
        """Begin a row's tables with the pages of `tokens` tokens that the prefix index owns.

        Args:
            row: of the lease that has locked them, and has committed as many tokens.
            pages: for each pool; `NO_PAGE` where its window has passed.
            tokens: whole pages of them.
        """
        assert 0 <= tokens <= self._committed[row], "more than is committed"
        assert not tokens % self._page_size, "a part of a page"
        for pool, known in enumerate(pages):
            self._page_tables[pool, row, : len(known)] = known
            present = np.flatnonzero(known != NO_PAGE)
            first = int(present[0]) if len(present) else 0
            self._frontiers[pool, row] = max(self._frontiers[pool, row], first)
        self._protected[row] = tokens

    # Page tables

    def put_pages(self, pool: int, rows: Ints, first: Ints, number: Ints, pages: Pages) -> None:
        """Put `number` pages into the table of each row, from its `first` place on."""
        self._page_tables[pool][np.repeat(rows, number), _ranges(first, number)] = pages

    def take_pages(self, pool: int, rows: Ints, first: Ints, number: Ints) -> Pages:
        """Take `number` pages from the table of each row, from its `first` place on."""
        slots = np.repeat(rows, number), _ranges(first, number)
        pages: Pages = self._page_tables[pool][slots]
        self._page_tables[pool][slots] = NO_PAGE
        return pages

    def cut(self, row: int, kept: int) -> list[Pages]:
        """Take all but the first `kept` pages from a row's tables. Returns them by pool."""
        tails, end = [], -(-self.allocated.item(row) // self._page_size)
        for table, first in zip(
            self._page_tables[:, row], self.frontiers[:, row].tolist(), strict=True
        ):
            tail = slice(max(kept, first), end)
            tails.append(table[tail].copy())
            table[tail] = NO_PAGE
        return tails

    def replace_page(self, pool: int, row: int, at: int, page: int) -> Pages:
        """Put `page` at a place of a row's table. Returns the one that was there."""
        replaced = self._page_tables[pool, row, at : at + 1].copy()
        self._page_tables[pool, row, at] = page
        return replaced

    def set_frontiers(self, pool: int, rows: Ints, frontiers: Ints) -> None:
        """Set the first page of each row that has not left the window."""
        self._frontiers[pool, rows] = frontiers

    # Promises and states

    def promise_tokens(self, row: int, tokens: int) -> None:
        """Set the tokens that a row may surely grow to."""
        self._promised_tokens[row] = tokens

    def add_promised(self, pool: int, rows: Ints | int, pages: Ints | int) -> None:
        """Add to the pages that rows were promised and have not taken; negative: they took some."""
        self._promised_pages[pool, rows] += pages

    def end_promise(self, row: int) -> None:
        """End a row's promise."""
        self._promised_tokens[row] = self._promised_pages[:, row] = 0

    def set_state(self, row: int, state: int) -> None:
        """Set the `lease.LeaseState` of a row."""
        self._states[row] = state

    def clear(self, row: int) -> None:
        """Clear a row's lengths and tables; running forwards read their own copies."""
        self.end_promise(row)
        for values in (self._states, self._committed, self._allocated, self._protected):
            values[row] = 0
        self.times_cleared += 1
        self._frontiers[:, row] = 0
        self._page_tables[:, row] = NO_PAGE


def _read_only(values: _Array) -> _Array:
    shown = values.view()
    shown.flags.writeable = False
    return shown


def _ranges(starts: Ints, lengths: Ints) -> Ints:
    """Join the ranges ``[starts[i], starts[i] + lengths[i])``, one after the other."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - ends + lengths, lengths) + np.arange(ends[-1])
