"""The proof that no page and no row is lost or owned twice, and who has each. See README.md."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvrelay.mem_cache.account import Owner, Pages
from kvrelay.mem_cache.books import Books
from kvrelay.mem_cache.counts import PoolCounts
from kvrelay.mem_cache.errors import ConservationError
from kvrelay.mem_cache.lease import LeaseState


def pool_counts(books: Books, pool: int) -> PoolCounts:
    """The account of a pool's pages. O(1)."""
    account, evictable = books.accounts[pool], books.index.evictable(pool)
    return PoolCounts(
        pool=account.name,
        page_size=books.page_size,
        total=account.total,
        free=len(account.free_pages),
        held=books.held[pool],
        cached_evictable=evictable,
        cached_protected=books.index.size(pool) - evictable,
        session=books.saved[pool],
        quarantined=books.quarantined[pool],
        promised=books.promised[pool],
    )


def row_counts(books: Books) -> PoolCounts:
    """The account of the rows."""
    return PoolCounts(
        pool="rows",
        page_size=0,
        total=books.rows.total,
        free=len(books.free_rows),
        held=len(books.leases) - books.saved_rows,
        cached_evictable=0,
        cached_protected=0,
        session=books.saved_rows,
        quarantined=sum(entry.row is not None for entry in books.quarantine),
        promised=0,
    )


def audit(books: Books) -> None:
    """See `Ledger.audit`."""
    for pool, account in enumerate(books.accounts):
        counts = pool_counts(books, pool)
        if counts.accounted != counts.total:
            raise ConservationError(f"{counts.accounted} of {counts.total}: {counts}")
        claimed = (counts.free, counts.held, books.index.size(pool), counts.session)
        owners = (Owner.FREE, Owner.LEASE, Owner.INDEX, Owner.SESSION)
        owned = tuple(account.count(owner) for owner in owners)
        if claimed != owned:
            raise ConservationError(f"pages say {owned}, their owners {claimed}: {counts}")
        if not 0 <= counts.promised <= counts.free + counts.cached_evictable:
            raise ConservationError(f"{counts.promised} pages promised: {counts}")
    rows = row_counts(books)
    if rows.accounted != rows.total:
        raise ConservationError(f"{rows.accounted} of {rows.total}: {rows}")


def audit_pages(books: Books) -> None:
    """See `Ledger.audit_pages`."""
    audit(books)
    indexed = books.index.audit()
    for pool, account in enumerate(books.accounts):
        claimed = []
        for owner, pages in _claims(books, pool, indexed[pool]):
            account.check_owner(pages, owner)
            claimed.append(pages)
        claims = np.bincount(np.concatenate(claimed), minlength=account.total)
        for page in np.flatnonzero(claims != 1).tolist():
            raise ConservationError(
                f"{account.name} page {page} has {claims[page]} owners: {account.history(page)}"
            )
    quarantined = [entry.row for entry in books.quarantine if entry.row is not None]
    rows = [*books.free_rows, *books.leases, *quarantined]
    if sorted(rows) != list(range(books.rows.total)):
        raise ConservationError(f"of {books.rows.total} rows these are owned: {sorted(rows)}")
    if books.rows.allocated[-1] or books.rows.states[-1]:
        raise ConservationError("something was done to a lease that was released")


def owner_map(books: Books, pool: int) -> list[tuple[Owner, str]]:
    """See `Ledger.owner_map`."""
    owners = [(Owner(owner), "") for owner in books.accounts[pool].owner_of.tolist()]
    for lease in books.leases.values():
        for page in lease.own_pages(pool).tolist():
            owners[page] = (owners[page][0], lease.holder)
    for entry in books.quarantine:
        for page in entry.pages[pool].tolist():
            owners[page] = (Owner.QUARANTINE, entry.holder)
    return owners


def _claims(books: Books, pool: int, indexed: Pages) -> Iterator[tuple[Owner, Pages]]:
    """What each owner has of a pool by its own books."""
    yield Owner.FREE, books.accounts[pool].free_pages
    yield Owner.INDEX, indexed
    for entry in books.quarantine:
        yield Owner.QUARANTINE, entry.pages[pool]
    for lease in books.leases.values():
        saved = lease.state is LeaseState.SAVED
        yield Owner.SESSION if saved else Owner.LEASE, lease.own_pages(pool)
