"""The only code that moves a page of the device: it allocates, frees, quarantines and reclaims.

These methods move pages to the free list, and nothing else does:

- `free`: a lease's pages that nothing reads or writes any more;
- `free_after`: a lease's pages, at once if no fence protects them; otherwise they
  go to quarantine, and `reclaim` frees them once the fences have passed;
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
from kvrelay.mem_cache.leases.lease import Lease
from kvrelay.mem_cache.leases.rows import Rows
from kvrelay.mem_cache.prefix.prefix_index import PrefixIndex, PrefixLock
from kvrelay.mem_cache.shape import PoolShape

_STAYS: Final = {kind: rank for rank, kind in enumerate(FenceKind)}
"""How long a reader or writer may stay, by order."""


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
        """What it waits for; of several fences the one that may stay longest."""
        kinds = [fence.kind for fence in self.fences if not fence.passed()]
        return max(kinds, key=_STAYS.__getitem__, default=FenceKind.FORWARD)


class PageAllocator:
    """The pages of all pools, and the rows, by who owns them.

    Lists by pool are in the order of `pools`.

    Args:
        pools: their shapes.
        rows: of which it frees those of released leases.
        index: the prefix index, from which it evicts when free pages are short.
        clock: seconds, monotonic; only ever used to report an age.
    """

    def __init__(
        self,
        pools: Sequence[PoolShape],
        rows: Rows,
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
        self._rows = rows
        self._index = index
        self._clock = clock

    def available(self, pool: int) -> int:
        """Pages of a pool that `allocate` could hand out: free ones, and those it could evict."""
        return len(self.accounts[pool].free_pages) + self._index.evictable(pool)

    def count_allocations(self) -> None:
        """Count from now on how often each page is handed out, for `times_allocated`."""
        for account in self.accounts:
            account.count_allocations()

    def times_allocated(self, pool: int, pages: Pages) -> npt.NDArray[np.uint32]:
        """How often each of these pages was handed out: if more often, it was written anew."""
        times = self.accounts[pool].times_allocated
        assert times is not None, "allocations are not counted"
        return times[pages]

    @property
    def quarantined_since(self) -> float | None:
        """When the oldest quarantined memory came there, by the clock; `None` if there is none."""
        return min((entry.since for entry in self.quarantine), default=None)

    def quarantine_counts(self) -> dict[FenceKind, QuarantineCounts]:
        """What is in quarantine, by what it waits for; what nothing waits for is left out."""
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

    def allocate(self, pool: int, shares: Shares) -> Pages:
        """Hand out pages to leases, evicting for them; as many must be `available`."""
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
        """Free a lease's pages when all fences have passed: until then they are in quarantine.

        Args:
            pending: fences that have not passed; if there are none, all is freed at once.
            holder: of the lease.
            pages: for each pool those to be freed.
            row: to be freed with them, as the last.
            lock: on a prefix, to be ended with them.
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
        """Free what no fence protects any more; returns the number of pages freed."""
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
        """End one lock on the prefix index, and free what it lets go of for that."""
        for pool, pages in enumerate(self._index.unlock(lock)):
            if len(pages):
                self._free_indexed(pool, pages)

    def unlock_pool(self, lock: PrefixLock, pool: int) -> PrefixLock:
        """End a lock in one pool, free what the index lets go of, and return what is left of it."""
        left, gone = self._index.unlock_pool(lock, pool)
        for number, pages in enumerate(gone):
            if len(pages):
                self._free_indexed(number, pages)
        return left

    # Sessions

    def move_to_session(self, lease: Lease) -> None:
        """Make all that a lease owns, and its row, a session's."""
        self.session_rows += 1
        for pool, number in enumerate(self._move_all(lease, Owner.LEASE, Owner.SESSION)):
            self.session_pages[pool] += number
            self.lease_pages[pool] -= number

    def move_from_session(self, lease: Lease) -> None:
        """Make all that a session's lease owns, and its row, a request's again."""
        self.session_rows -= 1
        for pool, number in enumerate(self._move_all(lease, Owner.SESSION, Owner.LEASE)):
            self.session_pages[pool] -= number
            self.lease_pages[pool] += number

    # Inside

    def _move_all(self, lease: Lease, source: Owner, target: Owner) -> list[int]:
        """Move a lease's own pages; returns for each pool how many they are."""
        numbers = []
        for pool, account in enumerate(self.accounts):
            pages = lease.own_pages(pool)
            account.move(((lease.holder, len(pages)),), pages, source, target)
            numbers.append(len(pages))
        return numbers

    def _free_indexed(self, pool: int, pages: Pages) -> None:
        shares = (("prefix index", len(pages)),)
        self.accounts[pool].move(shares, pages, Owner.INDEX, Owner.FREE)

    def _free_row(self, row: int | None, lock: PrefixLock | None) -> None:
        """Unlock a prefix and free a row, the row last."""
        if lock is not None:
            self.unlock(lock)
        if row is not None:
            self._rows.free_rows.append(row)
