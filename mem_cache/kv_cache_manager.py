"""The front of this room: a request's memory is opened and grown through it, and it has the parts.

vLLM calls it `KVCacheManager`, too. README.md has the intervals, the states and the equation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from kvrelay.mem_cache.account import Pages
from kvrelay.mem_cache.audit import Audit
from kvrelay.mem_cache.errors import KVCacheError
from kvrelay.mem_cache.leases.lease import Lease
from kvrelay.mem_cache.leases.lease_lengths import LeaseLengths
from kvrelay.mem_cache.leases.lease_table import LeaseTable
from kvrelay.mem_cache.leases.ledger import Ledger
from kvrelay.mem_cache.leases.publishing import PrefixSharing
from kvrelay.mem_cache.prefix.no_prefix_index import NoPrefixIndex
from kvrelay.mem_cache.prefix.prefix_index import PrefixIndex, TokenIds
from kvrelay.mem_cache.shape import CacheShape, PoolShape

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
        self.clock = clock
        ledger = Ledger.make(shape, self.index, total_rows, max_row_tokens, clock)
        self.allocator = ledger.allocator
        """The owners of pages and rows. Only this room moves them, but for `reclaim`."""
        self.lengths = LeaseLengths(ledger)
        """The changes of many leases' lengths at once."""
        self.leases = LeaseTable(ledger, self.lengths)
        """The steps of leases' lives; called by sessions and `release_kv_cache`."""
        self.sharing = PrefixSharing(ledger, self.leases, self.lengths)
        """The moves of leases' pages to the prefix index."""
        self.audit = Audit(ledger, self.leases)
        """The counts by owner, the checks, and the history of a page."""
        self.max_lease_tokens = self.leases.max_lease_tokens
        """The most tokens that one lease could ever hold."""
        self.cache_counts = self.allocator.cache_counts
        """The counts of the prefix index so far."""
        self._promises = ledger.promises

    @property
    def room_version(self) -> int:
        """A number that rises if a request that was refused for want of memory may fit now.

        See `Promises.room_version`.
        """
        return self._promises.room_version

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
        leases, promises = self.leases, self._promises
        if promised_tokens > leases.max_row_tokens:
            raise KVCacheError(f"{holder}: a row cannot hold {promised_tokens} tokens")
        if not leases.num_free_rows:
            return None
        lock = self.index.match(token_ids, namespace) if len(token_ids) else None
        needed = promises.pages_needed(promised_tokens, lock.num_pages if lock else 0)
        if lock is not None and not promises.has_room(needed, headroom):
            # Without the lock there may be room, because a window's locked pages come on top.
            self.allocator.unlock(lock)
            lock = None
            needed = promises.pages_needed(promised_tokens, 0)
        if not promises.has_room(needed, headroom):
            return None
        return leases.begin_lease(holder, namespace, promised_tokens, needed, lock)

    def grow(self, lease: Lease, tokens: int) -> bool:
        """Raise `kv_allocated_len` to `tokens`, all or nothing. Returns `False` if pages are short.

        Pages are never short within what `open` promised.
        """
        return self.lengths.grow((lease,), (tokens,))

    def commit(self, lease: Lease, tokens: int) -> None:
        """Raise `kv_committed_len` to `tokens`: a launched forward writes, or wrote, their KV."""
        self.lengths.commit((lease,), (tokens,))

    def slide(self, lease: Lease, position: int) -> None:
        """Free the pages of window pools that no token from `position` on sees.

        Every forward that reads an earlier token's window must have ended, so no work in flight
        uses them. Pages that a prefix ending in the last whole page needs are kept. Without them
        the prefix index could not continue from it.
        """
        self.lengths.slide((lease,), (position,))

    # The prefix index

    def count_cached(self, token_ids: TokenIds, namespace: str = "") -> int:
        """Count the tokens of the longest prefix that `open` would find now. Takes nothing."""
        return len(self.find_cached(token_ids, namespace)[0]) * self.shape.page_size

    def find_cached(self, token_ids: TokenIds, namespace: str = "") -> tuple[Pages, ...]:
        """Find for each pool the pages that `open` would find now. Takes nothing."""
        lock = self.index.match(token_ids, namespace)
        self.allocator.unlock(lock)
        return lock.pages

    def retain(self, token_ids: TokenIds, seconds: float, namespace: str = "") -> None:
        """Evict the cached pages of `token_ids` after others, for so many seconds; see `Retention`.

        They are promised to nobody, and make room for every request as before.
        """
        self.index.retain(token_ids, seconds, namespace)

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
