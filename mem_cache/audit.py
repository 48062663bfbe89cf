"""The proof that no page and no row is lost or owned twice, and who owns each. See README.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvrelay.mem_cache.account import NO_PAGE, Owner, Pages
from kvrelay.mem_cache.errors import ConservationError
from kvrelay.mem_cache.leases.lease import LeaseState
from kvrelay.mem_cache.leases.lease_table import LeaseTable
from kvrelay.mem_cache.leases.ledger import Ledger
from kvrelay.wire.load import PoolCounts

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class OwnerRun:
    """A run of adjacent pages of one owner."""

    first_page: int
    num_pages: int
    owner: Owner
    holder: str
    """The holder of the lease for which the owner has them; empty if there is none."""


class Audit:
    """The audit: counts pages and rows by owner, and compares both accounts. It changes nothing.

    Args:
        ledger: of the cache.
        leases: all of them.
    """

    def __init__(self, ledger: Ledger, leases: LeaseTable) -> None:
        self._pools = ledger.shape.pool_numbers
        self._page_size = ledger.shape.page_size
        self._rows = ledger.rows
        self._index = ledger.index
        self._allocator = ledger.allocator
        self._promises = ledger.promises
        self._leases = leases

    # Counts

    def page_counts(self) -> tuple[PoolCounts, ...]:
        """Count the pages of each pool by state. O(1)."""
        return tuple([self._pool_counts(pool) for pool in self._pools])

    def row_counts(self) -> PoolCounts:
        """Count the rows by state."""
        allocator = self._allocator
        return PoolCounts(
            pool="rows",
            page_size=0,
            total=self._allocator.total_rows,
            free=len(self._allocator.free_rows),
            held=len(self._leases.by_row) - allocator.session_rows,
            cached_evictable=0,
            cached_protected=0,
            session=allocator.session_rows,
            quarantined=self._quarantined_rows(),
            promised=0,
        )

    def counts(self) -> tuple[PoolCounts, ...]:
        """List the counts of every pool's pages, and last of the rows."""
        return (*self.page_counts(), self.row_counts())

    def _quarantined_rows(self) -> int:
        return sum([entry.row is not None for entry in self._allocator.quarantine])

    def _pool_counts(self, pool: int) -> PoolCounts:
        allocator, evictable = self._allocator, self._index.evictable(pool)
        account = allocator.accounts[pool]
        return PoolCounts(
            pool=account.name,
            page_size=self._page_size,
            total=account.total,
            free=len(account.free_pages),
            held=allocator.lease_pages[pool],
            cached_evictable=evictable,
            cached_protected=self._index.size(pool) - evictable,
            session=allocator.session_pages[pool],
            quarantined=allocator.quarantined_pages[pool],
            promised=self._promises.totals[pool],
        )

    def pages_in_tables(self, pool: int, *, idle: bool) -> Bools:
        """Mark, ``[total]``, pages that leases of idle sessions, or else others, have or lock."""
        found = np.zeros(self._allocator.accounts[pool].total, np.bool_)
        for lease in self._leases.by_row.values():
            if (lease.state is LeaseState.SAVED) is idle:
                pages = lease.pages(pool)
                found[pages[pages != NO_PAGE]] = True
        return found

    # Checks

    def check(self) -> None:
        """Check the conservation equation of pages and rows. O(1), for every step.

        The pages that leases, sessions, the index and the quarantine claim must match the recorded
        owners.

        Raises:
            ConservationError: something was lost or is counted twice.
        """
        for pool, account in enumerate(self._allocator.accounts):
            claimed = self._claimed_pages(pool)
            if sum(claimed) != account.total:
                counts = self._pool_counts(pool)
                raise ConservationError(f"{sum(claimed)} of {account.total}: {counts}")
            if claimed != account.by_owner:
                raise ConservationError(
                    f"{account.name}: pages say {account.by_owner}, their owners {claimed}"
                )
            promised = self._promises.totals[pool]
            if not 0 <= promised <= self._allocator.available(pool):
                raise ConservationError(f"{promised} pages promised: {self._pool_counts(pool)}")
        owned = len(self._allocator.free_rows) + len(self._leases.by_row) + self._quarantined_rows()
        if owned != self._allocator.total_rows:
            raise ConservationError(f"{owned} of {self._allocator.total_rows}: {self.row_counts()}")

    def _claimed_pages(self, pool: int) -> list[int]:
        """Count the pages of a pool that each `Owner` claims, in the order of `Owner`.

        Pages that copies from a lower tier write are a lease's.
        """
        allocator = self._allocator
        return [
            len(allocator.accounts[pool].free_pages),
            allocator.lease_pages[pool],
            self._index.size(pool),
            allocator.session_pages[pool],
            allocator.quarantined_pages[pool],
            0,
        ]

    def check_pages(self) -> None:
        """Check every page and row one by one, besides `check`. For tests and debugging.

        Raises:
            ConservationError: names a page that is lost or has two owners, and its history.
        """
        self.check()
        indexed = self._index.audit()
        for pool, account in enumerate(self._allocator.accounts):
            claimed = []
            for owner, pages in self._claims(pool, indexed[pool]):
                account.check_owner(pages, owner)
                claimed.append(pages)
            claims = np.bincount(np.concatenate(claimed), minlength=account.total)
            for page in np.flatnonzero(claims != 1).tolist():
                raise ConservationError(
                    f"{account.name} page {page} has {claims[page]} owners: {account.history(page)}"
                )
        self._check_rows()

    def _check_rows(self) -> None:
        """Raise `ConservationError` unless each row has one owner, and released leases none."""
        quarantine = self._allocator.quarantine
        quarantined = [entry.row for entry in quarantine if entry.row is not None]
        total = self._allocator.total_rows
        rows = [*self._allocator.free_rows, *self._leases.by_row, *quarantined]
        if sorted(rows) != list(range(total)):
            raise ConservationError(f"of {total} rows these are owned: {sorted(rows)}")
        if self._rows.allocated[-1] or self._rows.states[-1]:
            raise ConservationError("something was done to a lease that was released")

    def _claims(self, pool: int, indexed: Pages) -> Iterator[tuple[Owner, Pages]]:
        """Yield each owner's claims on a pool."""
        yield Owner.FREE, self._allocator.accounts[pool].free_pages
        yield Owner.INDEX, indexed
        for entry in self._allocator.quarantine:
            yield Owner.QUARANTINE, entry.pages[pool]
        for lease in self._leases.by_row.values():
            saved = lease.state is LeaseState.SAVED
            yield Owner.SESSION if saved else Owner.LEASE, lease.own_pages(pool)

    # For the search for a page, and for drills

    def lose_page(self) -> None:
        """Lose a free page, if there is one, on purpose: every check fails from now on."""
        for account in self._allocator.accounts:
            if len(account.free_pages):
                account.allocate((("nobody: it was lost on purpose", 1),))
                return

    def owner_runs(self, pool: int) -> list[OwnerRun]:
        """List every page of a pool once, in order, as runs of one owner and lease."""
        account = self._allocator.accounts[pool]
        owners = account.owner_of.copy()
        holders = [""]
        held_by = np.zeros(len(owners), np.int32)  # indices into `holders`
        for lease in self._leases.by_row.values():
            held_by[lease.own_pages(pool)] = len(holders)
            holders.append(lease.holder)
        for entry in self._allocator.quarantine:
            owners[entry.pages[pool]] = Owner.QUARANTINE
            held_by[entry.pages[pool]] = len(holders)
            holders.append(entry.holder)
        changes = np.flatnonzero((np.diff(owners) != 0) | (np.diff(held_by) != 0)) + 1
        starts = np.concatenate(([0], changes))
        counts = np.diff(np.concatenate((starts, [len(owners)])))
        return [
            OwnerRun(first, count, Owner(owners[first]), holders[held_by[first]])
            for first, count in zip(starts.tolist(), counts.tolist(), strict=True)
        ]
