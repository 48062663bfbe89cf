"""The order in which pages of the host pool are evicted."""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar


class EvictablePage(Protocol):
    """An interface to a page for the eviction queue."""

    used: int
    """The number of its last use; no two pages have the same."""
    is_queued: bool
    """Whether the queue has it; written by the queue alone."""

    @property
    def may_go(self) -> bool:
        """Whether it may be evicted now."""
        ...


_Page = TypeVar("_Page", bound=EvictablePage)


class HostEvictionQueue(Generic[_Page]):
    """The pages that may be evicted, by their last use. One entry a page.

    The code that makes a page evictable pushes it. An outdated entry is dropped, or moved to its
    place, when its turn comes. So a page that may not go is not examined again for each page that
    goes.
    """

    def __init__(self) -> None:
        self._queue: list[tuple[int, int, _Page]] = []
        self._most_entries = 64
        self._tie = 0

    def push(self, page: _Page) -> None:
        """Queue a page if it may be evicted and is not queued yet."""
        if page.is_queued or not page.may_go:
            return
        if len(self._queue) > self._most_entries:
            self._drop_others()
        page.is_queued = True
        self._tie += 1  # entries of pages that are gone may be as old as others
        heapq.heappush(self._queue, (page.used, self._tie, page))

    def pop(self) -> _Page | None:
        """Take the least recently used page that may be evicted. Returns None if there is none.

        Push the page again if it stays.
        """
        while self._queue:
            used, _, page = heapq.heappop(self._queue)
            page.is_queued = False
            if used == page.used and page.may_go:
                return page
            self.push(page)
        return None

    def _drop_others(self) -> None:
        """Drop the entries of pages that may not go. Forgotten pages leave their entries here."""
        for _, _, page in self._queue:
            page.is_queued = page.may_go
        self._queue = [entry for entry in self._queue if entry[2].is_queued]
        heapq.heapify(self._queue)
        self._most_entries = 2 * len(self._queue) + 64
