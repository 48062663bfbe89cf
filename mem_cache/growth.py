"""What changes a lease's lengths: grow, commit, slide, trim. The contracts are `Ledger`'s.

Everything is done for many leases at once: the arrays have one entry a lease.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvrelay.mem_cache.books import Books
from kvrelay.mem_cache.errors import LedgerError
from kvrelay.mem_cache.fence import Fence
from kvrelay.mem_cache.lease import Lease, LeaseState, rows_of
from kvrelay.mem_cache.prefix_index import NO_PAGE
from kvrelay.mem_cache.rows import Ints, ranges

_OPEN = LeaseState.OPEN.value


def grow_all(books: Books, leases: Sequence[Lease], tokens: Sequence[int] | Ints) -> bool:
    """See `Ledger.grow_all`."""
    rows = _open_rows(books, leases, "growth")
    goals, allocated = _each(tokens, leases), books.rows.allocated[rows]
    first, last = books.pages_for(allocated), books.pages_for(goals)
    growing = np.flatnonzero(last > first)
    if len(growing):
        holders = [leases[one].holder for one in growing.tolist()]
        if not _grow_pages(books, holders, rows[growing], first[growing], last[growing]):
            return False
    books.rows.allocated[rows] = np.maximum(goals, allocated)
    return True


def commit_all(books: Books, leases: Sequence[Lease], tokens: Sequence[int] | Ints) -> None:
    """See `Ledger.commit_all`."""
    rows = _open_rows(books, leases, "commit")
    goals = _each(tokens, leases)
    wrong = (goals < books.rows.committed[rows]) | (goals > books.rows.allocated[rows])
    for one in np.flatnonzero(wrong).tolist():
        raise LedgerError(f"commit of {goals[one]} tokens to {leases[one]!r}")
    books.rows.committed[rows] = goals


def slide_all(books: Books, leases: Sequence[Lease], positions: Sequence[int] | Ints) -> None:
    """See `Ledger.slide`."""
    for pool, shape in enumerate(books.pools):
        if shape.window is None:
            continue
        rows = _open_rows(books, leases, "sliding")
        behind = books.pages_for(shape.window - 1)
        frontiers = _each(positions, leases) // books.page_size - behind
        moving = np.flatnonzero(frontiers > books.rows.frontiers[pool, rows])
        if len(moving):
            holders = [leases[one].holder for one in moving.tolist()]
            _slide_pool(books, pool, holders, rows[moving], frontiers[moving])


def trim(books: Books, lease: Lease, tokens: int, pending: Sequence[Fence]) -> None:
    """See `Ledger.trim`."""
    lease.check_open("trimming")
    if tokens < lease.cache_protected_len:
        raise LedgerError(f"trim of {lease!r} to {tokens} tokens")
    kept, last, row = books.pages_for(tokens), lease.num_pages, lease.row
    tails = []
    for table, first in zip(books.rows.page_tables[:, row], lease.first_pages, strict=True):
        tail = slice(max(kept, first), last)
        tails.append(table[tail].copy())
        table[tail] = NO_PAGE
    books.rows.allocated[row] = min(lease.kv_allocated_len, kept * books.page_size)
    books.rows.committed[row] = min(lease.kv_committed_len, tokens)
    books.let_go(lease.holder, tails, pending)
    if not pending:
        for pool, pages in enumerate(tails):
            books.promise_again(pool, np.array([row]), np.array([len(pages)]))


def _open_rows(books: Books, leases: Sequence[Lease], action: str) -> Ints:
    rows = rows_of(leases)
    if np.count_nonzero(books.rows.states[rows] != _OPEN):
        for lease in leases:
            lease.check_open(action)
    return rows


def _each(numbers: Sequence[int] | Ints, leases: Sequence[Lease]) -> Ints:
    """One number for each lease."""
    if len(numbers) != len(leases):
        raise LedgerError(f"{len(numbers)} numbers for {len(leases)} leases")
    return np.asarray(numbers, np.int64)


def _grow_pages(books: Books, holders: list[str], rows: Ints, first: Ints, last: Ints) -> bool:
    """Give each row the pages ``[first, last)`` of its tables, in every pool, or none."""
    if last.max() > books.rows.row_pages:
        return False
    plans = []
    for pool in books.numbers:
        start = np.maximum(first, books.rows.frontiers[pool, rows])
        missing = np.maximum(last - start, 0)
        promised = np.minimum(missing, books.rows.promised_pages[pool, rows])
        if books.unpromised(pool) < missing.sum() - promised.sum():
            return False
        plans.append((start, missing, promised))
    for pool, (start, missing, promised) in enumerate(plans):
        pages = books.take(pool, list(zip(holders, missing.tolist(), strict=True)))
        books.rows.page_tables[pool, np.repeat(rows, missing), ranges(start, missing)] = pages
        books.rows.promised_pages[pool, rows] -= promised
        books.promised[pool] -= int(promised.sum())
    return True


def _slide_pool(books: Books, pool: int, holders: list[str], rows: Ints, frontiers: Ints) -> None:
    """Advance the rows' frontiers, and free what they owned before them."""
    known, table = books.rows, books.rows.page_tables[pool]
    before, owned = known.frontiers[pool, rows], known.protected[rows] // books.page_size
    last = np.minimum(frontiers, books.pages_for(known.allocated[rows]))
    first = np.maximum(before, owned)
    known.frontiers[pool, rows] = frontiers
    lent = np.maximum(np.minimum(owned, last) - before, 0)
    if np.count_nonzero(lent):
        table[np.repeat(rows, lent), ranges(before, lent)] = NO_PAGE
    leaving = np.maximum(last - first, 0)
    where = np.repeat(rows, leaving), ranges(first, leaving)
    books.free(pool, list(zip(holders, leaving.tolist(), strict=True)), table[where])
    table[where] = NO_PAGE
    books.promise_again(pool, rows, leaving)
