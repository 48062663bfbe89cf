"""Who holds each page and each row: leases, sessions, the prefix index, the quarantine.

The only code that moves a page between owners. See README.md for the
intervals, the states and the equation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvrelay.mem_cache.account import NO_PAGES, Owner, PageAccount, Pages
from kvrelay.mem_cache.errors import ConservationError, LedgerError
from kvrelay.mem_cache.fence import Fence
from kvrelay.mem_cache.lease import Lease, LeaseState
from kvrelay.mem_cache.prefix_index import (
    NO_PAGE,
    NoPrefixIndex,
    PrefixIndex,
    PrefixLock,
    TokenIds,
)

NO_TOKENS: TokenIds = np.empty(0, np.int32)

# Looked up once: to find a member in an enum takes longer than the rest of a loop's turn.
_OPEN = LeaseState.OPEN


@dataclass(frozen=True, slots=True)
class PoolShape:
    """What the ledger knows of a pool."""

    name: str
    total_pages: int
    window: int | None = None
    """Tokens that its layers look back, see `KVGeometry.window`."""


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """A pool's account at one moment; the states sum to `total`.

    `promised` pages are still among the free, or evictable: running requests
    may grow into them, so nobody else is admitted on their account.
    """

    pool: str
    page_size: int
    total: int
    free: int
    held: int
    cached_evictable: int
    cached_protected: int
    session: int
    quarantined: int
    promised: int

    @property
    def accounted(self) -> int:
        """The sum of all states."""
        return (
            self.free
            + self.held
            + self.cached_evictable
            + self.cached_protected
            + self.session
            + self.quarantined
        )


@dataclass(slots=True)
class CacheCounts:
    """What the prefix index has done so far."""

    lookups: int = 0
    hits: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0
    duplicate_pages: int = 0


@dataclass(frozen=True, slots=True)
class _Quarantined:
    """What comes back when every fence has passed."""

    holder: str
    pages: tuple[Pages, ...]
    row: int | None
    lock: PrefixLock | None
    fences: tuple[Fence, ...]
    since: float


class Ledger:
    """The account of one worker's KV pages and rows.

    Not thread-safe: the engine thread alone calls it. Shortage returns `None`
    or `False` with nothing changed, in no pool; misuse raises `LedgerError`.

    Args:
        pools: one, or one for full-attention layers and one for those with a window.
        page_size: tokens a page, in every pool.
        total_rows: requests that can hold memory at the same time.
        max_row_tokens: tokens that one request can hold (sizes the page tables).
        ahead: tokens that a lease may be allocated beyond where it was last slid to, so
            that a window pool knows what to promise; None: all of them.
        index: finds and keeps settled prefixes; none by default.
        clock: seconds, monotonic; only ever used to report an age.
    """

    def __init__(
        self,
        pools: Sequence[PoolShape],
        *,
        page_size: int,
        total_rows: int,
        max_row_tokens: int,
        ahead: int | None = None,
        index: PrefixIndex | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pools = tuple(pools)
        self.page_size = page_size
        self.total_rows = total_rows
        self._ahead = max_row_tokens if ahead is None else ahead
        self.index = index or NoPrefixIndex(len(self.pools))
        self.cache_counts = CacheCounts()
        self._clock = clock
        self._numbers = range(len(self.pools))
        self._accounts = [PageAccount(pool.name, pool.total_pages) for pool in self.pools]
        row_pages = self.pages_for(max_row_tokens)
        self._page_tables = [np.full((total_rows, row_pages), NO_PAGE, np.int32) for _ in pools]
        self._row_pages = row_pages
        self._free_rows = list(range(total_rows))[::-1]
        self._leases: dict[int, Lease] = {}
        self._saved_rows = 0
        self._quarantine: list[_Quarantined] = []
        # Counted apart from the owners of pages, so that the one proves the other.
        self._held = [0] * len(self.pools)
        self._saved = [0] * len(self.pools)
        self._quarantined = [0] * len(self.pools)
        self._promised = [0] * len(self.pools)

    @property
    def windowed(self) -> tuple[bool, ...]:
        """For each pool, whether its layers have a window."""
        return tuple(pool.window is not None for pool in self.pools)

    # Admission and growth

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    @property
    def max_lease_tokens(self) -> int:
        """The most tokens that one lease could ever hold."""
        row = self._row_pages * self.page_size
        short = [
            pool.total_pages * self.page_size
            for number, pool in enumerate(self.pools)
            if self._most_pages(number, row) > pool.total_pages
        ]
        return min([row, *short])

    def open(
        self,
        holder: str,
        promised_tokens: int,
        *,
        token_ids: TokenIds = NO_TOKENS,
        namespace: str = "",
    ) -> Lease | None:
        """Start a lease that can surely grow to `promised_tokens`; `None` if that cannot be said.

        Locks the longest cached prefix of `token_ids`.

        Args:
            holder: for error messages and the history.
            promised_tokens: that it may come to hold.
            token_ids: known ones; without them nothing is looked up.
            namespace: of the prefix index.
        """
        if self.pages_for(promised_tokens) > self._row_pages:
            raise LedgerError(f"{holder}: a row cannot hold {promised_tokens} tokens")
        if not self._free_rows:
            return None
        lock = self.index.match(token_ids, namespace) if len(token_ids) else None
        promises = self._promises(promised_tokens, lock)
        if promises is None and lock is not None:
            # What it would lock may be just what it lacks: a window's pages come on top.
            self.index.unlock(lock)
            lock = None
            promises = self._promises(promised_tokens, lock)
        if promises is None:
            return None
        row = self._free_rows.pop()
        tables = [table[row] for table in self._page_tables]
        lease = Lease(holder, row, tables, self.page_size, namespace, promised_tokens)
        self._leases[row] = lease
        self.cache_counts.lookups += len(token_ids) > 0
        for pool in self._numbers:
            lease._promised_pages[pool] = promises[pool]
            self._promised[pool] += promises[pool]
        if lock:
            self._adopt(lease, lock)
            lease._kv_committed_len = lease._kv_allocated_len = lease.cache_protected_len
            self.cache_counts.hits += lock.num_pages > 0
            self.cache_counts.hit_tokens += lease.cache_protected_len
        return lease

    def grow(self, lease: Lease, tokens: int) -> bool:
        """Raise `kv_allocated_len` to `tokens`, all or nothing; `False` if pages are short.

        Never short within what `open` promised.
        """
        return self.grow_all((lease,), (tokens,))

    def grow_all(self, leases: Sequence[Lease], tokens: Sequence[int]) -> bool:
        """`grow` every lease to its number of tokens, or none of them."""
        size = self.page_size
        growing = []
        for lease, goal in zip(leases, tokens, strict=True):
            if lease._state is not _OPEN:
                lease.check_open("growth")
            first, last = -(-lease._kv_allocated_len // size), -(-goal // size)
            if last > first:
                growing.append((lease, first, last))
        if growing and not self._grow_pages(growing):
            return False
        for lease, goal in zip(leases, tokens, strict=True):
            if goal > lease._kv_allocated_len:
                lease._kv_allocated_len = goal
        return True

    def commit(self, lease: Lease, tokens: int) -> None:
        """Raise `kv_committed_len` to `tokens`: their KV is written, or a forward launched to."""
        self.commit_all((lease,), (tokens,))

    def commit_all(self, leases: Sequence[Lease], tokens: Sequence[int]) -> None:
        """`commit` to every lease its number of tokens."""
        for lease, goal in zip(leases, tokens, strict=True):
            if lease._state is not _OPEN:
                lease.check_open("commit")
            if not lease._kv_committed_len <= goal <= lease._kv_allocated_len:
                raise LedgerError(f"commit of {goal} tokens to {lease!r}")
            lease._kv_committed_len = goal

    def slide(self, lease: Lease, position: int) -> None:
        """Free the pages of window pools that no token from `position` on sees.

        Every forward that reads an earlier token's window must have ended: so
        nothing is in flight on them. It keeps what a prefix that ends in the
        last whole page needs, or the prefix index could not continue from it.
        """
        self.slide_all((lease,), (position,))

    def slide_all(self, leases: Sequence[Lease], positions: Sequence[int]) -> None:
        """`slide` every lease to its position."""
        for pool, shape in enumerate(self.pools):
            if shape.window is None:
                continue
            behind = self.pages_for(shape.window - 1)
            leaving = []
            for lease, position in zip(leases, positions, strict=True):
                if lease._state is not _OPEN:
                    lease.check_open("sliding")
                frontier = position // self.page_size - behind
                if frontier > lease._frontiers[pool]:
                    leaving.append((lease.holder, self._slide_pool(lease, pool, frontier)))
            if leaving:
                shares = [(holder, len(pages)) for holder, pages in leaving]
                pages = np.concatenate([pages for _, pages in leaving])
                self._accounts[pool].move_each(shares, pages, Owner.LEASE, Owner.FREE)
                self._held[pool] -= len(pages)

    def trim(self, lease: Lease, tokens: int, pending: Sequence[Fence] = ()) -> None:
        """Free the pages beyond `tokens`; what a page shares with them stays.

        Raises:
            LedgerError: the prefix index owns some of them.
        """
        lease.check_open("trimming")
        if tokens < lease.cache_protected_len:
            raise LedgerError(f"trim of {lease!r} to {tokens} tokens")
        kept = self.pages_for(tokens)
        tails = []
        for pool, table in enumerate(lease._page_tables):
            first = max(kept, lease._frontiers[pool])
            tails.append(table[first : lease.num_pages].copy())
            table[first : lease.num_pages] = NO_PAGE
            self._held[pool] -= len(tails[-1])
        lease._kv_allocated_len = min(lease._kv_allocated_len, kept * self.page_size)
        lease._kv_committed_len = min(lease._kv_committed_len, tokens)
        self._let_go(lease.holder, tails, pending)
        if not pending:
            for pool, tail in enumerate(tails):
                self._promise_again(lease, pool, len(tail))

    def page_tables(self, leases: Sequence[Lease]) -> tuple[Pages, ...]:
        """A forward's own snapshot of the leases' tables.

        For each pool ``[len(leases), most pages of any]``.
        """
        widest = self.pages_for(max([lease._kv_allocated_len for lease in leases]))
        rows = np.array([lease.row for lease in leases])
        return tuple(table[rows, :widest] for table in self._page_tables)

    # Between leases and the prefix index

    def publish(self, lease: Lease, token_ids: TokenIds, pending: Sequence[Fence] = ()) -> None:
        """Hand the whole pages of settled `token_ids` to the prefix index, and lock them there.

        What the index has already replaces the lease's own copy, which is given
        back once nothing `pending` reads it any more: a forward that runs, or a
        peer to whom it was announced.
        """
        if lease.state is not LeaseState.CLOSED:
            lease.check_open("publishing")
        last = min(lease.kv_committed_len, len(token_ids)) // self.page_size
        before = lease.num_protected_pages
        if last <= before:
            return
        # What is locked cannot be evicted any more, while the duplicates of it come back later, or
        # are fewer: so it may be that others were promised room that would then be missing.
        known = self.index.hold(token_ids[: last * self.page_size], lease.namespace)
        short = any(self._unpromised(pool) < 0 for pool in self._numbers)
        if short and (pending or any(self.windowed)):
            self.index.unlock(known)
            return
        offered = [table[:last].copy() for table in lease._page_tables]
        inserted = self.index.insert(token_ids[: last * self.page_size], offered, lease.namespace)
        if inserted.lock.num_pages < last:
            assert not any(map(len, inserted.taken)), "the index took what it does not lock"
            self.index.unlock(inserted.lock)
            self.index.unlock(known)
            return
        duplicates = []
        for pool in self._numbers:
            mine = offered[pool][before:]
            taken = inserted.taken[pool]
            extra = mine[(mine != NO_PAGE) & ~np.isin(mine, taken)]
            duplicates.append(extra)
            self._accounts[pool].move(lease.holder, taken, Owner.LEASE, Owner.INDEX)
            self._held[pool] -= len(taken) + len(extra)
        old = lease._prefix_lock
        self._adopt(lease, inserted.lock)
        if old is not None and not pending:
            self.index.unlock(old)
            old = None
        self.index.unlock(known)
        self.cache_counts.duplicate_pages += sum(map(len, duplicates))
        self._let_go(lease.holder, duplicates, pending, lock=old)

    # Sessions

    def save(self, lease: Lease, pending: Sequence[Fence] = ()) -> None:
        """Give an open lease to a session: it keeps its pages and its row, but no promise.

        A page that was set aside is let go of: the turn has succeeded.
        """
        lease.move_to(LeaseState.SAVED)
        self._break_promise(lease)
        self._drop_set_aside(lease, pending)
        self._saved_rows += 1
        self._hand(lease, Owner.LEASE, Owner.SESSION)

    def borrow(
        self,
        lease: Lease,
        holder: str,
        prefix_len: int,
        promised_tokens: int,
        *,
        fresh_boundary: bool = False,
        pending: Sequence[Fence] = (),
    ) -> bool:
        """Let a session's next turn have its lease; `False` if memory is short.

        Frees what lies beyond the page of token `prefix_len`, whatever it was
        for; the page stays. Nothing is changed by a refusal, so that admission
        may try again.

        Args:
            lease: saved.
            holder: the turn.
            prefix_len: tokens that are kept.
            promised_tokens: that the turn may come to hold.
            fresh_boundary: the unaligned last page will be written from its start, by a read
                that may fail: a fresh page takes its place, and `kv_committed_len` is where
                it begins. The old one is set aside for `roll_back`.
            pending: what may still read or write the pages from the last turn.
        """
        if promised_tokens < prefix_len:
            raise LedgerError(f"{holder}: promise of {promised_tokens} for {prefix_len} tokens")
        within = lease.cache_protected_len <= prefix_len <= lease.kv_committed_len
        if not within or not self.can_go_back(lease, prefix_len):
            raise LedgerError(f"{holder}: {lease!r} cannot be cut to {prefix_len} tokens")
        kept = self.pages_for(prefix_len)
        fresh = int(fresh_boundary and prefix_len % self.page_size > 0)
        promises = []
        for pool in self._numbers:
            most = self._most_pages(pool, promised_tokens)
            wanted = min(self.pages_for(promised_tokens) - kept, most)
            coming = 0 if pending else max(0, lease.num_pages - max(kept, lease._frontiers[pool]))
            if self._unpromised(pool) + coming < wanted + fresh:
                return False
            promises.append(wanted)
        lease.move_to(LeaseState.OPEN)
        lease.holder = holder
        self._saved_rows -= 1
        self._hand(lease, Owner.SESSION, Owner.LEASE)
        self.trim(lease, prefix_len, pending)
        if fresh:
            self._replace_boundary(lease, kept - 1)
        lease._promised_tokens = promised_tokens
        for pool, promise in enumerate(promises):
            lease._promised_pages[pool] = promise
            self._promised[pool] += promise
        return True

    def can_go_back(self, lease: Lease, prefix_len: int) -> bool:
        """Whether the lease still has all that a token at `prefix_len` sees, for itself."""
        if prefix_len < lease.cache_protected_len:
            return False
        frontiers = [self._frontier(pool, prefix_len) for pool in self._numbers]
        return all(map(int.__le__, lease._frontiers, frontiers))

    def roll_back(self, lease: Lease, prefix_len: int, pending: Sequence[Fence] = ()) -> None:
        """Make a turn's lease again what `borrow` made it, so that it can be saved.

        `pending` is what may still read or write the pages from the turn.
        """
        lease.check_open("rolling back")
        if not self.can_go_back(lease, prefix_len):
            raise LedgerError(f"{lease!r} cannot go back to {prefix_len} tokens")
        boundary = prefix_len // self.page_size
        kept = [len(pages) > 0 for pages in lease._set_aside]
        for pool, table in enumerate(lease._page_tables):
            if kept[pool]:
                old = lease._set_aside[pool]
                lease._set_aside[pool] = table[boundary : boundary + 1].copy()
                table[boundary] = old[0]
        self._drop_set_aside(lease, pending)
        if any(kept):
            lease._kv_allocated_len = max(lease._kv_allocated_len, prefix_len)
            lease._kv_committed_len = max(lease._kv_committed_len, prefix_len)
        self.trim(lease, prefix_len, pending)

    def _replace_boundary(self, lease: Lease, page: int) -> None:
        """Put a fresh page in the place of a page of the table, which is kept."""
        for pool, table in enumerate(lease._page_tables):
            self._make_room(pool, 1)
            lease._set_aside[pool] = table[page : page + 1].copy()
            table[page] = self._accounts[pool].take(lease.holder, 1)[0]
            self._held[pool] += 1
        lease._kv_committed_len = page * self.page_size

    def _drop_set_aside(self, lease: Lease, pending: Sequence[Fence]) -> None:
        aside, lease._set_aside = lease._set_aside, [NO_PAGES for _ in self.pools]
        for pool, pages in enumerate(aside):
            self._held[pool] -= len(pages)
        self._let_go(lease.holder, aside, pending)

    # The way back; called by `release_kv_cache` alone

    def close(self, lease: Lease) -> None:
        """Decide a lease's end: from now on it cannot grow. Idempotent."""
        if lease.state is LeaseState.CLOSED:
            return
        if lease.state is LeaseState.SAVED:
            self._saved_rows -= 1
            self._hand(lease, Owner.SESSION, Owner.LEASE)
        lease.move_to(LeaseState.CLOSED)

    def give_back(self, lease: Lease, pending: Sequence[Fence]) -> None:
        """Take every page that the lease still owns, its lock on the prefix, and its row last.

        To quarantine if anything is `pending`, else to free.
        """
        lease.move_to(LeaseState.RELEASED)
        self._break_promise(lease)
        owned = [lease.own_pages(pool) for pool in self._numbers]
        for pool, pages in enumerate(owned):
            self._held[pool] -= len(pages)
        del self._leases[lease.row]
        self._let_go(lease.holder, owned, pending, row=lease.row, lock=lease._prefix_lock)

    def reclaim(self) -> int:
        """Free what the quarantine's fences no longer protect; returns the pages freed.

        The one place where quarantined memory becomes free.
        """
        if not self._quarantine:
            return 0
        freed, waiting = 0, []
        for entry in self._quarantine:
            if not all(fence.passed() for fence in entry.fences):
                waiting.append(entry)
                continue
            for pool, pages in enumerate(entry.pages):
                self._accounts[pool].move(entry.holder, pages, Owner.QUARANTINE, Owner.FREE)
                self._quarantined[pool] -= len(pages)
                freed += len(pages)
            self._end(entry.row, entry.lock)
        self._quarantine = waiting
        return freed

    # Accounts

    def page_counts(self) -> tuple[PoolCounts, ...]:
        """The account of each pool's pages. O(1)."""
        return tuple(self._pool_counts(pool) for pool in self._numbers)

    def counts(self) -> tuple[PoolCounts, ...]:
        """The account of every pool, and of the rows as the last."""
        return (*self.page_counts(), self.row_counts())

    def row_counts(self) -> PoolCounts:
        """The account of the rows."""
        return PoolCounts(
            pool="rows",
            page_size=0,
            total=self.total_rows,
            free=len(self._free_rows),
            held=len(self._leases) - self._saved_rows,
            cached_evictable=0,
            cached_protected=0,
            session=self._saved_rows,
            quarantined=sum(entry.row is not None for entry in self._quarantine),
            promised=0,
        )

    @property
    def quarantined_since(self) -> float | None:
        """When the oldest quarantined memory came there, by the ledger's clock."""
        return min((entry.since for entry in self._quarantine), default=None)

    def audit(self) -> None:
        """Check the conservation equation of pages and rows. O(1), for every step.

        What leases, sessions, the index and the quarantine say that they have
        must be what the pages say that owns them.

        Raises:
            ConservationError: something was lost or is counted twice.
        """
        for pool, account in enumerate(self._accounts):
            counts = self._pool_counts(pool)
            if counts.accounted != counts.total:
                raise ConservationError(f"{counts.accounted} of {counts.total}: {counts}")
            claimed = (counts.free, counts.held, self.index.size(pool), counts.session)
            owners = (Owner.FREE, Owner.LEASE, Owner.INDEX, Owner.SESSION)
            owned = tuple(account.count(owner) for owner in owners)
            if claimed != owned:
                raise ConservationError(f"pages say {owned}, their owners {claimed}: {counts}")
            if not 0 <= counts.promised <= counts.free + counts.cached_evictable:
                raise ConservationError(f"{counts.promised} pages promised: {counts}")
        rows = self.row_counts()
        if rows.accounted != rows.total:
            raise ConservationError(f"{rows.accounted} of {rows.total}: {rows}")

    def audit_pages(self) -> None:
        """Check every page and row one by one, besides `audit`. For tests and debugging.

        Raises:
            ConservationError: names a page that is lost or has two owners, and its history.
        """
        self.audit()
        indexed = self.index.audit()
        for pool, account in enumerate(self._accounts):
            claimed = []
            for owner, pages in self._claims(pool, indexed[pool]):
                account.check_owner(pages, owner)
                claimed.append(pages)
            claims = np.bincount(np.concatenate(claimed), minlength=account.total)
            for page in np.flatnonzero(claims != 1).tolist():
                raise ConservationError(
                    f"{account.name} page {page} has {claims[page]} owners: {account.history(page)}"
                )
        quarantined = [entry.row for entry in self._quarantine if entry.row is not None]
        rows = [*self._free_rows, *self._leases, *quarantined]
        if sorted(rows) != list(range(self.total_rows)):
            raise ConservationError(f"of {self.total_rows} rows these are owned: {sorted(rows)}")

    def history(self, pool: int, page: int) -> str:
        """The last owners of a page, oldest first."""
        return self._accounts[pool].history(page)

    def owner_map(self, pool: int) -> list[tuple[Owner, str]]:
        """Who has each page of a pool, and on whose behalf: for people who look for one."""
        owners = [(Owner(owner), "") for owner in self._accounts[pool].owner_of.tolist()]
        for lease in self._leases.values():
            for page in lease.own_pages(pool).tolist():
                owners[page] = (owners[page][0], lease.holder)
        for entry in self._quarantine:
            for page in entry.pages[pool].tolist():
                owners[page] = (Owner.QUARANTINE, entry.holder)
        return owners

    # Inside

    def _pool_counts(self, pool: int) -> PoolCounts:
        account, evictable = self._accounts[pool], self.index.evictable(pool)
        return PoolCounts(
            pool=account.name,
            page_size=self.page_size,
            total=account.total,
            free=len(account.free_pages),
            held=self._held[pool],
            cached_evictable=evictable,
            cached_protected=self.index.size(pool) - evictable,
            session=self._saved[pool],
            quarantined=self._quarantined[pool],
            promised=self._promised[pool],
        )

    def _claims(self, pool: int, indexed: Pages) -> Iterator[tuple[Owner, Pages]]:
        """What each owner has of a pool by its own books."""
        yield Owner.FREE, self._accounts[pool].free_pages
        yield Owner.INDEX, indexed
        for entry in self._quarantine:
            yield Owner.QUARANTINE, entry.pages[pool]
        for lease in self._leases.values():
            saved = lease.state is LeaseState.SAVED
            yield Owner.SESSION if saved else Owner.LEASE, lease.own_pages(pool)

    def _most_pages(self, pool: int, tokens: int) -> int:
        """Pages of a pool that a lease of `tokens` tokens ever has at the same time."""
        pages, window = self.pages_for(tokens), self.pools[pool].window
        if window is None:
            return pages
        return min(pages, window_pages(window, self.page_size, self._ahead))

    def _promises(self, tokens: int, lock: PrefixLock | None) -> list[int] | None:
        """Pages of each pool that a lease of `tokens` may yet take; `None` if they are short."""
        missing = self.pages_for(tokens) - (lock.num_pages if lock else 0)
        promises = [min(missing, self._most_pages(pool, tokens)) for pool in self._numbers]
        short = any(self._unpromised(pool) < promises[pool] for pool in self._numbers)
        return None if short else promises

    def _frontier(self, pool: int, position: int) -> int:
        """The first page of a pool that a prefix up to the page before `position`'s needs."""
        window = self.pools[pool].window
        if window is None:
            return 0
        return max(0, position // self.page_size - self.pages_for(window - 1))

    def _unpromised(self, pool: int) -> int:
        """Pages that can be had without breaking a promise."""
        free = len(self._accounts[pool].free_pages)
        return free + self.index.evictable(pool) - self._promised[pool]

    def _grow_pages(self, growing: Sequence[tuple[Lease, int, int]]) -> bool:
        """Give each lease the pages ``[first, last)`` of its table, in every pool, or none."""
        if any(last > self._row_pages for _, _, last in growing):
            return False
        plans = [self._missing(pool, growing) for pool in self._numbers]
        for pool, plan in enumerate(plans):
            if self._unpromised(pool) < sum([missing - kept for _, _, missing, kept in plan]):
                return False
        for pool, plan in enumerate(plans):
            self._take_missing(pool, plan)
        return True

    def _missing(
        self, pool: int, growing: Sequence[tuple[Lease, int, int]]
    ) -> list[tuple[Lease, int, int, int]]:
        """For each lease that has not all of its pages: the first, how many, how many promised."""
        plan = []
        for lease, first, last in growing:
            start = max(first, lease._frontiers[pool])
            if start < last:
                kept = min(last - start, lease._promised_pages[pool])
                plan.append((lease, start, last - start, kept))
        return plan

    def _take_missing(self, pool: int, plan: Sequence[tuple[Lease, int, int, int]]) -> None:
        """Carry out a plan of `_missing`; there must be as many pages."""
        shares = [(lease.holder, missing) for lease, _, missing, _ in plan]
        self._make_room(pool, sum([missing for _, missing in shares]))
        pages = self._accounts[pool].take_each(shares)
        self._held[pool] += len(pages)
        self._promised[pool] -= sum([kept for _, _, _, kept in plan])
        taken = 0
        for lease, start, missing, kept in plan:
            table = lease._page_tables[pool]
            table[start : start + missing] = pages[taken : taken + missing]
            taken += missing
            lease._promised_pages[pool] -= kept

    def _make_room(self, pool: int, wanted: int) -> None:
        """Evict until so many pages are free; there must be as many."""
        missing = wanted - len(self._accounts[pool].free_pages)
        if missing <= 0:
            return
        for number, pages in enumerate(self.index.evict(pool, missing)):
            self._accounts[number].move("prefix index", pages, Owner.INDEX, Owner.FREE)
            self.cache_counts.evicted_pages += len(pages)

    def _slide_pool(self, lease: Lease, pool: int, frontier: int) -> Pages:
        """Advance a lease's frontier; returns the pages that it owned before it."""
        before, end = lease._frontiers[pool], lease.num_pages
        table, last = lease._page_tables[pool], min(frontier, end)
        leaving = table[max(before, lease.num_protected_pages) : last].copy()
        table[before:last] = NO_PAGE
        lease._frontiers[pool] = frontier
        self._promise_again(lease, pool, len(leaving))
        return leaving

    def _promise_again(self, lease: Lease, pool: int, freed: int) -> None:
        """Promise a lease what it has just let go of, as far as it may still grow."""
        to_come = self.pages_for(lease._promised_tokens) - lease.num_pages
        again = min(freed, to_come - lease._promised_pages[pool])
        if again > 0:
            lease._promised_pages[pool] += again
            self._promised[pool] += again

    def _adopt(self, lease: Lease, lock: PrefixLock) -> None:
        """Take the pages of a lock on the index into the lease's tables."""
        for pool in self._numbers:
            pages = lock.pages[pool]
            lease._page_tables[pool][: len(pages)] = pages
            present = np.flatnonzero(pages != NO_PAGE)
            first = int(present[0]) if len(present) else 0
            lease._frontiers[pool] = max(lease._frontiers[pool], first)
        lease._prefix_lock = lock
        lease._cache_protected_len = lock.num_pages * self.page_size

    def _break_promise(self, lease: Lease) -> None:
        for pool in self._numbers:
            self._promised[pool] -= lease._promised_pages[pool]
            lease._promised_pages[pool] = 0
        lease._promised_tokens = 0

    def _hand(self, lease: Lease, source: Owner, target: Owner) -> None:
        """Move all that a lease owns between requests and sessions."""
        for pool, account in enumerate(self._accounts):
            pages = lease.own_pages(pool)
            account.move(lease.holder, pages, source, target)
            saved = len(pages) if target is Owner.SESSION else -len(pages)
            self._saved[pool] += saved
            self._held[pool] -= saved

    def _let_go(
        self,
        holder: str,
        pages: Iterable[Pages],
        pending: Sequence[Fence],
        *,
        row: int | None = None,
        lock: PrefixLock | None = None,
    ) -> None:
        """Free a lease's `pages`, or quarantine them while anything is `pending`."""
        leaving = tuple(pages)
        target = Owner.QUARANTINE if pending else Owner.FREE
        for pool, some in enumerate(leaving):
            self._accounts[pool].move(holder, some, Owner.LEASE, target)
        if not pending:
            self._end(row, lock)
        elif row is not None or lock is not None or any(map(len, leaving)):
            for pool, some in enumerate(leaving):
                self._quarantined[pool] += len(some)
            self._quarantine.append(
                _Quarantined(holder, leaving, row, lock, tuple(pending), self._clock())
            )

    def _end(self, row: int | None, lock: PrefixLock | None) -> None:
        """Unlock a prefix and free a row, the row last."""
        if lock is not None:
            self.index.unlock(lock)
        if row is not None:
            for table in self._page_tables:
                table[row] = NO_PAGE
            self._free_rows.append(row)


def window_pages(window: int, page_size: int, ahead: int) -> int:
    """Pages of a window pool that a lease ever has at the same time.

    From the page of the first token that the next one sees, were it the first
    of its page, to the page of the last of `ahead` tokens from the next one on.
    """
    behind = -(-(window - 1) // page_size)
    return behind + (page_size + ahead - 2) // page_size + 1
