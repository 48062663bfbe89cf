"""Who holds each page and each row: leases, sessions, the prefix index, the quarantine.

What callers see of it and may rely on. The state is in `books.py`. See
README.md for the intervals, the states and the equation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from kvrelay.mem_cache import audit, growth, sharing, turns
from kvrelay.mem_cache.account import Owner, Pages
from kvrelay.mem_cache.books import Books
from kvrelay.mem_cache.counts import CacheCounts, PoolCounts, PoolShape, window_pages
from kvrelay.mem_cache.errors import LedgerError
from kvrelay.mem_cache.fence import Fence
from kvrelay.mem_cache.lease import Lease, LeaseState, rows_of
from kvrelay.mem_cache.no_prefix_index import NoPrefixIndex
from kvrelay.mem_cache.prefix_index import PrefixIndex, PrefixLock, TokenIds
from kvrelay.mem_cache.rows import Ints
from kvrelay.mem_cache.sharing import Fork

__all__ = ["NO_TOKENS", "CacheCounts", "Ledger", "PoolCounts", "PoolShape", "window_pages"]

NO_TOKENS: TokenIds = np.empty(0, np.int32)


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
        self.index = index or NoPrefixIndex(page_size, [pool.window for pool in pools])
        self._books = Books(
            self.pools,
            page_size,
            total_rows,
            max_row_tokens,
            max_row_tokens if ahead is None else ahead,
            self.index,
            clock,
        )
        self._room = self._books.room()
        self._room_version = 0

    @property
    def windowed(self) -> tuple[bool, ...]:
        """For each pool, whether its layers have a window."""
        return tuple(pool.window is not None for pool in self.pools)

    # How many pages

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return self._books.pages_for(tokens)

    def most_pages(self, pool: int, tokens: int) -> int:
        """Pages of a pool that a lease of `tokens` tokens ever has at the same time."""
        return self._books.most_pages(pool, tokens)

    def unpromised(self, pool: int) -> int:
        """Pages that can be had, free or by eviction, without breaking a promise."""
        return self._books.unpromised(pool)

    @property
    def room_version(self) -> int:
        """As long as it is the same, whatever was refused for want of memory will be again.

        Higher than when it was last asked for if rows, or pages of any pool,
        became available since, or if the prefix index was given something.
        """
        room = self._books.room()
        self._room_version += any(map(int.__gt__, room, self._room))
        self._room = room
        return self._room_version

    @property
    def max_lease_tokens(self) -> int:
        """The most tokens that one lease could ever hold."""
        row = self._books.rows.row_pages * self.page_size
        short = [
            pool.total_pages * self.page_size
            for number, pool in enumerate(self.pools)
            if self.most_pages(number, row) > pool.total_pages
        ]
        return min([row, *short])

    # Admission and growth

    def open(
        self,
        holder: str,
        promised_tokens: int,
        *,
        token_ids: TokenIds = NO_TOKENS,
        namespace: str = "",
        leaving: Sequence[int] | None = None,
    ) -> Lease | None:
        """Start a lease that can surely grow to `promised_tokens`; `None` if that cannot be said.

        Locks the longest cached prefix of `token_ids`.

        Args:
            holder: for error messages and the history.
            promised_tokens: that it may come to hold.
            token_ids: known ones; without them nothing is looked up.
            namespace: of the prefix index.
            leaving: pages of each pool that must be `unpromised` afterwards.
        """
        books = self._books
        if self.pages_for(promised_tokens) > books.rows.row_pages:
            raise LedgerError(f"{holder}: a row cannot hold {promised_tokens} tokens")
        if not books.free_rows:
            return None
        spared = leaving or [0] * len(self.pools)
        lock = self.index.match(token_ids, namespace) if len(token_ids) else None
        promises = self._promises(promised_tokens, lock, spared)
        if promises is None and lock is not None:
            # What it would lock may be just what it lacks: a window's pages come on top.
            books.unlock(lock)
            lock = None
            promises = self._promises(promised_tokens, lock, spared)
        if promises is None:
            return None
        lease = books.enter_lease(holder, namespace, promised_tokens, promises, lock)
        counts = books.cache_counts
        counts.lookups += len(token_ids) > 0
        counts.hits += lease.cache_protected_len > 0
        counts.hit_tokens += lease.cache_protected_len
        return lease

    def grow(self, lease: Lease, tokens: int) -> bool:
        """Raise `kv_allocated_len` to `tokens`, all or nothing; `False` if pages are short.

        Never short within what `open` promised.
        """
        return self.grow_all((lease,), (tokens,))

    def grow_all(self, leases: Sequence[Lease], tokens: Sequence[int] | Ints) -> bool:
        """`grow` every lease to its number of tokens, or none of them."""
        return growth.grow_all(self._books, leases, tokens)

    def commit(self, lease: Lease, tokens: int) -> None:
        """Raise `kv_committed_len` to `tokens`: their KV is written, or a forward launched to."""
        self.commit_all((lease,), (tokens,))

    def commit_all(self, leases: Sequence[Lease], tokens: Sequence[int] | Ints) -> None:
        """`commit` to every lease its number of tokens, or to none of them."""
        growth.commit_all(self._books, leases, tokens)

    def committed(self, leases: Sequence[Lease]) -> Ints:
        """The `kv_committed_len` of each lease, a copy: quicker than one by one."""
        return self._books.rows.committed[rows_of(leases)]

    def slide(self, lease: Lease, position: int) -> None:
        """Free the pages of window pools that no token from `position` on sees.

        Every forward that reads an earlier token's window must have ended: so
        nothing is in flight on them. It keeps what a prefix that ends in the
        last whole page needs, or the prefix index could not continue from it.
        """
        self.slide_all((lease,), (position,))

    def slide_all(self, leases: Sequence[Lease], positions: Sequence[int] | Ints) -> None:
        """`slide` every lease to its position."""
        growth.slide_all(self._books, leases, positions)

    def trim(self, lease: Lease, tokens: int, pending: Sequence[Fence] = ()) -> None:
        """Free the pages beyond `tokens`; what a page shares with them stays.

        Raises:
            LedgerError: the prefix index owns some of them.
        """
        growth.trim(self._books, lease, tokens, lease.pending(pending))

    def page_tables(self, leases: Sequence[Lease]) -> tuple[Pages, ...]:
        """A forward's own snapshot of the leases' tables.

        For each pool ``[len(leases), most pages of any]``.
        """
        known, rows = self._books.rows, rows_of(leases)
        widest = self.pages_for(int(known.allocated[rows].max()))
        return tuple(table[rows, :widest] for table in known.page_tables)

    # Between leases and the prefix index

    def publish(self, lease: Lease, token_ids: TokenIds, pending: Sequence[Fence] = ()) -> None:
        """Hand the whole pages of settled `token_ids` to the prefix index, and lock them there.

        What the index has already replaces the lease's own copy, which is given
        back once nothing `pending` reads it any more: a forward that runs, or a
        peer to whom it was announced.
        """
        sharing.publish(self._books, lease, token_ids, lease.pending(pending))

    def fork(
        self,
        lease: Lease,
        holders: Sequence[str],
        token_ids: TokenIds,
        promised_tokens: int,
        *,
        copied: Fence,
        pending: Sequence[Fence] = (),
    ) -> Fork | None:
        """Open a lease for each of `holders` that continues from what `lease` has committed.

        For the choices of one request, of which `lease` is one and nothing
        special: they end in any order. All lock the whole pages, which go to
        the prefix index, or are shared aside if there is none; the unaligned
        last page is copied. Each may grow to `promised_tokens`. `None` if rows
        or pages are short.

        Args:
            lease: open; its next forward is launched with the one that copies, or later.
            holders: for error messages and the history.
            token_ids: all that `lease` has committed; settled.
            promised_tokens: that each of the new leases may come to hold.
            copied: passes when the forward that copies has ended. Until then neither the
                page that it reads nor those that it writes are used again, whoever ends.
            pending: what may still read `lease`'s pages.
        """
        return sharing.fork(
            self._books,
            lease,
            holders,
            token_ids,
            promised_tokens,
            copied,
            lease.pending(pending),
        )

    # Sessions

    def save(self, lease: Lease, pending: Sequence[Fence] = ()) -> None:
        """Give an open lease to a session: it keeps its pages and its row, but no promise.

        A page that was set aside is let go of: the turn has succeeded.
        """
        turns.save(self._books, lease, lease.pending(pending))

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
        pending = lease.pending(pending)
        return turns.borrow(
            self._books, lease, holder, prefix_len, promised_tokens, fresh_boundary, pending
        )

    def can_go_back(self, lease: Lease, prefix_len: int) -> bool:
        """Whether the lease still has all that a token at `prefix_len` sees, for itself."""
        return self._books.can_go_back(lease, prefix_len)

    def roll_back(self, lease: Lease, prefix_len: int, pending: Sequence[Fence] = ()) -> None:
        """Make a turn's lease again what `borrow` made it, so that it can be saved.

        `pending` is what may still read or write the pages from the turn.
        """
        turns.roll_back(self._books, lease, prefix_len, lease.pending(pending))

    # The way back; called by `release_kv_cache` alone

    def close(self, lease: Lease) -> None:
        """Decide a lease's end: from now on it cannot grow. Idempotent."""
        if lease.state is LeaseState.CLOSED:
            return
        if lease.state is LeaseState.SAVED:
            self._books.hand(lease, Owner.SESSION, Owner.LEASE)
        lease.move_to(LeaseState.CLOSED)
        self._books.break_promise(lease)

    def give_back(self, lease: Lease, pending: Sequence[Fence]) -> None:
        """Take every page that the lease still owns, its lock on the prefix, and its row last.

        To quarantine if anything is `pending`, else to free.
        """
        lease.move_to(LeaseState.RELEASED)
        self._books.leave_lease(lease, lease.pending(pending))

    def reclaim(self) -> int:
        """Free what the quarantine's fences no longer protect; returns the pages freed.

        The one place where quarantined memory becomes free.
        """
        return self._books.reclaim()

    # Accounts

    @property
    def cache_counts(self) -> CacheCounts:
        """What the prefix index has done so far."""
        return self._books.cache_counts

    def page_counts(self) -> tuple[PoolCounts, ...]:
        """The account of each pool's pages. O(1)."""
        return tuple(audit.pool_counts(self._books, pool) for pool in self._books.numbers)

    def row_counts(self) -> PoolCounts:
        """The account of the rows."""
        return audit.row_counts(self._books)

    def counts(self) -> tuple[PoolCounts, ...]:
        """The account of every pool, and of the rows as the last."""
        return (*self.page_counts(), self.row_counts())

    @property
    def quarantined_since(self) -> float | None:
        """When the oldest quarantined memory came there, by the ledger's clock."""
        return min((entry.since for entry in self._books.quarantine), default=None)

    def audit(self) -> None:
        """Check the conservation equation of pages and rows. O(1), for every step.

        What leases, sessions, the index and the quarantine say that they have
        must be what the pages say that owns them.

        Raises:
            ConservationError: something was lost or is counted twice.
        """
        audit.audit(self._books)

    def audit_pages(self) -> None:
        """Check every page and row one by one, besides `audit`. For tests and debugging.

        Raises:
            ConservationError: names a page that is lost or has two owners, and its history.
        """
        audit.audit_pages(self._books)

    def history(self, pool: int, page: int) -> str:
        """The last owners of a page, oldest first."""
        return self._books.accounts[pool].history(page)

    def owner_map(self, pool: int) -> list[tuple[Owner, str]]:
        """Who has each page of a pool, and on whose behalf: for people who look for one."""
        return audit.owner_map(self._books, pool)

    def _promises(
        self, tokens: int, lock: PrefixLock | None, spared: Sequence[int]
    ) -> list[int] | None:
        """Pages of each pool that a lease of `tokens` may yet take; `None` if they are short."""
        promises = self._books.promises(tokens, lock.num_pages if lock else 0)
        for pool, pages in enumerate(promises):
            if self.unpromised(pool) < pages + spared[pool]:
                return None
        return promises
