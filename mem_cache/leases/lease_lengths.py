"""The changes of leases' lengths, and with them of their pages: grow, commit, slide, trim.

All operations take many leases at once: an array has one entry a lease.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvrelay.mem_cache.account import Pages
from kvrelay.mem_cache.errors import KVCacheError
from kvrelay.mem_cache.fence import Fence
from kvrelay.mem_cache.leases.lease import Lease, LeaseState, rows_of
from kvrelay.mem_cache.leases.ledger import Ledger
from kvrelay.mem_cache.shape import Ints

_OPEN = LeaseState.OPEN.value


class _Missing(NamedTuple):
    """The pages of one pool that growing rows lack; arrays with an entry a row."""

    first: Ints
    """The place of the first missing page in the row's table."""
    number: Ints
    promised: Ints
    """The number of them that the row was promised."""


class LeaseLengths:
    """The lengths of open leases, whose pages are allocated and freed accordingly.

    Args:
        ledger: of the cache.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._shape = ledger.shape
        self._rows = ledger.rows
        self._allocator = ledger.allocator
        self._promises = ledger.promises

    def grow(self, leases: Sequence[Lease], tokens: Sequence[int] | Ints) -> bool:
        """Raise `kv_allocated_len` of every lease to its number of tokens, all or nothing."""
        rows = self._open_rows(leases, "growth")
        goals = _one_each(tokens, leases)
        has = self._shape.pages_for(self._rows.allocated[rows])
        needs = self._shape.pages_for(goals)
        growing = np.flatnonzero(needs > has)
        if len(growing):
            holders = [leases[one].holder for one in growing.tolist()]
            if not self._append_pages(holders, rows[growing], has[growing], needs[growing]):
                return False
        self._rows.raise_allocated(rows, goals)
        return True

    def pages_to_grow(self, leases: Sequence[Lease], tokens: Sequence[int] | Ints) -> list[int]:
        """Count for each pool the pages that growth takes beyond those that were promised."""
        rows = self._open_rows(leases, "growth")
        has = self._shape.pages_for(self._rows.allocated[rows])
        needs = np.maximum(has, self._shape.pages_for(_one_each(tokens, leases)))
        lacks = [self._find_missing(pool, rows, has, needs) for pool in self._shape.pool_numbers]
        return [int(lack.number.sum() - lack.promised.sum()) for lack in lacks]

    def commit(self, leases: Sequence[Lease], tokens: Sequence[int] | Ints) -> None:
        """Raise `kv_committed_len` of every lease to its number of tokens, all or nothing."""
        rows = self._open_rows(leases, "commit")
        goals = _one_each(tokens, leases)
        for one in self._rows.raise_committed(rows, goals).tolist():
            raise KVCacheError(f"commit of {goals[one]} tokens to {leases[one]!r}")

    def slide(self, leases: Sequence[Lease], positions: Sequence[int] | Ints) -> None:
        """Free the pages of window pools that no token from each lease's position on sees."""
        for pool, shape in enumerate(self._shape.pools):
            if shape.window is None:
                continue
            rows = self._open_rows(leases, "sliding")
            behind = self._shape.pages_for(shape.window - 1)
            frontiers = _one_each(positions, leases) // self._shape.page_size - behind
            moving = np.flatnonzero(frontiers > self._rows.frontiers[pool, rows])
            if len(moving):
                sliding = [leases[one] for one in moving.tolist()]
                self._advance_frontiers(pool, sliding, rows[moving], frontiers[moving])

    def trim(self, lease: Lease, tokens: int, pending: Sequence[Fence] = ()) -> None:
        """Lower both lengths to `tokens`, and free the pages beyond once `pending` has passed."""
        lease.check_open("trimming")
        if tokens < lease.cache_protected_len:
            raise KVCacheError(f"trim of {lease!r} to {tokens} tokens")
        kept, row = self._shape.pages_for(tokens), lease.row
        tails = self._rows.cut(row, kept)
        self._rows.set_committed(row, min(lease.kv_committed_len, tokens))
        self._rows.set_allocated(row, min(lease.kv_allocated_len, kept * self._shape.page_size))
        self._allocator.free_after(pending, lease.holder, tails)
        if not pending:
            for pool, pages in enumerate(tails):
                self._promises.renew(pool, np.array([row]), np.array([len(pages)]))

    def committed(self, leases: Sequence[Lease]) -> Ints:
        """Get the `kv_committed_len` of each lease, as a copy."""
        return self._rows.committed[rows_of(leases)]

    def page_tables(self, leases: Sequence[Lease]) -> tuple[Pages, ...]:
        """Copy for each pool the leases' tables, ``[len(leases), most pages of any]``."""
        rows = rows_of(leases)
        widest = self._shape.pages_for(int(self._rows.allocated[rows].max()))
        return tuple(table[rows, :widest] for table in self._rows.page_tables)

    # Inside

    def _open_rows(self, leases: Sequence[Lease], action: str) -> Ints:
        """Get the row of each lease. Raises `KVCacheError` unless all are open."""
        rows = rows_of(leases)
        if np.count_nonzero(self._rows.states[rows] != _OPEN):
            for lease in leases:
                lease.check_open(action)
        return rows

    def _append_pages(self, holders: list[str], rows: Ints, has: Ints, needs: Ints) -> bool:
        """Raise the pages of each row's tables from `has` to `needs`, in every pool or in none."""
        if needs.max() > self._rows.row_pages:
            return False
        missing = []
        for pool in self._shape.pool_numbers:
            lack = self._find_missing(pool, rows, has, needs)
            if self._promises.unpromised(pool) < lack.number.sum() - lack.promised.sum():
                return False
            missing.append(lack)
        for pool, (first, number, promised) in enumerate(missing):
            shares = list(zip(holders, number.tolist(), strict=True))
            pages = self._allocator.allocate(pool, shares)
            self._rows.put_pages(pool, rows, first, number, pages)
            self._promises.use(pool, rows, promised)
        return True

    def _find_missing(self, pool: int, rows: Ints, has: Ints, needs: Ints) -> _Missing:
        """Find the pages that rows lack between `has` and `needs`; none before their frontiers."""
        first = np.maximum(has, self._rows.frontiers[pool, rows])
        number = np.maximum(needs - first, 0)
        promised = np.minimum(number, self._rows.promised_pages[pool, rows])
        return _Missing(first, number, promised)

    def _advance_frontiers(
        self, pool: int, leases: Sequence[Lease], rows: Ints, frontiers: Ints
    ) -> None:
        """Raise the frontier of each row, and free the pages that its lease owns before it.

        ::

            before ........ protected ........ frontier, or the table's end
            | the index's,  | the lease's own, |
            | only unlisted | freed            |

        A lease whose window has passed all that it locks in this pool locks it no longer.
        """
        holders = [lease.holder for lease in leases]
        before = self._rows.frontiers[pool, rows]
        protected = self._rows.protected[rows] // self._shape.page_size
        end = np.minimum(frontiers, self._shape.pages_for(self._rows.allocated[rows]))
        self._rows.set_frontiers(pool, rows, frontiers)
        unlisted = np.maximum(np.minimum(protected, end) - before, 0)
        if np.count_nonzero(unlisted):
            self._rows.take_pages(pool, rows, before, unlisted)
        first = np.maximum(before, protected)
        freed = np.maximum(end - first, 0)
        pages = self._rows.take_pages(pool, rows, first, freed)
        self._allocator.free(pool, list(zip(holders, freed.tolist(), strict=True)), pages)
        self._promises.renew(pool, rows, freed)
        for one in np.flatnonzero((before < protected) & (protected <= frontiers)).tolist():
            lock = leases[one].prefix_lock
            assert lock is not None, "pages are protected without a lock"
            leases[one].narrow(self._allocator.unlock_pool(lock, pool))


def _one_each(numbers: Sequence[int] | Ints, leases: Sequence[Lease]) -> Ints:
    """Convert the numbers to an array. Raises `KVCacheError` unless there is one for each lease."""
    if len(numbers) != len(leases):
        raise KVCacheError(f"{len(numbers)} numbers for {len(leases)} leases")
    return np.asarray(numbers, np.int64)
