"""The front of this room: a request's memory is opened, grown, published and freed through it.

What vLLM calls `KVCacheManager`. README.md has the intervals, the states and
the equation. Who does the work:

- `page_allocator.py` moves pages between owners, and is where they are freed;
- `lease_table.py` begins and ends leases, `lease_lengths.py` changes their lengths;
- `promises.py` counts what others may be admitted on;
- `sharing.py` gives pages to the prefix index, and forks;
- `session_leases.py` is what `session.py` uses, `audit.py` proves that nothing is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvrelay.mem_cache.account import Pages
from kvrelay.mem_cache.audit import Audit
from kvrelay.mem_cache.counts import CacheCounts, QuarantineCounts
from kvrelay.mem_cache.errors import KVCacheError
from kvrelay.mem_cache.fence import Fence, FenceKind
from kvrelay.mem_cache.leases.lease import Lease
from kvrelay.mem_cache.leases.lease_lengths import LeaseLengths
from kvrelay.mem_cache.leases.lease_table import LeaseTable
from kvrelay.mem_cache.leases.promises import Promises
from kvrelay.mem_cache.leases.publishing import Fork, PrefixSharing
from kvrelay.mem_cache.leases.rows import Ints, Rows
from kvrelay.mem_cache.leases.session_leases import SessionLeases
from kvrelay.mem_cache.page_allocator import PageAllocator
from kvrelay.mem_cache.prefix.no_prefix_index import NoPrefixIndex
from kvrelay.mem_cache.prefix.prefix_index import PrefixIndex, TokenIds
from kvrelay.mem_cache.shape import CacheShape, PoolShape
from kvrelay.wire.load import PoolCounts

NO_TOKENS: TokenIds = np.empty(0, np.int32)


class KVCacheManager:
    """The memory of one worker's requests: KV pages of every pool, and rows.

    Not thread-safe: the engine thread alone calls it. Shortage returns `None`
    or `False` with nothing changed, in no pool; misuse raises `KVCacheError`.

    Args:
        pools: one, or one for full-attention layers and one for those with a window.
        page_size: tokens a page, in every pool.
        total_rows: requests that can hold memory at the same time.
        max_row_tokens: tokens that one request can hold (sizes the page tables).
        ahead: tokens that a lease may be allocated beyond where it was last slid to, so
            that a window pool knows what to promise; None: all of them.
        index: finds and keeps prefixes whose KV is written; none by default.
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
        ahead = max_row_tokens if ahead is None else ahead
        self.shape = shape = CacheShape(tuple(pools), page_size, ahead)
        """The pools, and how many pages some tokens need in each of them."""
        self.index = index or NoPrefixIndex(page_size, [pool.window for pool in pools])
        rows = Rows(len(pools), total_rows, shape.pages_for(max_row_tokens))
        self.clock = clock
        self._allocator = allocator = PageAllocator(pools, rows, self.index, clock)
        self._promises = promises = Promises(shape, rows, allocator)
        self._leases = leases = LeaseTable(shape, rows, allocator, promises)
        self._lengths = lengths = LeaseLengths(shape, rows, allocator, promises)
        self._sharing = PrefixSharing(shape, self.index, allocator, promises, leases, lengths)
        self.sessions = SessionLeases(shape, rows, allocator, promises, lengths)
        """What a session does with its lease; called by `session.Sessions`."""
        self.audit = Audit(shape, rows, self.index, allocator, promises, leases)
        """Counts by owner, checks, and the history of a page."""
        self.total_rows = total_rows

    @property
    def room_version(self) -> int:
        """As long as it is the same, whatever was refused for want of memory will be again.

        Higher than when it was last asked for if rows, or pages of any pool,
        became available since, if a session became idle, or if the prefix index was given
        something.
        """
        return self._promises.room_version

    @property
    def max_lease_tokens(self) -> int:
        """The most tokens that one lease could ever hold."""
        return self._leases.max_lease_tokens

    # Admission and growth

    def open(
        self,
        holder: str,
        promised_tokens: int,
        *,
        token_ids: TokenIds = NO_TOKENS,
        namespace: str = "",
        headroom: Sequence[int] | None = None,
    ) -> Lease | None:
        """Start a lease that can surely grow to `promised_tokens`; `None` if that cannot be said.

        Locks the longest cached prefix of `token_ids`.

        Args:
            holder: for error messages and the history.
            promised_tokens: that it may come to hold.
            token_ids: known ones; without them nothing is looked up.
            namespace: of the prefix index.
            headroom: pages of each pool that must stay free, or evictable, and promised to nobody.
        """
        lease = self.open_uncounted(
            holder, promised_tokens, token_ids=token_ids, namespace=namespace, headroom=headroom
        )
        if lease is not None:
            counts = self.cache_counts
            counts.lookups += len(token_ids) > 0
            counts.hits += lease.cache_protected_len > 0
            counts.hit_tokens += lease.cache_protected_len
        return lease

    def open_uncounted(
        self,
        holder: str,
        promised_tokens: int,
        *,
        token_ids: TokenIds = NO_TOKENS,
        namespace: str = "",
        headroom: Sequence[int] | None = None,
    ) -> Lease | None:
        """`open` for a lease that is no request's: the prefix index's hits do not count it."""
        if promised_tokens > self._leases.max_row_tokens:
            raise KVCacheError(f"{holder}: a row cannot hold {promised_tokens} tokens")
        if not self._leases.num_free_rows:
            return None
        promises = self._promises
        lock = self.index.match(token_ids, namespace) if len(token_ids) else None
        needed = promises.pages_needed(promised_tokens, lock.num_pages if lock else 0)
        if lock is not None and not promises.has_room(needed, headroom):
            # What it would lock may be just what it lacks: a window's pages come on top.
            self._allocator.unlock(lock)
            lock = None
            needed = promises.pages_needed(promised_tokens, 0)
        if not promises.has_room(needed, headroom):
            return None
        return self._leases.begin_lease(holder, namespace, promised_tokens, needed, lock)

    def grow(self, lease: Lease, tokens: int) -> bool:
        """Raise `kv_allocated_len` to `tokens`, all or nothing; `False` if pages are short.

        Never short within what `open` promised.
        """
        return self._lengths.grow((lease,), (tokens,))

    def grow_all(self, leases: Sequence[Lease], tokens: Sequence[int] | Ints) -> bool:
        """`grow` every lease to its number of tokens, or none of them."""
        return self._lengths.grow(leases, tokens)

    def pages_to_grow(self, leases: Sequence[Lease], tokens: Sequence[int] | Ints) -> list[int]:
        """For each pool the unpromised pages that `grow_all` takes."""
        return self._lengths.pages_to_grow(leases, tokens)

    def commit(self, lease: Lease, tokens: int) -> None:
        """Raise `kv_committed_len` to `tokens`: their KV is written, or a forward launched to."""
        self._lengths.commit((lease,), (tokens,))

    def commit_all(self, leases: Sequence[Lease], tokens: Sequence[int] | Ints) -> None:
        """`commit` to every lease its number of tokens, or to none of them."""
        self._lengths.commit(leases, tokens)

    def committed(self, leases: Sequence[Lease]) -> Ints:
        """The `kv_committed_len` of each lease, a copy: quicker than one by one."""
        return self._lengths.committed(leases)

    def slide(self, lease: Lease, position: int) -> None:
        """Free the pages of window pools that no token from `position` on sees.

        Every forward that reads an earlier token's window must have ended: so
        nothing is in flight on them. It keeps what a prefix that ends in the
        last whole page needs, or the prefix index could not continue from it.
        """
        self._lengths.slide((lease,), (position,))

    def slide_all(self, leases: Sequence[Lease], positions: Sequence[int] | Ints) -> None:
        """`slide` every lease to its position."""
        self._lengths.slide(leases, positions)

    def trim(self, lease: Lease, tokens: int, pending: Sequence[Fence] = ()) -> None:
        """Free the pages beyond `tokens`; what a page shares with them stays.

        Raises:
            KVCacheError: the prefix index owns some of them.
        """
        self._lengths.trim(lease, tokens, lease.pending(pending))

    def page_tables(self, leases: Sequence[Lease]) -> tuple[Pages, ...]:
        """A forward's own snapshot of the leases' tables.

        For each pool ``[len(leases), most pages of any]``.
        """
        return self._lengths.page_tables(leases)

    # Between leases and the prefix index

    def count_cached(self, token_ids: TokenIds, namespace: str = "") -> int:
        """Tokens of the longest prefix that `open` would find now. Takes nothing."""
        return len(self.find_cached(token_ids, namespace)[0]) * self.shape.page_size

    def find_cached(self, token_ids: TokenIds, namespace: str = "") -> tuple[Pages, ...]:
        """For each pool the pages that `open` would find now. Takes nothing."""
        lock = self.index.match(token_ids, namespace)
        self._allocator.unlock(lock)
        return lock.pages

    def publish(self, lease: Lease, token_ids: TokenIds, pending: Sequence[Fence] = ()) -> None:
        """Give the whole pages of written `token_ids` to the prefix index, and lock them there.

        What the index has already replaces the lease's own copy, which is freed
        once nothing `pending` reads it any more: a forward that runs, or a peer
        to whom it was announced.
        """
        self._sharing.publish(lease, token_ids, lease.pending(pending))

    def publish_settled(
        self, lease: Lease, token_ids: TokenIds, pending: Sequence[Fence] = ()
    ) -> bool:
        """Give the whole pages of written `token_ids` to the prefix index, as far as they are new.

        For a lease that goes on: the pages of its tables stay what they are, so
        whoever reads them, a peer included, need not know. If the index has a
        copy of some of them already, all stay the lease's own until it is released.

        Args:
            lease: open; every forward that is still to end begins after `token_ids`.
            token_ids: the first ones, whose KV is written.
            pending: what still reads the pages that no token after them sees.

        Returns:
            Whether anything was published.
        """
        return self._sharing.publish_settled(lease, token_ids, lease.pending(pending))

    def forget(self, lease: Lease, token_ids: TokenIds) -> None:
        """Let nobody find what a lease has published of `token_ids`, nor what continues it.

        Those who have found it already go on. What the lease was opened with stays.
        """
        published = token_ids[: lease.cache_protected_len]
        self.index.forget(published, lease.found_len, lease.namespace)

    def forget_found(self, lease: Lease, token_ids: TokenIds, first_page: int) -> None:
        """Let nobody find what a lease has committed of `token_ids` from a page on.

        Nor what continues any of it. For what may have been wrong when the lease was opened with
        it. Those who have found it already go on.
        """
        committed = token_ids[: lease.kv_committed_len]
        self.index.forget(committed, first_page * self.shape.page_size, lease.namespace)

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
            token_ids: all that `lease` has committed; their KV is written.
            promised_tokens: that each of the new leases may come to hold.
            copied: passes when the forward that copies has ended. Until then neither the
                page that it reads nor those that it writes are used again, whoever ends.
            pending: what may still read `lease`'s pages.
        """
        return self._sharing.fork(
            lease, holders, token_ids, promised_tokens, copied, lease.pending(pending)
        )

    # Freed again: `close` and `free_lease` are called by `release_kv_cache` alone

    def close(self, lease: Lease) -> None:
        """Decide a lease's end: from now on it cannot grow. Idempotent."""
        self._leases.close_lease(lease)

    def free_lease(self, lease: Lease, pending: Sequence[Fence]) -> None:
        """Free every page that a closed lease owns, its lock on the prefix, and its row last.

        All of it goes to quarantine if anything is `pending`.
        """
        self._leases.end_lease(lease, lease.pending(pending))

    def reclaim(self) -> int:
        """Free what the quarantine's fences no longer protect; returns the pages freed.

        The one place where quarantined memory becomes free.
        """
        return self._allocator.reclaim()

    # Counts; `audit` has more

    @property
    def cache_counts(self) -> CacheCounts:
        """What the prefix index has done so far."""
        return self._allocator.cache_counts

    @property
    def quarantined_since(self) -> float | None:
        """When the oldest quarantined memory came there, by `clock`."""
        return self._allocator.quarantined_since

    def quarantine_counts(self) -> dict[FenceKind, QuarantineCounts]:
        """Pages in quarantine, and since when by `clock`, by what they wait for."""
        return self._allocator.quarantine_counts()

    def count_allocations(self) -> None:
        """Count from now on how often each page is handed out, for `times_allocated`."""
        self._allocator.count_allocations()

    def times_allocated(self, pool: int, pages: Pages) -> npt.NDArray[np.uint32]:
        """How often each of these pages was handed out: if more often, it was written anew."""
        return self._allocator.times_allocated(pool, pages)

    def page_counts(self) -> tuple[PoolCounts, ...]:
        """How many pages of each pool are in each state. O(1)."""
        return self.audit.page_counts()

    def counts(self) -> tuple[PoolCounts, ...]:
        """The counts of every pool's pages, and of the rows as the last."""
        return (*self.audit.page_counts(), self.audit.row_counts())
