"""What a lease gives to the prefix index. The contracts are `Ledger`'s."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvrelay.mem_cache.books import Books
from kvrelay.mem_cache.fence import Fence
from kvrelay.mem_cache.lease import Lease, LeaseState
from kvrelay.mem_cache.prefix_index import NO_PAGE, TokenIds


def publish(books: Books, lease: Lease, token_ids: TokenIds, pending: Sequence[Fence]) -> None:
    """See `Ledger.publish`."""
    if lease.state is not LeaseState.CLOSED:
        lease.check_open("publishing")
    last = min(lease.kv_committed_len, len(token_ids)) // books.page_size
    before = lease.num_protected_pages
    if last <= before:
        return
    index, whole = books.index, token_ids[: last * books.page_size]
    # What is locked cannot be evicted any more, while the duplicates of it come back later, or
    # are fewer: so it may be that others were promised room that would then be missing.
    known = index.hold(whole, lease.namespace)
    short = any(books.unpromised(pool) < 0 for pool in books.numbers)
    if short and (pending or any(pool.window is not None for pool in books.pools)):
        books.unlock(known)
        return
    offered = [table[:last].copy() for table in lease._page_tables]
    inserted = index.insert(whole, offered, lease.namespace)
    if inserted.lock.num_pages < last:
        assert not any(map(len, inserted.taken)), "the index took what it does not lock"
        books.unlock(inserted.lock)
        books.unlock(known)
        return
    duplicates = []
    for taken, pages in zip(inserted.taken, offered, strict=True):
        mine = pages[before:]
        duplicates.append(mine[(mine != NO_PAGE) & ~np.isin(mine, taken)])
    books.give_to_index(lease, inserted.taken)
    old = lease._prefix_lock
    books.adopt(lease, inserted.lock)
    if old is not None and not pending:
        books.unlock(old)
        old = None
    books.unlock(known)
    books.cache_counts.duplicate_pages += sum(map(len, duplicates))
    books.let_go(lease.holder, duplicates, pending, lock=old)
