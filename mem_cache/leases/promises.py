"""The pages that leases were promised: they may still take them, and admission counts them out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvrelay.mem_cache.leases.rows import Rows
from kvrelay.mem_cache.page_allocator import PageAllocator
from kvrelay.mem_cache.shape import CacheShape, Ints


class Promises:
    """The promised pages of all leases, and how many pages are left for others.

    A promise is made for a number of tokens, and kept as a number of pages of each pool. The pages
    stay among the free or evictable ones until the lease takes them.

    Args:
        shape: of the cache.
        rows: has each lease's own promise.
        allocator: knows which pages are available.
    """

    def __init__(self, shape: CacheShape, rows: Rows, allocator: PageAllocator) -> None:
        self.totals = [0] * len(shape.pools)
        """For each pool the pages that were promised and not yet taken."""
        self._shape = shape
        self._rows = rows
        self._allocator = allocator
        self._room = self._count_room()
        self._room_version = 0

    # How much is left

    def unpromised(self, pool: int) -> int:
        """Count the pages that are free or evictable without breaking a promise."""
        return self._allocator.available(pool) - self.totals[pool]

    def has_room(self, pages: Sequence[int], headroom: Sequence[int] | None = None) -> bool:
        """Whether `pages` of each pool are unpromised, and `headroom` pages besides."""
        spare = headroom or [0] * len(self.totals)
        return all(self.unpromised(pool) >= n + spare[pool] for pool, n in enumerate(pages))

    @property
    def room_version(self) -> int:
        """A number that rises, since it was last read, if admission may accept more.

        It rises with rows, idle sessions that can be ended, unpromised pages of any pool, and pages
        given to the prefix index.
        """
        room = self._count_room()
        self._room_version += any(map(int.__gt__, room, self._room))
        self._room = room
        return self._room_version

    def _count_room(self) -> tuple[int, ...]:
        pages = [self.unpromised(pool) for pool in self._shape.pool_numbers]
        rows = len(self._allocator.free_rows), self._allocator.session_rows
        return (*rows, self._allocator.times_published, *pages)

    # What a lease needs

    def pages_needed(self, tokens: int, known_pages: int) -> list[int]:
        """Compute the pages of each pool that a lease of `tokens` may take after its known ones."""
        missing = self._shape.pages_for(tokens) - known_pages
        most = self._shape.most_pages
        return [min(missing, most(pool, tokens)) for pool in self._shape.pool_numbers]

    # Changing a lease's promise

    def give(self, row: int, tokens: int, pages: Sequence[int]) -> None:
        """Promise a row `tokens` tokens, and for them `pages` of each pool."""
        self._rows.promise_tokens(row, tokens)
        self.raise_by(row, pages)

    def raise_by(self, row: int, pages: Sequence[int]) -> None:
        """Promise a row `pages` more of each pool."""
        for pool, number in enumerate(pages):
            self._rows.add_promised(pool, row, number)
            self.totals[pool] += number

    def use(self, pool: int, rows: Ints, pages: Ints) -> None:
        """Record that each row has taken this many of its promised pages."""
        self._rows.add_promised(pool, rows, -pages)
        self.totals[pool] -= int(pages.sum())

    def renew(self, pool: int, rows: Ints, freed: Ints) -> None:
        """Promise each row the pages that it has just freed, as far as its lease may still grow."""
        promised = self._rows.promised_pages[pool, rows]
        most = self._shape.pages_for(self._rows.promised_tokens[rows])
        to_come = most - self._shape.pages_for(self._rows.allocated[rows]) - promised
        renewed = np.maximum(np.minimum(freed, to_come), 0)
        self._rows.add_promised(pool, rows, renewed)
        self.totals[pool] += int(renewed.sum())

    def withdraw(self, row: int) -> None:
        """Withdraw a row's promise, because its lease will not grow."""
        for pool, pages in enumerate(self._rows.promised_pages[:, row].tolist()):
            self.totals[pool] -= pages
        self._rows.end_promise(row)
