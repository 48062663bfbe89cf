"""What a session does with a lease between the turns of its requests. Contracts: `Ledger`'s."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.mem_cache import growth
from kvrelay.mem_cache.account import NO_PAGES, Owner
from kvrelay.mem_cache.books import Books
from kvrelay.mem_cache.errors import LedgerError
from kvrelay.mem_cache.fence import Fence
from kvrelay.mem_cache.lease import Lease, LeaseState


def save(books: Books, lease: Lease, pending: Sequence[Fence]) -> None:
    """See `Ledger.save`."""
    lease.move_to(LeaseState.SAVED)
    books.break_promise(lease)
    _drop_set_aside(books, lease, pending)
    books.hand(lease, Owner.LEASE, Owner.SESSION)


def borrow(
    books: Books,
    lease: Lease,
    holder: str,
    prefix_len: int,
    promised_tokens: int,
    fresh_boundary: bool,
    pending: Sequence[Fence],
) -> bool:
    """See `Ledger.borrow`."""
    if promised_tokens < prefix_len:
        raise LedgerError(f"{holder}: promise of {promised_tokens} for {prefix_len} tokens")
    if prefix_len > lease.kv_committed_len or not books.can_go_back(lease, prefix_len):
        raise LedgerError(f"{holder}: {lease!r} cannot be cut to {prefix_len} tokens")
    kept = books.pages_for(prefix_len)
    fresh = int(fresh_boundary and prefix_len % books.page_size > 0)
    promises = []
    for pool in books.numbers:
        most = books.most_pages(pool, promised_tokens)
        wanted = min(books.pages_for(promised_tokens) - kept, most)
        coming = 0 if pending else max(0, lease.num_pages - max(kept, lease.first_pages[pool]))
        if books.unpromised(pool) + coming < wanted + fresh:
            return False
        promises.append(wanted)
    lease.move_to(LeaseState.OPEN)
    lease.holder = holder
    books.hand(lease, Owner.SESSION, Owner.LEASE)
    growth.trim(books, lease, prefix_len, pending)
    if fresh:
        _replace_boundary(books, lease, kept - 1)
    books.promise(lease, promised_tokens, promises)
    return True


def roll_back(books: Books, lease: Lease, prefix_len: int, pending: Sequence[Fence]) -> None:
    """See `Ledger.roll_back`."""
    lease.check_open("rolling back")
    if not books.can_go_back(lease, prefix_len):
        raise LedgerError(f"{lease!r} cannot go back to {prefix_len} tokens")
    boundary = prefix_len // books.page_size
    kept = [len(pages) > 0 for pages in lease._set_aside]
    for pool, table in enumerate(books.rows.page_tables[:, lease.row]):
        if kept[pool]:
            old = lease._set_aside[pool]
            lease._set_aside[pool] = table[boundary : boundary + 1].copy()
            table[boundary] = old[0]
    _drop_set_aside(books, lease, pending)
    if any(kept):
        for lengths in (books.rows.allocated, books.rows.committed):
            lengths[lease.row] = max(lengths[lease.row], prefix_len)
    growth.trim(books, lease, prefix_len, pending)


def _replace_boundary(books: Books, lease: Lease, page: int) -> None:
    """Put a fresh page in the place of a page of the table, which is kept."""
    for pool, table in enumerate(books.rows.page_tables[:, lease.row]):
        lease._set_aside[pool] = table[page : page + 1].copy()
        table[page] = books.take(pool, [(lease.holder, 1)])[0]
    books.rows.committed[lease.row] = page * books.page_size


def _drop_set_aside(books: Books, lease: Lease, pending: Sequence[Fence]) -> None:
    aside, lease._set_aside = lease._set_aside, [NO_PAGES for _ in books.numbers]
    books.let_go(lease.holder, aside, pending)
