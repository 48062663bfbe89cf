"""Who owns each page and each row: the only code that moves them between owners."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvrelay.mem_cache.errors import ConservationError, LedgerError
from kvrelay.mem_cache.fence import Fence
from kvrelay.mem_cache.lease import Lease, LeaseState
from kvrelay.mem_cache.prefix_index import NoPrefixIndex, PrefixIndex

HISTORY = 4096
"""Moves that a conservation fault can be explained with."""


class Owner(IntEnum):
    """Exactly one of these owns a page, or a row."""

    FREE = 0
    """Nobody: it may be handed out."""
    LEASE = 1
    """A request."""
    INDEX = 2
    """The prefix index."""
    QUARANTINE = 3
    """Nobody, but something in flight may still read or write it."""


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """A pool's account at one moment; the states sum to `total`.

    `promised` pages are still among the free: running requests may grow into
    them, so nobody else is admitted on their account.
    """

    pool: str
    page_size: int
    total: int
    free: int
    held: int
    cached_evictable: int
    cached_protected: int
    session: int
    quarantined: int
    promised: int


@dataclass(frozen=True, slots=True)
class _Quarantined:
    """Pages and perhaps a row that come back when every fence has passed."""

    holder: str
    pages: tuple[int, ...]
    row: int
    fences: tuple[Fence, ...]
    since: float


@dataclass(frozen=True, slots=True)
class _Move:
    """One entry of the history: `pages` went from one owner to another."""

    holder: str
    pages: tuple[int, ...]
    source: Owner
    target: Owner


class Ledger:
    """The account of one worker's KV pages and rows.

    Not thread-safe: the engine thread alone calls it. Shortage returns `None`
    or `False` with nothing changed; misuse raises `LedgerError`.

    Args:
        total_pages: pages of the pool.
        page_size: tokens a page.
        total_rows: requests that can hold memory at the same time.
        max_row_tokens: tokens that one request can hold (sizes the page tables).
        index: finds and keeps settled prefixes; none by default.
        clock: seconds, monotonic; only ever used to report an age.
    """

    def __init__(
        self,
        *,
        total_pages: int,
        page_size: int,
        total_rows: int,
        max_row_tokens: int,
        index: PrefixIndex | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_pages = total_pages
        self.page_size = page_size
        self.total_rows = total_rows
        self.index = index or NoPrefixIndex()
        self._clock = clock
        self._page_owner = np.zeros(total_pages, np.uint8)
        # Stacks; reversed, so that a fresh pool hands out neighbours in ascending order.
        self._free_pages = list(range(total_pages))[::-1]
        self._free_rows = list(range(total_rows))[::-1]
        self._page_tables = np.full((total_rows, -(-max_row_tokens // page_size)), -1, np.int32)
        self._leases: dict[int, Lease] = {}
        self._quarantine: list[_Quarantined] = []
        self._promised_pages = 0
        self._pages_by_owner = [total_pages, 0, 0, 0]
        self._history: deque[_Move] = deque(maxlen=HISTORY)

    # Admission and growth

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    @property
    def max_lease_tokens(self) -> int:
        """The most tokens that one lease could ever hold."""
        return min(self.total_pages, self._page_tables.shape[1]) * self.page_size

    def open(
        self, holder: str, promised_tokens: int, token_ids: Sequence[int] = ()
    ) -> Lease | None:
        """Start a lease that can surely grow to `promised_tokens`; `None` if that cannot be said.

        Locks the longest cached prefix of `token_ids`.
        """
        if promised_tokens > self._page_tables.shape[1] * self.page_size:
            raise LedgerError(f"{holder}: a row cannot hold {promised_tokens} tokens")
        lock = self.index.match(token_ids)
        promised = self.pages_for(promised_tokens) - len(lock.pages)
        if not self._free_rows or self._unpromised_pages < promised:
            self.index.unlock(lock)
            return None
        row = self._free_rows.pop()
        self._promised_pages += promised
        table = self._page_tables[row]
        table[: len(lock.pages)] = lock.pages
        lease = Lease(holder, row, table, self.page_size, lock, promised)
        self._leases[row] = lease
        return lease

    def grow(self, lease: Lease, tokens: int) -> bool:
        """Raise `kv_allocated_len` to `tokens`, all or nothing; `False` if pages are short.

        Never short within what `open` promised.
        """
        lease.check_open("growth")
        if tokens <= lease.kv_allocated_len:
            return True
        first, last = lease.num_pages, self.pages_for(tokens)
        wanted = last - first
        kept_promise = min(wanted, lease._promised_pages)
        if last > len(lease._page_table) or self._unpromised_pages < wanted - kept_promise:
            return False
        if wanted:
            lease._page_table[first:last] = self._take_free(lease.holder, wanted)
            lease._promised_pages -= kept_promise
            self._promised_pages -= kept_promise
        lease._kv_allocated_len = tokens
        return True

    def commit(self, lease: Lease, tokens: int) -> None:
        """Raise `kv_committed_len` to `tokens`: their KV is written, or a forward launched to."""
        lease.check_open("commit")
        if not lease.kv_committed_len <= tokens <= lease.kv_allocated_len:
            raise LedgerError(f"commit of {tokens} tokens to {lease!r}")
        lease._kv_committed_len = tokens

    def page_tables(self, leases: Sequence[Lease]) -> npt.NDArray[np.int32]:
        """A forward's own snapshot of the leases' tables, ``[len(leases), most pages of any]``."""
        widest = max(lease.num_pages for lease in leases)
        return self._page_tables[[lease.row for lease in leases], :widest]

    # The way back; called by `release_kv_cache` alone

    def publish(self, lease: Lease, token_ids: Sequence[int]) -> None:
        """Offer the lease's own whole pages of `token_ids` to the index, which may take them."""
        last = min(lease.kv_committed_len, len(token_ids)) // self.page_size
        offered = lease._page_table[:last].tolist()
        refused = frozenset(self.index.insert(token_ids[: last * self.page_size], offered))
        taken = [page for page in offered[lease.num_protected_pages :] if page not in refused]
        self._move(lease.holder, taken, Owner.LEASE, Owner.INDEX)
        lease._published_pages = frozenset(taken)

    def give_back(self, lease: Lease, pending: Sequence[Fence]) -> None:
        """Take every page that the lease still owns, then its row.

        To quarantine if anything is `pending`, else to free.
        """
        owned = lease.own_pages
        target = Owner.QUARANTINE if pending else Owner.FREE
        self._move(lease.holder, owned, Owner.LEASE, target)
        self.index.unlock(lease._prefix_lock)
        self._promised_pages -= lease._promised_pages
        lease._promised_pages = 0
        lease._state = LeaseState.RELEASED
        del self._leases[lease.row]
        if pending:
            self._quarantine.append(
                _Quarantined(lease.holder, tuple(owned), lease.row, tuple(pending), self._clock())
            )
        else:
            self._free_row(lease.row)

    def reclaim(self) -> int:
        """Free what the quarantine's fences no longer protect; returns the pages freed.

        The one place where quarantined memory becomes free.
        """
        if not self._quarantine:
            return 0
        freed, waiting = 0, []
        for entry in self._quarantine:
            if not all(fence.passed() for fence in entry.fences):
                waiting.append(entry)
                continue
            self._move(entry.holder, entry.pages, Owner.QUARANTINE, Owner.FREE)
            self._free_row(entry.row)
            freed += len(entry.pages)
        self._quarantine = waiting
        return freed

    # Accounts

    def page_counts(self) -> PoolCounts:
        """The account of the pages. O(1)."""
        evictable = self.index.evictable_pages
        return PoolCounts(
            pool="kv",
            page_size=self.page_size,
            total=self.total_pages,
            free=len(self._free_pages),
            held=self._pages_by_owner[Owner.LEASE],
            cached_evictable=evictable,
            cached_protected=self._pages_by_owner[Owner.INDEX] - evictable,
            session=0,
            quarantined=self._pages_by_owner[Owner.QUARANTINE],
            promised=self._promised_pages,
        )

    def row_counts(self) -> PoolCounts:
        """The account of the rows. O(1)."""
        return PoolCounts(
            pool="rows",
            page_size=0,
            total=self.total_rows,
            free=len(self._free_rows),
            held=len(self._leases),
            cached_evictable=0,
            cached_protected=0,
            session=0,
            quarantined=len(self._quarantine),
            promised=0,
        )

    @property
    def quarantined_since(self) -> float | None:
        """When the oldest quarantined memory came there, by the ledger's clock."""
        return min((entry.since for entry in self._quarantine), default=None)

    def audit(self) -> None:
        """Check the conservation equation of pages and rows. O(1), for every step.

        Raises:
            ConservationError: something was lost or is counted twice.
        """
        for counts in (self.page_counts(), self.row_counts()):
            states = (
                counts.free
                + counts.held
                + counts.cached_evictable
                + counts.cached_protected
                + counts.session
                + counts.quarantined
            )
            if states != counts.total:
                raise ConservationError(f"{states} of {counts.total} accounted for: {counts}")
        if not 0 <= self._promised_pages <= len(self._free_pages) + self.index.evictable_pages:
            raise ConservationError(f"{self._promised_pages} pages promised: {self.page_counts()}")

    def audit_pages(self) -> None:
        """Check every page and row one by one, besides `audit`. For tests and debugging.

        Raises:
            ConservationError: names a page that is lost or has two owners, and its history.
        """
        self.audit()
        claims = np.zeros(self.total_pages, np.int32)
        np.add.at(claims, self._free_pages, 1)
        self._check_owner(self._free_pages, Owner.FREE)
        for entry in self._quarantine:
            np.add.at(claims, list(entry.pages), 1)
            self._check_owner(entry.pages, Owner.QUARANTINE)
        for lease in self._leases.values():
            np.add.at(claims, lease.own_pages, 1)
            self._check_owner(lease.own_pages, Owner.LEASE)
        claims[self._page_owner == Owner.INDEX] += 1
        for page in np.flatnonzero(claims != 1).tolist():
            raise ConservationError(f"page {page} has {claims[page]} owners: {self.history(page)}")
        rows = [*self._free_rows, *self._leases, *(entry.row for entry in self._quarantine)]
        if sorted(rows) != list(range(self.total_rows)):
            raise ConservationError(f"of {self.total_rows} rows these are owned: {sorted(rows)}")

    def history(self, page: int) -> str:
        """The last owners of a page, oldest first."""
        moves = (move for move in self._history if page in move.pages)
        return "; ".join(f"{m.holder}: {m.source.name} to {m.target.name}" for m in moves)

    # Inside

    @property
    def _unpromised_pages(self) -> int:
        """Pages that can be had without breaking a promise."""
        return len(self._free_pages) + self.index.evictable_pages - self._promised_pages

    def _take_free(self, holder: str, wanted: int) -> list[int]:
        missing = wanted - len(self._free_pages)
        if missing > 0:
            evicted = self.index.evict(missing)
            assert len(evicted) >= missing, "the index cannot evict what it called evictable"
            self._move("prefix index", evicted, Owner.INDEX, Owner.FREE)
        pages = self._free_pages[-wanted:][::-1]
        self._move(holder, pages, Owner.FREE, Owner.LEASE)
        return pages

    def _move(self, holder: str, pages: Sequence[int], source: Owner, target: Owner) -> None:
        """Change the owner of `pages`; a page that `source` does not own is a fault."""
        if not pages:
            return
        self._check_owner(pages, source)
        if source is Owner.FREE:
            del self._free_pages[-len(pages) :]
        self._page_owner[list(pages)] = target
        self._pages_by_owner[source] -= len(pages)
        self._pages_by_owner[target] += len(pages)
        if target is Owner.FREE:
            self._free_pages.extend(reversed(pages))
        self._history.append(_Move(holder, tuple(pages), source, target))

    def _check_owner(self, pages: Sequence[int], owner: Owner) -> None:
        for page in np.asarray(pages, np.int64)[self._page_owner[list(pages)] != owner].tolist():
            raise ConservationError(
                f"page {page} should be owned by {owner.name} and is by "
                f"{Owner(self._page_owner[page]).name}: {self.history(page)}"
            )

    def _free_row(self, row: int) -> None:
        self._page_tables[row] = -1
        self._free_rows.append(row)
