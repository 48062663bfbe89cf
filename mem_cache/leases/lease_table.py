"""The leases that have a row, and the steps of their lives: see `lease.TRANSITIONS`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvrelay.mem_cache.errors import KVCacheError
from kvrelay.mem_cache.fence import Fence
from kvrelay.mem_cache.leases.lease import Lease, LeaseState
from kvrelay.mem_cache.leases.lease_lengths import LeaseLengths
from kvrelay.mem_cache.leases.ledger import Ledger
from kvrelay.mem_cache.prefix.prefix_index import PrefixLock


class LeaseTable:
    """All leases that were begun and have not ended.

    A lease begins, and ends. Between two turns a session has it: `save`, `borrow` and `roll_back`.

    Args:
        ledger: of the cache.
        lengths: of the leases.
    """

    def __init__(self, ledger: Ledger, lengths: LeaseLengths) -> None:
        self._shape = ledger.shape
        self._rows = ledger.rows
        self._allocator = ledger.allocator
        self._promises = ledger.promises
        self._lengths = lengths
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
        row = self._allocator.take_row()
        self._rows.set_state(row, LeaseState.OPEN)
        lease = Lease(holder, row, self._rows, self._shape, namespace)
        self._by_row[row] = lease
        self._promises.give(row, promised_tokens, promised_pages)
        if lock is not None:
            lease.found_len = lock.num_pages * self._shape.page_size
            self._rows.set_allocated(row, lease.found_len)
            self._rows.set_committed(row, lease.found_len)
            lease.adopt(lock)
        return lease

    # Between two turns of a session

    def save(self, lease: Lease, fences: Sequence[Fence]) -> None:
        """Give an open lease to a session: it keeps its pages and its row, but no promise.

        A page that was set aside is freed, because the turn has succeeded. The fences protect the
        lease's pages from now on.
        """
        lease.move_to(LeaseState.SAVED)
        lease.add_fences(fences)
        self._promises.withdraw(lease.row)
        self._allocator.free_after(lease.pending(()), lease.holder, lease.drop_set_aside())
        self._allocator.move_to_session(lease.holder, lease.all_own_pages())

    def borrow(
        self,
        lease: Lease,
        holder: str,
        prefix_len: int,
        promised_tokens: int,
        *,
        fresh_boundary: bool = False,
        headroom: Sequence[int] | None = None,
    ) -> bool:
        """Lend a session's lease to its next turn. Returns `False` if memory is short.

        Frees all pages beyond the page of token `prefix_len`; that page stays. A refusal changes
        nothing, so admission may try again.

        Args:
            lease: saved.
            holder: the turn.
            prefix_len: tokens that are kept.
            promised_tokens: the most tokens that the turn may hold.
            fresh_boundary: whether the unaligned last page will be written from its start, by a
                read that may fail. Then a fresh page takes its place, and `kv_committed_len` is
                where it begins. The old one is set aside for `roll_back`.
            headroom: pages of each pool that must stay free, or evictable, and unpromised.
        """
        if promised_tokens < prefix_len:
            raise KVCacheError(f"{holder}: promise of {promised_tokens} for {prefix_len} tokens")
        if prefix_len > lease.kv_committed_len or not lease.can_go_back(prefix_len):
            raise KVCacheError(f"{holder}: {lease!r} cannot be cut to {prefix_len} tokens")
        pending = lease.pending(())
        kept = self._shape.pages_for(prefix_len)
        fresh = int(fresh_boundary and prefix_len % self._shape.page_size > 0)
        promised = self._promises.pages_needed(promised_tokens, kept)
        needed = [pages + fresh for pages in promised]
        if not pending:
            for pool, first in enumerate(lease.first_pages):
                needed[pool] -= max(0, lease.num_pages - max(kept, first))
        if not self._promises.has_room(needed, headroom):
            return False
        lease.move_to(LeaseState.OPEN)
        lease.holder = holder
        self._allocator.move_from_session(holder, lease.all_own_pages())
        self._lengths.trim(lease, prefix_len, pending)
        if fresh:
            self._replace_boundary(lease, kept - 1)
        self._promises.give(lease.row, promised_tokens, promised)
        return True

    def _replace_boundary(self, lease: Lease, page: int) -> None:
        """Put a fresh page in the place of a page of the tables, which is set aside."""
        for pool in self._shape.pool_numbers:
            (fresh,) = self._allocator.allocate(pool, ((lease.holder, 1),)).tolist()
            lease.set_aside(pool, page, fresh)
        self._rows.set_committed(lease.row, page * self._shape.page_size)

    def roll_back(self, lease: Lease, prefix_len: int, fences: Sequence[Fence] = ()) -> None:
        """Restore a turn's lease to what `borrow` made it, so that it can be saved.

        Args:
            lease: open, and `lease.can_go_back` to `prefix_len`.
            prefix_len: the tokens that the turn was lent.
            fences: what may still read or write the pages from the turn.
        """
        lease.check_open("rolling back")
        if not lease.can_go_back(prefix_len):
            raise KVCacheError(f"{lease!r} cannot go back to {prefix_len} tokens")
        pending, row = lease.pending(fences), lease.row
        swapped = lease.swap_set_aside(prefix_len // self._shape.page_size)
        self._allocator.free_after(pending, lease.holder, lease.drop_set_aside())
        if swapped:
            self._rows.set_allocated(row, max(lease.kv_allocated_len, prefix_len))
            self._rows.set_committed(row, max(lease.kv_committed_len, prefix_len))
        self._lengths.trim(lease, prefix_len, pending)

    # The end: called by `release_kv_cache` alone

    def close_lease(self, lease: Lease) -> None:
        """Close a lease, so that it cannot grow any more. Idempotent."""
        if lease.state is LeaseState.CLOSED:
            return
        if lease.state is LeaseState.SAVED:
            self._allocator.move_from_session(lease.holder, lease.all_own_pages())
        lease.move_to(LeaseState.CLOSED)
        self._promises.withdraw(lease.row)

    def end_lease(self, lease: Lease, fences: Sequence[Fence]) -> None:
        """Free every page that a closed lease owns, its lock on the prefix, and its row last.

        All of it goes to quarantine until the fences have passed.
        """
        lease.move_to(LeaseState.RELEASED)
        owned, pending = lease.all_own_pages(), lease.pending(fences)
        row = lease.leave_row()
        del self._by_row[row]
        self._allocator.free_after(pending, lease.holder, owned, row=row, lock=lease.prefix_lock)
