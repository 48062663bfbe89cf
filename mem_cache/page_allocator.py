"""The only code that moves a page of the device, or a row, between owners.

Only these methods move pages to the free list:

- `free`: a lease's pages that nothing reads or writes any more;
- `free_after`: a lease's pages, at once if no fence protects them; otherwise they go to
  quarantine, and `reclaim` frees them later;
- `_free_indexed`: pages that the prefix index evicts (in `allocate`), or that it
  keeps for no lock any longer (in `unlock`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvrelay.mem_cache.account import Owner, PageAccount, Pages, Shares
from kvrelay.mem_cache.counts import CacheCounts, QuarantineCounts
from kvrelay.mem_cache.fence import Fence, FenceKind
from kvrelay.mem_cache.prefix.prefix_index import PrefixIndex, PrefixLock
from kvrelay.mem_cache.shape import PoolShape

_STAYS: Final = {kind: rank for rank, kind in enumerate(FenceKind)}
"""The kinds of readers and writers, ranked by how long they may stay."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Pages, a row and a lock that may not be used again until every fence has passed."""

    holder: str
    pages: tuple[Pages, ...]
    row: int | None
    lock: PrefixLock | None
    fences: tuple[Fence, ...]
    since: float

    @property
    def kind(self) -> FenceKind:
        """The fence that it waits for; of several the one that may stay longest."""
        kinds = [fence.kind for fence in self.fences if not fence.passed()]
        return max(kinds, key=_STAYS.__getitem__, default=FenceKind.FORWARD)


