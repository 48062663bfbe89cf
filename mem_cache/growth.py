"""What changes a lease's lengths: grow, commit, slide, trim. The contracts are `Ledger`'s."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.mem_cache.account import Pages
from kvrelay.mem_cache.books import Books
from kvrelay.mem_cache.errors import LedgerError
from kvrelay.mem_cache.fence import Fence
from kvrelay.mem_cache.lease import Lease, LeaseState
from kvrelay.mem_cache.prefix_index import NO_PAGE

# Looked up once: to find a member in an enum takes longer than the rest of a loop's turn.
_OPEN = LeaseState.OPEN


def grow_all(books: Books, leases: Sequence[Lease], tokens: Sequence[int]) -> bool:
    """See `Ledger.grow_all`."""
    size = books.page_size
    growing = []
    for lease, goal in zip(leases, tokens, strict=True):
        if lease._state is not _OPEN:
            lease.check_open("growth")
        first, last = -(-lease._kv_allocated_len // size), -(-goal // size)
        if last > first:
            growing.append((lease, first, last))
    if growing and not _grow_pages(books, growing):
        return False
    for lease, goal in zip(leases, tokens, strict=True):
        if goal > lease._kv_allocated_len:
            lease._kv_allocated_len = goal
    return True


def commit_all(leases: Sequence[Lease], tokens: Sequence[int]) -> None:
    """See `Ledger.commit_all`."""
    for lease, goal in zip(leases, tokens, strict=True):
        if lease._state is not _OPEN:
            lease.check_open("commit")
        if not lease._kv_committed_len <= goal <= lease._kv_allocated_len:
            raise LedgerError(f"commit of {goal} tokens to {lease!r}")
        lease._kv_committed_len = goal


def slide_all(books: Books, leases: Sequence[Lease], positions: Sequence[int]) -> None:
    """See `Ledger.slide`."""
    for pool, shape in enumerate(books.pools):
        if shape.window is None:
            continue
        behind = books.pages_for(shape.window - 1)
        leaving = []
        for lease, position in zip(leases, positions, strict=True):
            if lease._state is not _OPEN:
                lease.check_open("sliding")
            frontier = position // books.page_size - behind
            if frontier > lease._frontiers[pool]:
                leaving.append((lease.holder, _slide_pool(books, lease, pool, frontier)))
        if leaving:
            books.free(pool, leaving)


def trim(books: Books, lease: Lease, tokens: int, pending: Sequence[Fence]) -> None:
    """See `Ledger.trim`."""
    lease.check_open("trimming")
    if tokens < lease.cache_protected_len:
        raise LedgerError(f"trim of {lease!r} to {tokens} tokens")
    kept = books.pages_for(tokens)
    tails = []
    for pool, table in enumerate(lease._page_tables):
        first = max(kept, lease._frontiers[pool])
        tails.append(table[first : lease.num_pages].copy())
        table[first : lease.num_pages] = NO_PAGE
    lease._kv_allocated_len = min(lease._kv_allocated_len, kept * books.page_size)
    lease._kv_committed_len = min(lease._kv_committed_len, tokens)
    books.let_go(lease.holder, tails, pending)
    if not pending:
        for pool, tail in enumerate(tails):
            books.promise_again(lease, pool, len(tail))


def _grow_pages(books: Books, growing: Sequence[tuple[Lease, int, int]]) -> bool:
    """Give each lease the pages ``[first, last)`` of its table, in every pool, or none."""
    if any(last > books.row_pages for _, _, last in growing):
        return False
    plans = [_missing(pool, growing) for pool in books.numbers]
    for pool, plan in enumerate(plans):
        if books.unpromised(pool) < sum([missing - kept for _, _, missing, kept in plan]):
            return False
    for pool, plan in enumerate(plans):
        _take_missing(books, pool, plan)
    return True


def _missing(
    pool: int, growing: Sequence[tuple[Lease, int, int]]
) -> list[tuple[Lease, int, int, int]]:
    """For each lease that has not all of its pages: the first, how many, how many promised."""
    plan = []
    for lease, first, last in growing:
        start = max(first, lease._frontiers[pool])
        if start < last:
            kept = min(last - start, lease._promised_pages[pool])
            plan.append((lease, start, last - start, kept))
    return plan


def _take_missing(books: Books, pool: int, plan: Sequence[tuple[Lease, int, int, int]]) -> None:
    """Carry out a plan of `_missing`; there must be as many pages."""
    pages = books.take(pool, [(lease.holder, missing) for lease, _, missing, _ in plan])
    books.promised[pool] -= sum([kept for _, _, _, kept in plan])
    taken = 0
    for lease, start, missing, kept in plan:
        table = lease._page_tables[pool]
        table[start : start + missing] = pages[taken : taken + missing]
        taken += missing
        lease._promised_pages[pool] -= kept


def _slide_pool(books: Books, lease: Lease, pool: int, frontier: int) -> Pages:
    """Advance a lease's frontier; returns the pages that it owned before it."""
    before, end = lease._frontiers[pool], lease.num_pages
    table, last = lease._page_tables[pool], min(frontier, end)
    leaving: Pages = table[max(before, lease.num_protected_pages) : last].copy()
    table[before:last] = NO_PAGE
    lease._frontiers[pool] = frontier
    books.promise_again(lease, pool, len(leaving))
    return leaving
