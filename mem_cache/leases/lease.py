"""The memory that a request holds, and the states of its life.

A lease's tokens, as intervals and their owners::

    0 ........ cache_protected_len ........ kv_committed_len ........ kv_allocated_len
    |  prefix index owns,         |  this lease owns,         |  this lease owns,     |
    |  this lease locks           |  written, or will be by   |  reserved             |
    |                             |  a forward launched       |                       |

Always ``0 <= cache_protected_len <= kv_committed_len <= kv_allocated_len``, and
`cache_protected_len` is a multiple of the page size. Only `Rows` changes the lengths, and asserts
this at each change; no code infers them from token counts.

The lengths are the same in every pool. In a window pool the pages that no forward will look at
again have been freed: a lease has none before its frontier.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum, auto
from typing import Final

import numpy as np

from kvrelay.mem_cache.account import NO_PAGES, Pages
from kvrelay.mem_cache.errors import KVCacheError
from kvrelay.mem_cache.fence import Fence
from kvrelay.mem_cache.leases.rows import Rows
from kvrelay.mem_cache.prefix.prefix_index import PrefixLock
from kvrelay.mem_cache.shape import CacheShape, Ints


class LeaseState(IntEnum):
    """The state of a lease."""

    RELEASED = 0
    """The lease holds nothing any more."""
    OPEN = auto()
    """A request has the lease: it may grow and commit."""
    SAVED = auto()
    """A session has the lease between two turns; the next turn borrows it: see `SessionMemory`."""
    CLOSED = auto()
    """The lease's end is decided: it may only be released."""


TRANSITIONS: Final = {
    LeaseState.OPEN: {LeaseState.SAVED, LeaseState.CLOSED},
    LeaseState.SAVED: {LeaseState.OPEN, LeaseState.CLOSED},
    LeaseState.CLOSED: {LeaseState.RELEASED},
    LeaseState.RELEASED: set[LeaseState](),
}
"""Every step that a lease can take. ``grow, commit, publish, slide, trim`` keep it OPEN. ``save``
(or ``roll_back``, then ``save``) and ``borrow`` go back and forth. ``close_lease``
and then ``end_lease`` end it."""


_STATES: Final = tuple(sorted(LeaseState))


