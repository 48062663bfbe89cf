"""What a request holds, and the states of its life.

A lease's tokens, as intervals and their owners::

    0 ........ cache_protected_len ........ kv_committed_len ........ kv_allocated_len
    |  prefix index owns,         |  this lease owns,         |  this lease owns,     |
    |  this lease locks           |  written, or will be by   |  reserved             |
    |                             |  a forward launched       |                       |

Always ``0 <= cache_protected_len <= kv_committed_len <= kv_allocated_len``, and
`cache_protected_len` is a multiple of the page size. The lengths are recorded
when they change, by the ledger alone; nobody infers them from token counts.

The lengths are the same in every pool. In a window pool the pages that no
forward will look at again have left: it holds none before its frontier.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, auto
from typing import Final

import numpy as np

from kvrelay.mem_cache.account import NO_PAGES, Pages
from kvrelay.mem_cache.errors import LedgerError
from kvrelay.mem_cache.fence import Fence
from kvrelay.mem_cache.prefix_index import PrefixLock
from kvrelay.mem_cache.rows import Ints, Rows


class LeaseState(IntEnum):
    """Where a lease is in its life."""

    RELEASED = 0
    """Holds nothing any more."""
    OPEN = auto()
    """A request has it: it may grow and commit."""
    SAVED = auto()
    """A session has it between two turns; its next turn borrows it. See `session.Sessions`."""
    CLOSED = auto()
    """Its end is decided: it may only be released."""


TRANSITIONS: Final = {
    LeaseState.OPEN: {LeaseState.SAVED, LeaseState.CLOSED},
    LeaseState.SAVED: {LeaseState.OPEN, LeaseState.CLOSED},
    LeaseState.CLOSED: {LeaseState.RELEASED},
    LeaseState.RELEASED: set[LeaseState](),
}
"""Every step that a lease can take: ``grow, commit, publish, slide, trim`` keep it OPEN,
``save`` (or ``roll_back``, then ``save``) and ``borrow`` go back and forth, ``close`` and then
``give_back`` end it."""


_STATES: Final = tuple(sorted(LeaseState))


class Lease:
    """One request's hold on a row and on pages. Made by `Ledger.open`.

    Its lengths are in the ledger's `Rows`, and all 0 once it is released. Only
    the ledger writes anything of it: `books.py` and what works on it.
    """

    __slots__ = (
        "_fences",
        "_prefix_lock",
        "_rows",
        "_set_aside",
        "holder",
        "namespace",
        "page_size",
        "row",
    )

    def __init__(
        self,
        holder: str,
        row: int,
        rows: Rows,
        page_size: int,
        namespace: str,
    ) -> None:
        self.holder = holder
        self.row = row
        """-1 once it is released."""
        self.page_size = page_size
        self.namespace = namespace
        self._rows = rows
        self._prefix_lock: PrefixLock | None = None
        self._set_aside: list[Pages] = [NO_PAGES for _ in rows.page_tables]
        self._fences: list[Fence] = []

    @property
    def state(self) -> LeaseState:
        """Where the lease is in its life."""
        return _STATES[self._rows.states.item(self.row)]

    @property
    def cache_protected_len(self) -> int:
        """Tokens whose pages the prefix index owns; changed by `open` and `publish`."""
        return self._rows.protected.item(self.row)

    @property
    def kv_committed_len(self) -> int:
        """Tokens whose KV is written, or will be by a launched forward; raised by `commit`."""
        return self._rows.committed.item(self.row)

    @property
    def kv_allocated_len(self) -> int:
        """Tokens that the lease's pages were asked to hold; raised by `grow`."""
        return self._rows.allocated.item(self.row)

    @property
    def promised_tokens(self) -> int:
        """Tokens that it may surely grow to; none if a session has it."""
        return self._rows.promised_tokens.item(self.row)

    @property
    def promised_pages(self) -> tuple[int, ...]:
        """For each pool the pages that it may yet take of those that it was promised."""
        return tuple(self._rows.promised_pages[:, self.row].tolist())

    @property
    def num_pages(self) -> int:
        """Pages in the table, the locked prefix and what has left a window pool included."""
        return -(-self.kv_allocated_len // self.page_size)

    @property
    def num_protected_pages(self) -> int:
        """Pages at the table's start that the prefix index owns."""
        return self.cache_protected_len // self.page_size

    @property
    def first_pages(self) -> tuple[int, ...]:
        """For each pool the first page that the lease has there: 0 but in a window pool."""
        return tuple(self._rows.frontiers[:, self.row].tolist())

    def tables(self) -> list[list[int]]:
        """Each pool's page table, see `pages`."""
        tables: list[list[int]]
        tables = self._rows.page_tables[:, self.row, : self.num_pages].tolist()
        return tables

    def own_pages(self, pool: int = 0) -> Pages:
        """Pages of a pool that this lease owns, a copy: not those that the index lent it.

        A page that `Ledger.borrow` has set aside comes last.
        """
        first = max(self._rows.frontiers.item(pool, self.row), self.num_protected_pages)
        table = self._rows.page_tables[pool, self.row]
        return np.concatenate((table[first : self.num_pages], self._set_aside[pool]))

    def pages(self, pool: int = 0) -> Pages:
        """A pool's page table in token order, a copy; -1 where a page has left the window."""
        return self._rows.page_tables[pool, self.row, : self.num_pages].copy()

    def pending(self, others: Sequence[Fence]) -> list[Fence]:
        """`others`, and the forward that copies a page of this lease: see `Ledger.fork`."""
        self._fences = [fence for fence in self._fences if not fence.passed()]
        return [*others, *self._fences]

    def move_to(self, state: LeaseState) -> None:
        """Take one step of `TRANSITIONS`; any other raises `LedgerError`."""
        if state not in TRANSITIONS[self.state]:
            raise LedgerError(f"{self.holder}: its lease is {self.state.name}, not for {state!r}")
        self._rows.states[self.row] = state

    def check_open(self, action: str) -> None:
        """Raise `LedgerError` unless the lease is open."""
        if self.state is not LeaseState.OPEN:
            raise LedgerError(f"{action} of {self.holder}: its lease is {self.state.name}")

    def __repr__(self) -> str:
        return (
            f"Lease({self.holder!r}, {self.state.name}, row={self.row}, "
            f"protected={self.cache_protected_len}, committed={self.kv_committed_len}, "
            f"allocated={self.kv_allocated_len})"
        )


class Batch(tuple[Lease, ...]):
    """Leases that take steps together: where `Rows` has them is looked up once, not in every call.

    And again when a lease of the same ledger has been released.
    """

    _found: Ints
    _as_of = -1

    def find(self) -> Ints:
        """The rows of its leases."""
        released = self[0]._rows.released if self else 0
        if released != self._as_of:
            self._found, self._as_of = _rows_of(self), released
        return self._found


def rows_of(leases: Sequence[Lease]) -> Ints:
    """Where `Rows` has each of them."""
    return leases.find() if isinstance(leases, Batch) else _rows_of(leases)


def _rows_of(leases: Sequence[Lease]) -> Ints:
    return np.fromiter([lease.row for lease in leases], np.intp, len(leases))
