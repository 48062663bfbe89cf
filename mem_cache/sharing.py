"""What a lease gives to the prefix index, and who else gets it. The contracts are `Ledger`'s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvrelay.mem_cache import growth
from kvrelay.mem_cache.books import Books
from kvrelay.mem_cache.errors import LedgerError
from kvrelay.mem_cache.fence import Fence
from kvrelay.mem_cache.lease import Lease, LeaseState
from kvrelay.mem_cache.prefix_index import NO_PAGE, PrefixLock, TokenIds


class PageCopy(NamedTuple):
    """A page that a forward copies before it writes anything."""

    pool: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Fork:
    """The leases of a request's other choices."""

    leases: tuple[Lease, ...]
    copies: tuple[PageCopy, ...]
    """Of the prefix's unaligned last page, for each lease and pool; none if it is aligned."""


def publish(books: Books, lease: Lease, token_ids: TokenIds, pending: Sequence[Fence]) -> None:
    """See `Ledger.publish`."""
    if lease.state is not LeaseState.CLOSED:
        lease.check_open("publishing")
    last = min(lease.kv_committed_len, len(token_ids)) // books.page_size
    if last > lease.num_protected_pages:
        _give(books, lease, token_ids[: last * books.page_size], pending)


def fork(
    books: Books,
    lease: Lease,
    holders: Sequence[str],
    token_ids: TokenIds,
    promised_tokens: int,
    copied: Fence,
    pending: Sequence[Fence],
) -> Fork | None:
    """See `Ledger.fork`."""
    lease.check_open("forking")
    length, number = len(token_ids), len(holders)
    if length != lease.kv_committed_len or not books.can_go_back(lease, length):
        raise LedgerError(f"fork of {lease!r} after {length} tokens")
    if not length <= promised_tokens <= books.rows.row_pages * books.page_size:
        raise LedgerError(f"fork of {lease!r} with a promise of {promised_tokens} tokens")
    if len(books.free_rows) < number:
        return None
    whole = length // books.page_size
    promises = books.promises(promised_tokens, whole)
    spared = [number * pages for pages in promises]
    shared = token_ids[: whole * books.page_size]
    if not _give(books, lease, shared, pending, spared=spared, share=True):
        return None
    leases = [_child(books, lease, holder, promised_tokens, promises) for holder in holders]
    grown = growth.grow_all(books, leases, [length] * number)
    assert grown, "what was promised is not there"
    growth.commit_all(books, leases, [length] * number)
    if length % books.page_size == 0:
        return Fork(tuple(leases), ())
    copies = [
        PageCopy(pool, int(table[lease.row, whole]), int(table[child.row, whole]))
        for child in leases
        for pool, table in enumerate(books.rows.page_tables)
    ]
    for one in (lease, *leases):
        one._fences.append(copied)
    return Fork(tuple(leases), tuple(copies))


def _child(
    books: Books, parent: Lease, holder: str, promised_tokens: int, promises: Sequence[int]
) -> Lease:
    """A lease that locks what its parent locks."""
    lock = parent._prefix_lock
    if lock is not None:
        books.index.lock_again(lock)
    return books.enter_lease(holder, parent.namespace, promised_tokens, promises, lock)


def _give(
    books: Books,
    lease: Lease,
    whole: TokenIds,
    pending: Sequence[Fence],
    *,
    spared: Sequence[int] = (),
    share: bool = False,
) -> bool:
    """Hand the pages of `whole` pages' tokens to the prefix index, and lock them there.

    Args:
        books: of the lease.
        lease: that has them.
        whole: settled tokens.
        pending: what still reads the pages.
        spared: pages of each pool that must be unpromised afterwards.
        share: with others who have no other way to them.

    Returns:
        Whether it was done; nothing has changed if not.
    """
    index, before = books.index, lease.num_protected_pages
    last = len(whole) // books.page_size
    spared = spared or [0] * len(books.pools)
    if last <= before:
        return all(books.unpromised(pool) >= spared[pool] for pool in books.numbers)
    # What is locked cannot be evicted any more, while the duplicates of it come back later: so
    # it may be that others were promised room that would then be missing.
    known = index.hold(whole, lease.namespace)
    further = [_further_promise(books, lease, pool, last) for pool in books.numbers]
    for pool in books.numbers:
        coming = 0 if pending else _coming_back(books, lease, pool, last, known)
        if books.unpromised(pool) + coming < further[pool] + spared[pool]:
            books.unlock(known)
            return False
    offered = list(books.rows.page_tables[:, lease.row, :last].copy())
    inserted = (index.share if share else index.insert)(whole, offered, lease.namespace)
    if inserted.lock.num_pages < last:
        assert not any(map(len, inserted.taken)), "the index took what it does not lock"
        books.unlock(inserted.lock)
        books.unlock(known)
        return False
    duplicates = []
    for taken, pages in zip(inserted.taken, offered, strict=True):
        mine = pages[before:]
        duplicates.append(mine[(mine != NO_PAGE) & ~np.isin(mine, taken)])
    books.give_to_index(lease, inserted.taken)
    old = lease._prefix_lock
    books.adopt(lease, inserted.lock)
    books.promise_more(lease, further)
    if old is not None and not pending:
        books.unlock(old)
        old = None
    books.unlock(known)
    books.cache_counts.duplicate_pages += sum(map(len, duplicates))
    books.let_go(lease.holder, duplicates, pending, lock=old)
    return True


def _further_promise(books: Books, lease: Lease, pool: int, last: int) -> int:
    """Pages that a lease must be promised besides if the index gets its first `last` pages.

    In a window pool these would have come back to it as the window moves on;
    the index has them from now on, and some of them locked.
    """
    own = lease.num_pages - max(last, lease.first_pages[pool])
    to_come = books.pages_for(lease.promised_tokens) - lease.num_pages
    most = books.most_pages(pool, lease.promised_tokens) - own
    return max(0, min(to_come, most) - lease.promised_pages[pool])


def _coming_back(books: Books, lease: Lease, pool: int, last: int, known: PrefixLock) -> int:
    """Of the lease's pages before `last`: duplicates, and those that nobody will see."""
    seen = min(books.frontier(pool, last * books.page_size), last - 1)
    first = max(lease.num_protected_pages, lease.first_pages[pool])
    theirs = known.pages[pool][first:] != NO_PAGE
    return max(0, seen - first) + int(np.count_nonzero(theirs[max(0, seen - first) :]))