class Lease:
    """One request's hold on a row and on pages. Made by `KVCacheManager.open`.

    Its lengths are read from `Rows`, and are all 0 once it is released. Only this room changes it;
    other code reads the properties.
    """

    __slots__ = (
        "_fences",
        "_prefix_lock",
        "_rows",
        "_set_aside",
        "_shape",
        "found_len",
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
        shape: CacheShape,
        namespace: str,
    ) -> None:
        self.holder = holder
        self.row = row
        """The row; -1 once it is released."""
        self.page_size = shape.page_size
        self.namespace = namespace
        self.found_len = 0
        """Tokens that it was opened with, which other requests have computed."""
        self._rows = rows
        self._shape = shape
        self._prefix_lock: PrefixLock | None = None
        self._set_aside: list[Pages] = [NO_PAGES for _ in rows.page_tables]
        self._fences: list[Fence] = []

    @property
    def state(self) -> LeaseState:
        """The state of the lease."""
        return _STATES[self._rows.states.item(self.row)]

    @property
    def cache_protected_len(self) -> int:
        """Tokens of the index's pages; raised by `open`, `publish` and `publish_settled`."""
        return self._rows.protected.item(self.row)

    @property
    def kv_committed_len(self) -> int:
        """Tokens whose KV is written, or will be by a launched forward.

        Raised by `open`, `commit` and `roll_back`.
        """
        return self._rows.committed.item(self.row)

    @property
    def kv_allocated_len(self) -> int:
        """Tokens that the lease's pages were asked to hold.

        Raised by `open`, `grow` and `roll_back`.
        """
        return self._rows.allocated.item(self.row)

    @property
    def prefix_lock(self) -> PrefixLock | None:
        """The lock on the pages that the prefix index owns, if there are any."""
        return self._prefix_lock

    @property
    def promised_tokens(self) -> int:
        """Tokens that it may surely grow to; 0 if a session has it."""
        return self._rows.promised_tokens.item(self.row)

    @property
    def promised_pages(self) -> tuple[int, ...]:
        """For each pool the promised pages that it has not taken yet."""
        return tuple(self._rows.promised_pages[:, self.row].tolist())

    @property
    def num_pages(self) -> int:
        """The number of pages in the table, with the locked prefix and pages that left a window."""
        return -(-self.kv_allocated_len // self.page_size)

    @property
    def num_protected_pages(self) -> int:
        """The number of pages at the table's start that the prefix index owns."""
        return self.cache_protected_len // self.page_size

    @property
    def first_pages(self) -> tuple[int, ...]:
        """For each pool the first page that the lease has there; 0 in a pool without a window."""
        return tuple(self._rows.frontiers[:, self.row].tolist())

    def tables(self) -> list[list[int]]:
        """Get each pool's page table, see `pages`."""
        tables: list[list[int]]
        tables = self._rows.page_tables[:, self.row, : self.num_pages].tolist()
        return tables

    def own_pages(self, pool: int = 0) -> Pages:
        """Copy the page ids of a pool that this lease owns, without those that the index lent it.

        A page that `LeaseTable.borrow` has set aside comes last.
        """
        first = max(self._rows.frontiers.item(pool, self.row), self.num_protected_pages)
        table = self._rows.page_tables[pool, self.row]
        return np.concatenate((table[first : self.num_pages], self._set_aside[pool]))

    def all_own_pages(self) -> list[Pages]:
        """Copy for each pool the page ids that this lease owns."""
        return [self.own_pages(pool) for pool in self._shape.pool_numbers]

    def pages(self, pool: int = 0) -> Pages:
        """Copy a pool's page table in token order; -1 where a page has left the window."""
        return self._rows.page_tables[pool, self.row, : self.num_pages].copy()

    def can_go_back(self, prefix_len: int) -> bool:
        """Whether the lease itself still has all that a token at `prefix_len` sees."""
        if prefix_len < self.cache_protected_len:
            return False
        needed = [
            self._shape.first_page_seen(pool, prefix_len) for pool in self._shape.pool_numbers
        ]
        return all(map(int.__le__, self.first_pages, needed))

    # Changed by this room alone

    def adopt(self, lock: PrefixLock) -> PrefixLock | None:
        """Begin the tables with the pages that `lock` locks.

        Returns:
            The lock that the lease had before, which the caller has to end.
        """
        self._rows.protect(self.row, lock.pages, lock.num_pages * self.page_size)
        before, self._prefix_lock = self._prefix_lock, lock
        return before

    def narrow(self, lock: PrefixLock) -> None:
        """Keep the rest of the lock, whose other pages are in no table any more."""
        self._prefix_lock = lock

    def set_aside(self, pool: int, at: int, replacement: int) -> None:
        """Put a fresh page in the place of page `at` of a table, and keep the old one aside."""
        self._set_aside[pool] = self._rows.replace_page(pool, self.row, at, replacement)

    def swap_set_aside(self, at: int) -> bool:
        """Exchange page `at` of each table with the page aside; `False` if there is none."""
        found = False
        for pool, aside in enumerate(self._set_aside):
            if len(aside):
                self.set_aside(pool, at, int(aside[0]))
                found = True
        return found

    def drop_set_aside(self) -> list[Pages]:
        """Take for each pool the pages that were aside. The caller must free them."""
        aside, self._set_aside = self._set_aside, [NO_PAGES for _ in self._set_aside]
        return aside

    def add_fences(self, fences: Iterable[Fence]) -> None:
        """Make every release of the lease's pages wait for `fences`, too."""
        self._fences += fences

    def pending(self, others: Iterable[Fence]) -> list[Fence]:
        """Join `others` with the lease's own fences, as far as they have not passed."""
        self._fences = [fence for fence in self._fences if not fence.passed()]
        return [*(fence for fence in others if not fence.passed()), *self._fences]

    def leave_row(self) -> int:
        """Forget the row and all lengths. Returns the row, which the caller must free."""
        row, self.row = self.row, -1
        self._rows.clear(row)
        return row

    def move_to(self, state: LeaseState) -> None:
        """Take one step of `TRANSITIONS`; any other raises `KVCacheError`."""
        if state not in TRANSITIONS[self.state]:
            raise KVCacheError(f"{self.holder}: its lease is {self.state.name}, not for {state!r}")
        self._rows.set_state(self.row, state)

    def check_open(self, action: str) -> None:
        """Raise `KVCacheError` unless the lease is open."""
        if self.state is not LeaseState.OPEN:
            raise KVCacheError(f"{action} of {self.holder}: its lease is {self.state.name}")

    def times_rows_cleared(self) -> int:
        """Count how often a row was taken from a lease of the same manager."""
        return self._rows.times_cleared

    def __repr__(self) -> str:
        return (
            f"Lease({self.holder!r}, {self.state.name}, row={self.row}, "
            f"protected={self.cache_protected_len}, committed={self.kv_committed_len}, "
            f"allocated={self.kv_allocated_len})"
        )


class Batch(tuple[Lease, ...]):
    """Leases that take steps together: their rows are looked up once, not in every call.

    The rows are looked up again when a lease of the same manager has been released.
    """

    _found: Ints
    _as_of = -1

    def rows(self) -> Ints:
        """Get the rows of its leases."""
        cleared = self[0].times_rows_cleared() if self else 0
        if cleared != self._as_of:
            self._found, self._as_of = _rows_of(self), cleared
        return self._found


def rows_of(leases: Sequence[Lease]) -> Ints:
    """Get the row of each lease."""
    return leases.rows() if isinstance(leases, Batch) else _rows_of(leases)


def _rows_of(leases: Sequence[Lease]) -> Ints:
    return np.fromiter([lease.row for lease in leases], np.intp, len(leases))