class PageAllocator:
    """The pages of all pools, and the rows, with their owners.

    Lists by pool are in the order of `pools`.

    Args:
        pools: their shapes.
        total_rows: the number of rows.
        index: the prefix index, from which it evicts when free pages are short.
        clock: seconds, monotonic; only ever used to report an age.
    """

    def __init__(
        self,
        pools: Sequence[PoolShape],
        total_rows: int,
        index: PrefixIndex,
        clock: Callable[[], float],
    ) -> None:
        self.accounts = [PageAccount(pool.name, pool.total_pages) for pool in pools]
        self.cache_counts = CacheCounts()
        self.times_published = 0
        """How often the prefix index was given pages."""
        self.quarantine: list[Quarantined] = []
        # Counted apart from the owners of pages, so that the one proves the other.
        self.lease_pages = [0] * len(pools)
        self.session_pages = [0] * len(pools)
        self.quarantined_pages = [0] * len(pools)
        self.session_rows = 0
        self.total_rows = total_rows
        self.free_rows = list(range(total_rows))[::-1]
        """The rows that no lease has; the last is handed out next; read only."""
        self._index = index
        self._clock = clock

    def available(self, pool: int) -> int:
        """Count the pages of a pool that `allocate` could hand out: free and evictable ones."""
        return len(self.accounts[pool].free_pages) + self._index.evictable(pool)

    def count_allocations(self) -> None:
        """Start to count how often each page is handed out, for `times_allocated`."""
        for account in self.accounts:
            account.count_allocations()

    def times_allocated(self, pool: int, pages: Pages) -> npt.NDArray[np.uint32]:
        """Get how often each of these pages was handed out; a higher number: it was rewritten."""
        times = self.accounts[pool].times_allocated
        assert times is not None, "allocations are not counted"
        return times[pages]

    @property
    def quarantined_since(self) -> float | None:
        """The time, by the clock, since when the oldest memory is quarantined; `None`: none."""
        return min((entry.since for entry in self.quarantine), default=None)

    def quarantine_counts(self) -> dict[FenceKind, QuarantineCounts]:
        """Count the pages in quarantine by what they wait for; kinds without pages are left out."""
        counts: dict[FenceKind, QuarantineCounts] = {}
        for entry in self.quarantine:
            kind = entry.kind
            found = counts.get(kind)
            if found is None:
                found = counts[kind] = QuarantineCounts(0, entry.since)
            found.pages += sum(map(len, entry.pages))
            found.since = min(found.since, entry.since)
        return counts

    # Leases

    def take_row(self) -> int:
        """Hand out a row. One must be free."""
        return self.free_rows.pop()

    def allocate(self, pool: int, shares: Shares) -> Pages:
        """Hand out pages to leases, evicting for them. Enough pages must be `available`."""
        wanted = sum([number for _, number in shares])
        missing = wanted - len(self.accounts[pool].free_pages)
        if missing > 0:
            for number, pages in enumerate(self._index.evict(pool, missing)):
                self._free_indexed(number, pages)
                self.cache_counts.evicted_pages += len(pages)
        self.lease_pages[pool] += wanted
        return self.accounts[pool].allocate(shares)

    def free(self, pool: int, shares: Shares, pages: Pages) -> None:
        """Free pages of leases that nothing reads or writes any more."""
        self.accounts[pool].move(shares, pages, Owner.LEASE, Owner.FREE)
        self.lease_pages[pool] -= len(pages)

    def free_after(
        self,
        pending: Sequence[Fence],
        holder: str,
        pages: Iterable[Pages],
        *,
        row: int | None = None,
        lock: PrefixLock | None = None,
    ) -> None:
        """Free a lease's pages when all fences have passed; until then they are in quarantine.

        Args:
            pending: fences that have not passed; if there are none, all is freed at once.
            holder: of the lease.
            pages: for each pool the pages to free.
            row: the row to free with them, as the last.
            lock: the lock on a prefix to end with them.
        """
        freed = tuple(pages)
        target = Owner.QUARANTINE if pending else Owner.FREE
        for pool, some in enumerate(freed):
            self.accounts[pool].move(((holder, len(some)),), some, Owner.LEASE, target)
            self.lease_pages[pool] -= len(some)
        if not pending:
            self._free_row(row, lock)
        elif row is not None or lock is not None or any(map(len, freed)):
            for pool, some in enumerate(freed):
                self.quarantined_pages[pool] += len(some)
            entry = Quarantined(holder, freed, row, lock, tuple(pending), self._clock())
            self.quarantine.append(entry)

    def reclaim(self) -> int:
        """Free memory whose fences have all passed. Returns the number of pages freed."""
        if not self.quarantine:
            return 0
        freed, waiting = 0, []
        for entry in self.quarantine:
            if not all(fence.passed() for fence in entry.fences):
                waiting.append(entry)
                continue
            for pool, pages in enumerate(entry.pages):
                shares = ((entry.holder, len(pages)),)
                self.accounts[pool].move(shares, pages, Owner.QUARANTINE, Owner.FREE)
                self.quarantined_pages[pool] -= len(pages)
                freed += len(pages)
            self._free_row(entry.row, entry.lock)
        self.quarantine = waiting
        return freed

    # The prefix index

    def move_to_index(self, holder: str, taken: Sequence[Pages]) -> None:
        """Record that the prefix index has taken these pages of a lease, for each pool."""
        self.times_published += 1
        for pool, pages in enumerate(taken):
            self.accounts[pool].move(((holder, len(pages)),), pages, Owner.LEASE, Owner.INDEX)
            self.lease_pages[pool] -= len(pages)

    def unlock(self, lock: PrefixLock) -> None:
        """End one lock on the prefix index, and free the pages that it lets go of."""
        for pool, pages in enumerate(self._index.unlock(lock)):
            if len(pages):
                self._free_indexed(pool, pages)

    def unlock_pool(self, lock: PrefixLock, pool: int) -> PrefixLock:
        """End a lock in one pool, free pages that the index lets go of, and return the rest."""
        left, gone = self._index.unlock_pool(lock, pool)
        for number, pages in enumerate(gone):
            if len(pages):
                self._free_indexed(number, pages)
        return left

    # Sessions

    def move_to_session(self, holder: str, owned: Sequence[Pages]) -> None:
        """Move all pages that a lease owns, for each pool, and its row, to a session."""
        self._move_all(holder, owned, Owner.LEASE, Owner.SESSION, 1)

    def move_from_session(self, holder: str, owned: Sequence[Pages]) -> None:
        """Move all pages that a session's lease owns, and its row, back to a request."""
        self._move_all(holder, owned, Owner.SESSION, Owner.LEASE, -1)

    # Inside

    def _move_all(
        self, holder: str, owned: Sequence[Pages], source: Owner, target: Owner, sign: int
    ) -> None:
        """Move a lease's own pages and row to a session, or back if `sign` is -1."""
        self.session_rows += sign
        for pool, pages in enumerate(owned):
            self.accounts[pool].move(((holder, len(pages)),), pages, source, target)
            self.session_pages[pool] += sign * len(pages)
            self.lease_pages[pool] -= sign * len(pages)

    def _free_indexed(self, pool: int, pages: Pages) -> None:
        shares = (("prefix index", len(pages)),)
        self.accounts[pool].move(shares, pages, Owner.INDEX, Owner.FREE)

    def _free_row(self, row: int | None, lock: PrefixLock | None) -> None:
        """Unlock a prefix and free a row, the row last."""
        if lock is not None:
            self.unlock(lock)
        if row is not None:
            self.free_rows.append(row)
