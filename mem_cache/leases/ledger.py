"""The accounts of a cache: who owns each page and row, and what each lease has of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.mem_cache.leases.promises import Promises
from kvrelay.mem_cache.leases.rows import Rows
from kvrelay.mem_cache.page_allocator import PageAllocator
from kvrelay.mem_cache.prefix.prefix_index import PrefixIndex
from kvrelay.mem_cache.shape import CacheShape


@dataclass(frozen=True, slots=True)
class Ledger:
    """The accounts that all operations on leases share."""

    shape: CacheShape
    index: PrefixIndex
    allocator: PageAllocator
    """The owners of pages and rows."""
    rows: Rows
    """The lengths, promises and page tables of leases."""
    promises: Promises
    """The pages that leases may still take."""

    @classmethod
    def make(
        cls,
        shape: CacheShape,
        index: PrefixIndex,
        total_rows: int,
        max_row_tokens: int,
        clock: Callable[[], float],
    ) -> Ledger:
        """Make the accounts of a cache of which all pages and rows are free."""
        row_pages = shape.pages_for(max_row_tokens)
        allocator = PageAllocator(shape.pools, total_rows, index, clock)
        rows = Rows(len(shape.pools), total_rows, row_pages, shape.page_size)
        return cls(shape, index, allocator, rows, Promises(shape, rows, allocator))
