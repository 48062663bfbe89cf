"""The pages that leases give to the prefix index, and that choices of a request share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvrelay.mem_cache.account import NO_PAGE
from kvrelay.mem_cache.errors import KVCacheError
from kvrelay.mem_cache.fence import Fence
from kvrelay.mem_cache.leases.lease import Lease, LeaseState
from kvrelay.mem_cache.leases.lease_lengths import LeaseLengths
from kvrelay.mem_cache.leases.lease_table import LeaseTable
from kvrelay.mem_cache.leases.ledger import Ledger
from kvrelay.mem_cache.prefix.prefix_index import Inserted, PrefixLock, TokenIds


class PageCopy(NamedTuple):
    """A copy of a page that a forward makes before it writes anything."""

    pool: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Fork:
    """The leases of a request's other choices."""

    leases: tuple[Lease, ...]
    copies: tuple[PageCopy, ...]
    """The copies of the prefix's unaligned last page, for each lease and pool; none if it is
    aligned."""


class PrefixSharing:
    """The moves of leases' pages to the prefix index, where others find or share them.

    Args:
        ledger: of the cache.
        leases: all of them.
        lengths: of all of them.
    """

    def __init__(self, ledger: Ledger, leases: LeaseTable, lengths: LeaseLengths) -> None:
        self._shape = ledger.shape
        self._index = ledger.index
        self._allocator = ledger.allocator
        self._promises = ledger.promises
        self._leases = leases
        self._lengths = lengths

    def publish(self, lease: Lease, token_ids: TokenIds, pending: Sequence[Fence] = ()) -> None:
        """Give the whole pages of written `token_ids` to the prefix index, and lock them there.

        Does nothing if that would break another lease's promise. Pages that the index already has
        replace the lease's own copies. A copy is freed once nothing `pending` reads it: a forward
        that runs, or a peer to which it was announced.
        """
        if lease.state is not LeaseState.CLOSED:
            lease.check_open("publishing")
        page_size = self._shape.page_size
        whole = min(lease.kv_committed_len, len(token_ids)) // page_size
        if whole > lease.num_protected_pages:
            self._move_to_index(lease, token_ids[: whole * page_size], lease.pending(pending))

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
        lease.check_open("publishing")
        page_size = self._shape.page_size
        whole = min(lease.kv_committed_len, len(token_ids)) // page_size
        if whole <= lease.num_protected_pages:
            return False
        tokens = token_ids[: whole * page_size]
        return self._move_to_index(lease, tokens, lease.pending(pending), only_new=True)

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
        fences = lease.pending(pending)
        length, number = len(token_ids), len(holders)
        self._check_fork(lease, length, promised_tokens)
        if self._leases.num_free_rows < number:
            return None
        whole = length // self._shape.page_size
        needed = self._promises.pages_needed(promised_tokens, whole)
        headroom = [number * pages for pages in needed]
        shared = token_ids[: whole * self._shape.page_size]
        if not self._move_to_index(lease, shared, fences, headroom=headroom, share=True):
            return None
        children = []
        for holder in holders:
            lock = lease.prefix_lock
            if lock is not None:
                self._index.lock_again(lock)
            child = self._leases.begin_lease(holder, lease.namespace, promised_tokens, needed, lock)
            children.append(child)
        grown = self._lengths.grow(children, [length] * number)
        assert grown, "what was promised is not there"
        self._lengths.commit(children, [length] * number)
        if length % self._shape.page_size == 0:
            return Fork(tuple(children), ())
        for one in (lease, *children):
            one.add_fences((copied,))
        return Fork(tuple(children), self._copies(lease, children, whole))

    def _check_fork(self, lease: Lease, length: int, promised_tokens: int) -> None:
        """Raise `KVCacheError` if a lease cannot be forked after `length` tokens."""
        lease.check_open("forking")
        if length != lease.kv_committed_len or not lease.can_go_back(length):
            raise KVCacheError(f"fork of {lease!r} after {length} tokens")
        if not length <= promised_tokens <= self._leases.max_row_tokens:
            raise KVCacheError(f"fork of {lease!r} with a promise of {promised_tokens} tokens")

    def _copies(self, lease: Lease, children: Sequence[Lease], page: int) -> tuple[PageCopy, ...]:
        """The copies of `page` of a lease's tables to those of its children."""
        return tuple(
            PageCopy(pool, int(lease.pages(pool)[page]), int(child.pages(pool)[page]))
            for child in children
            for pool in self._shape.pool_numbers
        )

    # From a lease to the index

    def _move_to_index(
        self,
        lease: Lease,
        tokens: TokenIds,
        pending: Sequence[Fence],
        *,
        headroom: Sequence[int] | None = None,
        share: bool = False,
        only_new: bool = False,
    ) -> bool:
        """Give the pages of `tokens` to the prefix index, and lock them there for the lease.

        Args:
            lease: the lease that has them.
            tokens: of whole pages; their KV is written, or will be when `pending` has passed.
            pending: what still reads or writes the pages.
            headroom: pages of each pool that must be unpromised afterwards.
            share: whether to share with others who have no other way to the pages.
            only_new: do nothing if the index has a copy of any of the pages that the lease owns.

        Returns:
            Whether it was done; nothing has changed if not.
        """
        num_pages = len(tokens) // self._shape.page_size
        if num_pages <= lease.num_protected_pages:
            return self._promises.has_room([0] * len(self._shape.pools), headroom)
        # Held while the room is counted: what the index has of these tokens cannot be evicted
        # once the lease locks it, so others may not be promised it.
        known = self._index.hold(tokens, lease.namespace)
        further = self._further_promise(lease, num_pages)
        inserted = None
        may = self._may_insert(lease, known, only_new)
        if may and self._has_room(lease, num_pages, known, further, pending, headroom):
            inserted = self._insert(lease, num_pages, tokens, share)
        if inserted is not None:
            self._replace_pages(lease, num_pages, inserted, further, pending)
        self._allocator.unlock(known)
        return inserted is not None

    def _may_insert(self, lease: Lease, known: PrefixLock, only_new: bool) -> bool:
        """Whether a lease's pages can continue `known`, the pages that the index has for them."""
        lock, protected = lease.prefix_lock, lease.num_protected_pages
        if lock is not None and not self._index.finds(lock):
            return False  # it was forgotten, and its continuations may be as wrong
        return not only_new or known.num_pages <= protected

    def _further_promise(self, lease: Lease, num_pages: int) -> list[int]:
        """Compute for each pool the pages that a lease must be promised besides.

        The pages of a window pool come back to a lease as the window moves on. The first
        `num_pages`, which the index gets, will not come back to it.
        """
        further = []
        to_come = self._shape.pages_for(lease.promised_tokens) - lease.num_pages
        for pool, promised in enumerate(lease.promised_pages):
            own = lease.num_pages - max(num_pages, lease.first_pages[pool])
            most = self._shape.most_pages(pool, lease.promised_tokens) - own
            further.append(max(0, min(to_come, most) - promised))
        return further

    def _has_room(
        self,
        lease: Lease,
        num_pages: int,
        known: PrefixLock,
        further: Sequence[int],
        pending: Sequence[Fence],
        headroom: Sequence[int] | None,
    ) -> bool:
        """Whether all promises can be kept while the lease locks the pages that the index gets."""
        needed = list(further)
        if not pending:
            for pool in self._shape.pool_numbers:
                needed[pool] -= self._freed_at_once(lease, num_pages, pool, known)
        return self._promises.has_room(needed, headroom)

    def _freed_at_once(self, lease: Lease, num_pages: int, pool: int, known: PrefixLock) -> int:
        """Count the lease's pages that become free or evictable if the index gets `num_pages`.

        They are those that a continuation will not see, which are not locked. They are also the
        duplicates, among the others, of the index's `known` pages.
        """
        end = num_pages * self._shape.page_size
        first_seen = min(self._shape.first_page_seen(pool, end), num_pages - 1)
        first_owned = max(lease.num_protected_pages, lease.first_pages[pool])
        unseen = max(0, first_seen - first_owned)
        duplicates = known.pages[pool][first_owned + unseen :] != NO_PAGE
        return unseen + int(np.count_nonzero(duplicates))

    def _insert(
        self, lease: Lease, num_pages: int, tokens: TokenIds, share: bool
    ) -> Inserted | None:
        """Offer a lease's first pages to the index. Returns `None` if it does not lock them all."""
        offered = [lease.pages(pool)[:num_pages] for pool in self._shape.pool_numbers]
        insert = self._index.share if share else self._index.insert
        inserted = insert(tokens, offered, lease.namespace)
        if inserted.lock.num_pages == num_pages:
            return inserted
        assert not any(map(len, inserted.taken)), "the index took what it does not lock"
        self._allocator.unlock(inserted.lock)
        return None

    def _replace_pages(
        self,
        lease: Lease,
        num_pages: int,
        inserted: Inserted,
        further: Sequence[int],
        pending: Sequence[Fence],
    ) -> None:
        """Make a lease use the index's copies of its first pages, and free its duplicates of them.

        The lock that it had on the index before is ended with the duplicates, because pages that
        are still read must not be evicted either.
        """
        duplicates = []
        for pool, taken in enumerate(inserted.taken):
            own = lease.pages(pool)[lease.num_protected_pages : num_pages]
            duplicates.append(own[(own != NO_PAGE) & ~np.isin(own, taken)])
        self._allocator.cache_counts.duplicate_pages += sum(map(len, duplicates))
        self._allocator.move_to_index(lease.holder, inserted.taken)
        lock_before = lease.adopt(inserted.lock)
        self._promises.raise_by(lease.row, further)
        self._allocator.free_after(pending, lease.holder, duplicates, lock=lock_before)
