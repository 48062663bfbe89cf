"""The operations on a session's lease between two turns: save, lend and roll back."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.mem_cache.errors import KVCacheError
from kvrelay.mem_cache.fence import Fence
from kvrelay.mem_cache.leases.lease import Lease, LeaseState
from kvrelay.mem_cache.leases.lease_lengths import LeaseLengths
from kvrelay.mem_cache.leases.promises import Promises
from kvrelay.mem_cache.leases.rows import Rows
from kvrelay.mem_cache.page_allocator import PageAllocator
from kvrelay.mem_cache.shape import CacheShape


class SessionLeases:
    """Leases that outlive a request, because a session keeps them for its next turn.

    `session.Sessions` decides when; this class changes the lease and its pages.

    Args:
        shape: of the cache.
        rows: has the lengths and page tables.
        allocator: of the pages.
        promises: made to a turn, and withdrawn when it ends.
        lengths: of all leases.
    """

    def __init__(
        self,
        shape: CacheShape,
        rows: Rows,
        allocator: PageAllocator,
        promises: Promises,
        lengths: LeaseLengths,
    ) -> None:
        self._shape = shape
        self._rows = rows
        self._allocator = allocator
        self._promises = promises
        self._lengths = lengths

    def save(self, lease: Lease, pending: Sequence[Fence] = ()) -> None:
        """Give an open lease to a session: it keeps its pages and its row, but no promise.

        A page that was set aside is freed, because the turn has succeeded.
        """
        pending = lease.pending(pending)
        lease.move_to(LeaseState.SAVED)
        self._promises.withdraw(lease.row)
        self._allocator.free_after(pending, lease.holder, lease.drop_set_aside())
        self._allocator.move_to_session(lease.holder, lease.all_own_pages())

    def borrow(
        self,
        lease: Lease,
        holder: str,
        prefix_len: int,
        promised_tokens: int,
        *,
        fresh_boundary: bool = False,
        pending: Sequence[Fence] = (),
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
            pending: what may still read or write the pages from the last turn.
            headroom: pages of each pool that must stay free, or evictable, and unpromised.
        """
        if promised_tokens < prefix_len:
            raise KVCacheError(f"{holder}: promise of {promised_tokens} for {prefix_len} tokens")
        if prefix_len > lease.kv_committed_len or not lease.can_go_back(prefix_len):
            raise KVCacheError(f"{holder}: {lease!r} cannot be cut to {prefix_len} tokens")
        pending = lease.pending(pending)
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
        self._allocator.move_from_session(lease.holder, lease.all_own_pages())
        self._lengths.trim(lease, prefix_len, pending)
        if fresh:
            self._replace_boundary(lease, kept - 1)
        self._promises.give(lease.row, promised_tokens, promised)
        return True

    def roll_back(self, lease: Lease, prefix_len: int, pending: Sequence[Fence] = ()) -> None:
        """Restore a turn's lease to what `borrow` made it, so that it can be saved.

        Args:
            lease: open, and `lease.can_go_back` to `prefix_len`.
            prefix_len: the tokens that the turn was lent.
            pending: what may still read or write the pages from the turn.
        """
        lease.check_open("rolling back")
        if not lease.can_go_back(prefix_len):
            raise KVCacheError(f"{lease!r} cannot go back to {prefix_len} tokens")
        pending = lease.pending(pending)
        swapped = lease.swap_set_aside(prefix_len // self._shape.page_size)
        self._allocator.free_after(pending, lease.holder, lease.drop_set_aside())
        if swapped:
            for lengths in (self._rows.allocated, self._rows.committed):
                lengths[lease.row] = max(lengths[lease.row], prefix_len)
        self._lengths.trim(lease, prefix_len, pending)

    def _replace_boundary(self, lease: Lease, page: int) -> None:
        """Put a fresh page in the place of a page of the tables, which is set aside."""
        for pool in self._shape.pool_numbers:
            (fresh,) = self._allocator.allocate(pool, ((lease.holder, 1),)).tolist()
            lease.set_aside(pool, page, fresh)
        self._rows.committed[lease.row] = page * self._shape.page_size
