"""The leases that have a row: how each begins and ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvrelay.mem_cache.fence import Fence
from kvrelay.mem_cache.leases.lease import Lease, LeaseState
from kvrelay.mem_cache.leases.promises import Promises
from kvrelay.mem_cache.leases.rows import Rows
from kvrelay.mem_cache.page_allocator import PageAllocator
from kvrelay.mem_cache.prefix.prefix_index import PrefixLock
from kvrelay.mem_cache.shape import CacheShape


class LeaseTable:
    """All leases that were begun and have not ended.

    Args:
        shape: of the cache.
        rows: the rows that leases take.
        allocator: of the pages.
        promises: given with a lease, and withdrawn when it is closed.
    """

    def __init__(
        self, shape: CacheShape, rows: Rows, allocator: PageAllocator, promises: Promises
    ) -> None:
        self._shape = shape
        self._rows = rows
        self._allocator = allocator
        self._promises = promises
        self._by_row: dict[int, Lease] = {}

    @property
    def by_row(self) -> Mapping[int, Lease]:
        """Every lease, by its row."""
        return self._by_row

    @property
    def num_free_rows(self) -> int:
        """The number of leases that could begin."""
        return len(self._allocator.free_rows)

    @property
    def max_row_tokens(self) -> int:
        """Tokens that a row's tables can hold."""
        return self._rows.row_pages * self._shape.page_size

    @property
    def max_lease_tokens(self) -> int:
        """The most tokens that one lease could ever hold, limited by a row and by every pool."""
        shape, row = self._shape, self.max_row_tokens
        short = [
            pool.total_pages * shape.page_size
            for number, pool in enumerate(shape.pools)
            if shape.most_pages(number, row) > pool.total_pages
        ]
        return min([row, *short])

    def begin_lease(
        self,
        holder: str,
        namespace: str,
        promised_tokens: int,
        promised_pages: Sequence[int],
        lock: PrefixLock | None,
    ) -> Lease:
        """Begin a lease on a row, with the pages that `lock` locks. Row and pages must be free."""
        rows, row = self._rows, self._allocator.take_row()
        lease = Lease(holder, row, rows, self._shape, namespace)
        self._by_row[row] = lease
        rows.states[row] = LeaseState.OPEN
        self._promises.give(row, promised_tokens, promised_pages)
        if lock is not None:
            lease.adopt(lock)
            lease.found_len = lease.cache_protected_len
            rows.committed[row] = rows.allocated[row] = rows.protected[row]
        return lease

    def close_lease(self, lease: Lease) -> None:
        """Close a lease, so that it cannot grow any more. Idempotent."""
        if lease.state is LeaseState.CLOSED:
            return
        if lease.state is LeaseState.SAVED:
            self._allocator.move_from_session(lease.holder, lease.all_own_pages())
        lease.move_to(LeaseState.CLOSED)
        self._promises.withdraw(lease.row)

    def end_lease(self, lease: Lease, pending: Sequence[Fence]) -> None:
        """Free all pages of a closed lease, its lock and its row once `pending` has passed."""
        lease.move_to(LeaseState.RELEASED)
        owned = lease.all_own_pages()
        row = lease.leave_row()
        del self._by_row[row]
        self._allocator.free_after(pending, lease.holder, owned, row=row, lock=lease.prefix_lock)
