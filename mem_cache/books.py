"""Who has each page of every pool and each row, and who was promised more.

The state behind `Ledger`, and the only code that moves a page between owners.
What changes a lease's lengths is in `growth.py`, what it gives to the prefix
index and takes from there in `sharing.py`, what a session does with it in
`turns.py`, and the proof that nothing was lost in `audit.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from kvrelay.mem_cache.account import Owner, PageAccount, Pages, Shares
from kvrelay.mem_cache.counts import CacheCounts, PoolShape, window_pages
from kvrelay.mem_cache.fence import Fence
from kvrelay.mem_cache.lease import Lease, LeaseState
from kvrelay.mem_cache.prefix_index import NO_PAGE, PrefixIndex, PrefixLock
from kvrelay.mem_cache.rows import Ints, Rows

Tokens = TypeVar("Tokens", int, Ints)


@dataclass(frozen=True, slots=True)
class Quarantined:
    """What comes back when every fence has passed."""

    holder: str
    pages: tuple[Pages, ...]
    row: int | None
    lock: PrefixLock | None
    fences: tuple[Fence, ...]
    since: float


class Books:
    """All pools' pages, and the rows. See `Ledger` for the arguments.

    Lists by pool are in the order of `pools`.
    """

    def __init__(
        self,
        pools: Sequence[PoolShape],
        page_size: int,
        total_rows: int,
        max_row_tokens: int,
        ahead: int,
        index: PrefixIndex,
        clock: Callable[[], float],
    ) -> None:
        self.pools = tuple(pools)
        self.numbers = range(len(self.pools))
        self.page_size = page_size
        self.index = index
        self.cache_counts = CacheCounts()
        self.published = 0
        """How often the prefix index was given something."""
        self._ahead = ahead
        self._clock = clock
        self.accounts = [PageAccount(pool.name, pool.total_pages) for pool in self.pools]
        self.rows = Rows(len(self.pools), total_rows, self.pages_for(max_row_tokens))
        self.free_rows = list(range(total_rows))[::-1]
        self.leases: dict[int, Lease] = {}
        self.saved_rows = 0
        self.quarantine: list[Quarantined] = []
        # Counted apart from the owners of pages, so that the one proves the other.
        self.held = [0] * len(self.pools)
        self.saved = [0] * len(self.pools)
        self.quarantined = [0] * len(self.pools)
        self.promised = [0] * len(self.pools)

    # How many pages

    def pages_for(self, tokens: Tokens) -> Tokens:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def most_pages(self, pool: int, tokens: int) -> int:
        """Pages of a pool that a lease of `tokens` tokens ever has at the same time."""
        pages, window = self.pages_for(tokens), self.pools[pool].window
        if window is None:
            return pages
        return min(pages, window_pages(window, self.page_size, self._ahead))

    def frontier(self, pool: int, position: int) -> int:
        """The first page of a pool that a prefix up to the page before `position`'s needs."""
        window = self.pools[pool].window
        if window is None:
            return 0
        return max(0, position // self.page_size - self.pages_for(window - 1))

    def can_go_back(self, lease: Lease, prefix_len: int) -> bool:
        """See `Ledger.can_go_back`."""
        if prefix_len < lease.cache_protected_len:
            return False
        frontiers = [self.frontier(pool, prefix_len) for pool in self.numbers]
        return all(map(int.__le__, lease.first_pages, frontiers))

    def room(self) -> tuple[int, ...]:
        """What admission depends on: the more of any of these, the sooner it succeeds."""
        pages = [self.unpromised(pool) for pool in self.numbers]
        return (len(self.free_rows), self.published, *pages)

    def unpromised(self, pool: int) -> int:
        """Pages that can be had without breaking a promise."""
        free = len(self.accounts[pool].free_pages)
        return free + self.index.evictable(pool) - self.promised[pool]

    def promises(self, tokens: int, known_pages: int) -> list[int]:
        """Pages of each pool that a lease of `tokens` may yet take, the first being known."""
        missing = self.pages_for(tokens) - known_pages
        return [min(missing, self.most_pages(pool, tokens)) for pool in self.numbers]

    # Leases, and what they are promised

    def enter_lease(
        self,
        holder: str,
        namespace: str,
        promised_tokens: int,
        promises: Sequence[int],
        lock: PrefixLock | None,
    ) -> Lease:
        """A new lease on a free row, with what `lock` locks; there must be a row and the pages."""
        row = self.free_rows.pop()
        lease = Lease(holder, row, self.rows, self.page_size, namespace)
        self.leases[row] = lease
        self.rows.states[row] = LeaseState.OPEN
        self.promise(lease, promised_tokens, promises)
        if lock is not None:
            self.adopt(lease, lock)
            self.rows.committed[row] = self.rows.allocated[row] = self.rows.protected[row]
        return lease

    def leave_lease(self, lease: Lease, pending: Sequence[Fence]) -> None:
        """Take back all that a lease has: it has no row any more."""
        self.break_promise(lease)
        owned = [lease.own_pages(pool) for pool in self.numbers]
        row, lease.row = lease.row, -1
        del self.leases[row]
        self.rows.clear(row)
        self.let_go(lease.holder, owned, pending, row=row, lock=lease._prefix_lock)

    def adopt(self, lease: Lease, lock: PrefixLock) -> None:
        """Take the pages of a lock on the index into the lease's tables."""
        rows, row = self.rows, lease.row
        for pool, pages in enumerate(lock.pages):
            rows.page_tables[pool, row, : len(pages)] = pages
            present = np.flatnonzero(pages != NO_PAGE)
            first = int(present[0]) if len(present) else 0
            rows.frontiers[pool, row] = max(rows.frontiers[pool, row], first)
        lease._prefix_lock = lock
        rows.protected[row] = lock.num_pages * self.page_size

    def promise(self, lease: Lease, tokens: int, promises: Sequence[int]) -> None:
        """Promise a lease `tokens` tokens, and for them so many pages of each pool."""
        self.rows.promised_tokens[lease.row] = tokens
        self.promise_more(lease, promises)

    def promise_more(self, lease: Lease, promises: Sequence[int]) -> None:
        """Promise a lease so many further pages of each pool."""
        self.rows.promised_pages[:, lease.row] += np.asarray(promises)
        for pool, pages in enumerate(promises):
            self.promised[pool] += pages

    def promise_again(self, pool: int, rows: Ints, freed: Ints) -> None:
        """Promise each row what it has just let go of, as far as its lease may still grow."""
        promised = self.rows.promised_pages[pool]
        most = self.pages_for(self.rows.promised_tokens[rows])
        to_come = most - self.pages_for(self.rows.allocated[rows]) - promised[rows]
        again = np.maximum(np.minimum(freed, to_come), 0)
        promised[rows] += again
        self.promised[pool] += int(again.sum())

    def break_promise(self, lease: Lease) -> None:
        """It will not grow any more."""
        for pool, pages in enumerate(self.rows.promised_pages[:, lease.row].tolist()):
            self.promised[pool] -= pages
        self.rows.promised_pages[:, lease.row] = 0
        self.rows.promised_tokens[lease.row] = 0

    # Moves between owners

    def take(self, pool: int, shares: Shares) -> Pages:
        """Hand out pages to leases, evicting for them; there must be as many."""
        wanted = sum([number for _, number in shares])
        missing = wanted - len(self.accounts[pool].free_pages)
        if missing > 0:
            for number, pages in enumerate(self.index.evict(pool, missing)):
                self._leave_index(number, pages)
                self.cache_counts.evicted_pages += len(pages)
        self.held[pool] += wanted
        return self.accounts[pool].take_each(shares)

    def free(self, pool: int, shares: Shares, pages: Pages) -> None:
        """Take pages from leases that nothing reads or writes any more."""
        self.accounts[pool].move_each(shares, pages, Owner.LEASE, Owner.FREE)
        self.held[pool] -= len(pages)

    def let_go(
        self,
        holder: str,
        pages: Iterable[Pages],
        pending: Sequence[Fence],
        *,
        row: int | None = None,
        lock: PrefixLock | None = None,
    ) -> None:
        """Free a lease's `pages` of each pool, or quarantine them while anything is `pending`."""
        leaving = tuple(pages)
        target = Owner.QUARANTINE if pending else Owner.FREE
        for pool, some in enumerate(leaving):
            self.accounts[pool].move(holder, some, Owner.LEASE, target)
            self.held[pool] -= len(some)
        if not pending:
            self._end(row, lock)
        elif row is not None or lock is not None or any(map(len, leaving)):
            for pool, some in enumerate(leaving):
                self.quarantined[pool] += len(some)
            self.quarantine.append(
                Quarantined(holder, leaving, row, lock, tuple(pending), self._clock())
            )

    def reclaim(self) -> int:
        """See `Ledger.reclaim`."""
        if not self.quarantine:
            return 0
        freed, waiting = 0, []
        for entry in self.quarantine:
            if not all(fence.passed() for fence in entry.fences):
                waiting.append(entry)
                continue
            for pool, pages in enumerate(entry.pages):
                self.accounts[pool].move(entry.holder, pages, Owner.QUARANTINE, Owner.FREE)
                self.quarantined[pool] -= len(pages)
                freed += len(pages)
            self._end(entry.row, entry.lock)
        self.quarantine = waiting
        return freed

    def give_to_index(self, lease: Lease, taken: Sequence[Pages]) -> None:
        """The prefix index has taken these of a lease's pages."""
        self.published += 1
        for pool, pages in enumerate(taken):
            self.accounts[pool].move(lease.holder, pages, Owner.LEASE, Owner.INDEX)
            self.held[pool] -= len(pages)

    def unlock(self, lock: PrefixLock) -> None:
        """End one lock on the prefix index."""
        for pool, pages in enumerate(self.index.unlock(lock)):
            self._leave_index(pool, pages)

    def hand(self, lease: Lease, source: Owner, target: Owner) -> None:
        """Move all that a lease owns, and its row, between requests and sessions."""
        to_session = target is Owner.SESSION
        self.saved_rows += 1 if to_session else -1
        for pool, account in enumerate(self.accounts):
            pages = lease.own_pages(pool)
            account.move(lease.holder, pages, source, target)
            saved = len(pages) if to_session else -len(pages)
            self.saved[pool] += saved
            self.held[pool] -= saved

    def _leave_index(self, pool: int, pages: Pages) -> None:
        self.accounts[pool].move("prefix index", pages, Owner.INDEX, Owner.FREE)

    def _end(self, row: int | None, lock: PrefixLock | None) -> None:
        """Unlock a prefix and free a row, the row last."""
        if lock is not None:
            self.unlock(lock)
        if row is not None:
            self.free_rows.append(row)
