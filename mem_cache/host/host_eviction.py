"""Which page of the host pool is evicted next."""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar


class EvictablePage(Protocol):
    """A page, as far as it is known here."""

    used: int
    """When it was last used; no two pages at once."""
    is_queued: bool
    """Written by the queue alone."""

    @property
    def may_go(self) -> bool:
        """Whether it may be evicted now."""
        ...


_Page = TypeVar("_Page", bound=EvictablePage)


class HostEvictionQueue(Generic[_Page]):
    """The pages that may be evicted, by their last use. One entry a page.

    Who makes a page evictable pushes it. An entry that is out of date is dropped, or put where it
    belongs, when its turn comes: what may not go is not looked at again for each page that does.
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
        """Take out the least recently used page of those that may be evicted; None: there is none.

        Push it again if it stays.
        """
        while self._queue:
            used, _, page = heapq.heappop(self._queue)
            page.is_queued = False
            if used == page.used and page.may_go:
                return page
            self.push(page)
        return None

    def _drop_others(self) -> None:
        """Drop the entries of pages that may not go: what is forgotten leaves its entry here."""
        for _, _, page in self._queue:
            page.is_queued = page.may_go
        self._queue = [entry for entry in self._queue if entry[2].is_queued]
        heapq.heapify(self._queue)
        self._most_entries = 2 * len(self._queue) + 64
