"""The front of this room: a request's memory is opened, grown, published and freed through it.

vLLM calls it `KVCacheManager`, too. README.md has the intervals, the states and
the equation. Its parts:

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
from kvrelay.mem_cache.leases.rows import Rows
from kvrelay.mem_cache.leases.session_leases import SessionLeases
from kvrelay.mem_cache.page_allocator import PageAllocator
from kvrelay.mem_cache.prefix.no_prefix_index import NoPrefixIndex
from kvrelay.mem_cache.prefix.prefix_index import PrefixIndex, TokenIds
from kvrelay.mem_cache.shape import CacheShape, Ints, PoolShape
from kvrelay.wire.load import PoolCounts

NO_TOKENS: TokenIds = np.empty(0, np.int32)


class KVCacheManager:
    """The memory of one worker's requests: KV pages of every pool, and rows.

    Not thread-safe: only the engine thread calls it. Shortage returns `None` or `False` with
    nothing changed, in any pool; misuse raises `KVCacheError`.

    Args:
        pools: one, or one for full-attention layers and one for those with a window.
        page_size: tokens a page, in every pool.
        total_rows: requests that can hold memory at the same time.
        max_row_tokens: tokens that one request can hold (sizes the page tables).
        ahead: tokens that a lease may be allocated beyond where it was last slid to; None: all of
            them. A window pool's promises depend on it.
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
        self._allocator = allocator = PageAllocator(pools, total_rows, self.index, clock)
        self._promises = promises = Promises(shape, rows, allocator)
        self._leases = leases = LeaseTable(shape, rows, allocator, promises)
        self._lengths = lengths = LeaseLengths(shape, rows, allocator, promises)
        self._sharing = PrefixSharing(shape, self.index, allocator, promises, leases, lengths)
        self.sessions = SessionLeases(shape, rows, allocator, promises, lengths)
        """The operations of sessions on their leases; called by `session.Sessions`."""
        self.audit = Audit(shape, rows, self.index, allocator, promises, leases)
        """The counts by owner, the checks, and the history of a page."""
        self.total_rows = total_rows

    @property
    def room_version(self) -> int:
        """A number that rises if a request that was refused for want of memory may fit now.

        It rises, since it was last read, if rows or pages of any pool became available. It also
        rises if a session became idle, or if the prefix index was given something.
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
        """Open a lease that can surely grow to `promised_tokens`. Returns `None` if it might not.

        Locks the longest cached prefix of `token_ids`.

        Args:
            holder: for error messages and the history.
            promised_tokens: the most tokens that it may hold.
            token_ids: known ones; without them nothing is looked up.
            namespace: of the prefix index.
            headroom: pages of each pool that must stay free, or evictable, and unpromised.
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
        """Call `open` for a lease of no request, without counting hits of the prefix index."""
        if promised_tokens > self._leases.max_row_tokens:
            raise KVCacheError(f"{holder}: a row cannot hold {promised_tokens} tokens")
        if not self._leases.num_free_rows:
            return None
        promises = self._promises
        lock = self.index.match(token_ids, namespace) if len(token_ids) else None
        needed = promises.pages_needed(promised_tokens, lock.num_pages if lock else 0)
        if lock is not None and not promises.has_room(needed, headroom):
            # Without the lock there may be room, because a window's locked pages come on top.
            self._allocator.unlock(lock)
            lock = None
            needed = promises.pages_needed(promised_tokens, 0)
        if not promises.has_room(needed, headroom):
            return None
        return self._leases.begin_lease(holder, namespace, promised_tokens, needed, lock)

    def grow(self, lease: Lease, tokens: int) -> bool:
        """Raise `kv_allocated_len` to `tokens`, all or nothing. Returns `False` if pages are short.

        Pages are never short within what `open` promised.
        """
        return self._lengths.grow((lease,), (tokens,))

    def grow_all(self, leases: Sequence[Lease], tokens: Sequence[int] | Ints) -> bool:
        """Call `grow` for every lease with its number of tokens, all or nothing."""
        return self._lengths.grow(leases, tokens)

    def pages_to_grow(self, leases: Sequence[Lease], tokens: Sequence[int] | Ints) -> list[int]:
        """Count for each pool the unpromised pages that `grow_all` takes."""
        return self._lengths.pages_to_grow(leases, tokens)

    def commit(self, lease: Lease, tokens: int) -> None:
        """Raise `kv_committed_len` to `tokens`: a launched forward writes, or wrote, their KV."""
        self._lengths.commit((lease,), (tokens,))

    def commit_all(self, leases: Sequence[Lease], tokens: Sequence[int] | Ints) -> None:
        """Call `commit` for every lease with its number of tokens, all or nothing."""
        self._lengths.commit(leases, tokens)

    def committed(self, leases: Sequence[Lease]) -> Ints:
        """Get the `kv_committed_len` of each lease, as a copy; faster than one by one."""
        return self._lengths.committed(leases)

    def slide(self, lease: Lease, position: int) -> None:
        """Free the pages of window pools that no token from `position` on sees.

        Every forward that reads an earlier token's window must have ended, so no work in flight
        uses them. Pages that a prefix ending in the last whole page needs are kept. Without them
        the prefix index could not continue from it.
        """
        self._lengths.slide((lease,), (position,))

    def slide_all(self, leases: Sequence[Lease], positions: Sequence[int] | Ints) -> None:
        """Call `slide` for every lease with its position."""
        self._lengths.slide(leases, positions)

    def trim(self, lease: Lease, tokens: int, pending: Sequence[Fence] = ()) -> None:
        """Free the pages beyond `tokens`; a page that holds some of them stays.

        Raises:
            KVCacheError: the prefix index owns some of the pages.
        """
        self._lengths.trim(lease, tokens, lease.pending(pending))

    def page_tables(self, leases: Sequence[Lease]) -> tuple[Pages, ...]:
        """Copy the leases' tables for a forward.

        Returns for each pool ``[len(leases), most pages of any]``.
        """
        return self._lengths.page_tables(leases)

    # Between leases and the prefix index

    def count_cached(self, token_ids: TokenIds, namespace: str = "") -> int:
        """Count the tokens of the longest prefix that `open` would find now. Takes nothing."""
        return len(self.find_cached(token_ids, namespace)[0]) * self.shape.page_size

    def find_cached(self, token_ids: TokenIds, namespace: str = "") -> tuple[Pages, ...]:
        """Find for each pool the pages that `open` would find now. Takes nothing."""
        lock = self.index.match(token_ids, namespace)
        self._allocator.unlock(lock)
        return lock.pages

    def publish(self, lease: Lease, token_ids: TokenIds, pending: Sequence[Fence] = ()) -> None:
        """Give the whole pages of written `token_ids` to the prefix index, and lock them there.

        Pages that the index already has replace the lease's own copies. A copy is freed once
        nothing `pending` reads it: a forward that runs, or a peer to which it was announced.
        """
        self._sharing.publish(lease, token_ids, lease.pending(pending))

    def publish_settled(
        self, lease: Lease, token_ids: TokenIds, pending: Sequence[Fence] = ()
    ) -> bool:
        """Give the whole pages of written `token_ids` to the prefix index, as far as they are new.

        It is for a lease that goes on. The pages of its tables do not change, so their readers, a
        peer included, need not know. If the index has a copy of some of them already, all stay the
        lease's own until it is released.

        Args:
            lease: open; every forward that is still to end begins after `token_ids`.
            token_ids: the first ones, whose KV is written.
            pending: what still reads the pages that no token after them sees.

        Returns:
            Whether anything was published.
        """
        return self._sharing.publish_settled(lease, token_ids, lease.pending(pending))

    def forget(self, lease: Lease, token_ids: TokenIds) -> None:
        """Make the pages of `token_ids` that a lease has published, and continuations, unfindable.

        Requests that have found them already go on. Pages that the lease was opened with stay.
        """
        published = token_ids[: lease.cache_protected_len]
        self.index.forget(published, lease.found_len, lease.namespace)

    def forget_found(self, lease: Lease, token_ids: TokenIds, first_page: int) -> None:
        """Make pages that a lease has committed unfindable, from `first_page` on.

        Their continuations are, too. It is for pages that may have been wrong when the lease was
        opened with them. Requests that have found them already go on.
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
        """Open a lease for each of `holders` that continues from the committed tokens of `lease`.

        The leases are the choices of one request. `lease` is one of them, with no special role:
        they end in any order. All lock the whole pages, which go to the prefix index, or to a tree
        aside if there is none. The unaligned last page is copied. Each may grow to
        `promised_tokens`. Returns `None` if rows or pages are short.

        Args:
            lease: open; its next forward is launched with the one that copies, or later.
            holders: for error messages and the history.
            token_ids: all tokens that `lease` has committed; their KV is written.
            promised_tokens: the most tokens that each of the new leases may hold.
            copied: passes when the forward that copies has ended. Until then neither the page that
                it reads nor those that it writes are used again, whichever lease ends.
            pending: what may still read `lease`'s pages.
        """
        return self._sharing.fork(
            lease, holders, token_ids, promised_tokens, copied, lease.pending(pending)
        )

    # Freed again: `close` and `free_lease` are called by `release_kv_cache` alone

    def close(self, lease: Lease) -> None:
        """Close a lease, so that it cannot grow any more. Idempotent."""
        self._leases.close_lease(lease)

    def free_lease(self, lease: Lease, pending: Sequence[Fence]) -> None:
        """Free every page that a closed lease owns, its lock on the prefix, and its row last.

        All of it goes to quarantine if anything is `pending`.
        """
        self._leases.end_lease(lease, lease.pending(pending))

    def reclaim(self) -> int:
        """Free quarantined memory whose fences have passed. Returns the number of pages freed.

        No other code frees quarantined memory.
        """
        return self._allocator.reclaim()

    # Counts; `audit` has more

    @property
    def cache_counts(self) -> CacheCounts:
        """The counts of the prefix index so far."""
        return self._allocator.cache_counts

    @property
    def quarantined_since(self) -> float | None:
        """The moment, by `clock`, since which the oldest memory is quarantined; `None`: none is."""
        return self._allocator.quarantined_since

    def quarantine_counts(self) -> dict[FenceKind, QuarantineCounts]:
        """Count the pages in quarantine, and since when by `clock`, by what they wait for."""
        return self._allocator.quarantine_counts()

    def count_allocations(self) -> None:
        """Start to count how often each page is handed out, for `times_allocated`."""
        self._allocator.count_allocations()

    def times_allocated(self, pool: int, pages: Pages) -> npt.NDArray[np.uint32]:
        """Get how often each of these pages was handed out; a higher number: it was rewritten."""
        return self._allocator.times_allocated(pool, pages)

    def page_counts(self) -> tuple[PoolCounts, ...]:
        """Count the pages of each pool by state. O(1)."""
        return self.audit.page_counts()

    def counts(self) -> tuple[PoolCounts, ...]:
        """List the counts of every pool's pages, and last of the rows."""
        return (*self.audit.page_counts(), self.audit.row_counts())
