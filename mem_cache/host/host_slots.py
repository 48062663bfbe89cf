"""The slots of one pool of the host: who owns each, from its reservation to its end.

The content of a slot, a page or a page's part of a window, goes one way::

    FREE --reserve--> WRITING --end_write--> CACHED --drop--> FREE
                         |                      |
                         +-------- drop --------+--> GONE --its copies have ended--> FREE
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from kvrelay.mem_cache.account import Owner, PageAccount, Pages
from kvrelay.mem_cache.errors import ConservationError
from kvrelay.mem_cache.host.host_page import HostPageState
from kvrelay.wire.load import PoolCounts


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


class InSlot(EvictablePage, Protocol):
    """An interface to the content of a slot."""

    slot: int
    state: HostPageState
    """The state; written by `HostSlots` alone."""
    pins: int
    """The number of readers; written by `HostSlots` alone."""


_InSlot = TypeVar("_InSlot", bound=InSlot)


class HostSlots(Generic[_InSlot]):
    """The account of one pool of the host. `HostPages` and `HostWindow` each have theirs.

    Args:
        name: a label of its metrics.
        total: slots.
        page_size: tokens a page.
    """

    def __init__(self, name: str, total: int, page_size: int) -> None:
        self.name = name
        self.total = total
        self.queue: HostEvictionQueue[_InSlot] = HostEvictionQueue()
        """The content that may be dropped for other content."""
        self.gone: set[_InSlot] = set()
        """The content that is no longer found, though copies or peers use it; changed here
        alone."""
        self._page_size = page_size
        self._account = PageAccount(name, total)
        # Counted apart from the owners of slots, so that the one proves the other.
        self._cached = self._pinned = self._in_flight = 0

    @property
    def free(self) -> int:
        """The number of free slots."""
        return self._account.by_owner[Owner.FREE]

    @property
    def free_slots(self) -> Pages:
        """The slots that are free, a view."""
        return self._account.free_pages

    def reserve(self, number: int) -> list[int]:
        """Take free slots, for content that is WRITING from now on. Enough slots must be free."""
        slots = self._account.allocate((("write to host", number),), Owner.IN_FLIGHT)
        self._in_flight += number
        return [int(slot) for slot in slots]

    def end_write(self, written: Sequence[_InSlot]) -> None:
        """Turn WRITING content into CACHED."""
        self._move(written, Owner.IN_FLIGHT, Owner.INDEX)
        self._cached += len(written)
        self._in_flight -= len(written)
        for one in written:
            one.state = HostPageState.CACHED
            self.queue.push(one)

    def pin(self, some: Iterable[_InSlot]) -> None:
        """Note that a copy or a peer reads these, so that they stay."""
        for one in some:
            assert one.state is HostPageState.CACHED, "what is read is not written, or not found"
            self._pinned += not one.pins
            one.pins += 1

    def unpin(self, some: Iterable[_InSlot]) -> None:
        """End one `pin`; frees content that is gone and has no other reader."""
        ended = []
        for one in some:
            one.pins -= 1
            if one.pins:
                continue
            if one.state is HostPageState.GONE:
                ended.append(one)
            else:
                self._pinned -= 1
                self.queue.push(one)
        self.end_gone(ended)

    def drop(self, some: Sequence[_InSlot]) -> None:
        """Make these unfindable. Slots that no copy and no peer uses are free at once."""
        cached = [one for one in some if one.state is HostPageState.CACHED]
        read = [one for one in cached if one.pins]
        free = [one for one in cached if not one.pins]
        self.gone.update(read)
        self.gone.update(one for one in some if one.state is HostPageState.WRITING)
        for one in some:
            one.state = HostPageState.GONE
        self._move(free, Owner.INDEX, Owner.FREE)
        self._move(read, Owner.INDEX, Owner.IN_FLIGHT)
        self._cached -= len(cached)
        self._pinned -= len(read)
        self._in_flight += len(read)

    def end_gone(self, some: Sequence[_InSlot]) -> None:
        """Free these, because the copies and streams that used them have ended."""
        self.gone.difference_update(some)
        self._move(some, Owner.IN_FLIGHT, Owner.FREE)
        self._in_flight -= len(some)

    def _move(self, some: Sequence[_InSlot], source: Owner, target: Owner) -> None:
        self._account.move(((self.name, len(some)),), _slots(some), source, target)

    # Counts and checks

    def counts(self) -> PoolCounts:
        """Count the slots by state."""
        return PoolCounts(
            pool=self.name,
            page_size=self._page_size,
            total=self.total,
            free=self.free,
            held=0,
            cached_evictable=self._cached - self._pinned,
            cached_protected=self._pinned,
            session=0,
            quarantined=0,
            promised=0,
            in_flight=self._in_flight,
        )

    def check(self) -> None:
        """Raise `ConservationError` if a slot was lost or is counted twice. O(1)."""
        counts, owners = self.counts(), self._account.by_owner
        if counts.accounted != self.total or owners[Owner.INDEX] != self._cached:
            raise ConservationError(f"{counts.accounted} of {self.total}, {owners}: {counts}")

    def check_each(self, there: Sequence[_InSlot]) -> None:
        """Run `check`, and check each slot by itself. For tests and debugging.

        Args:
            there: everything that is found, or being written.

        Raises:
            ConservationError: names the slot.
        """
        self.check()
        found = [one for one in there if one.state is HostPageState.CACHED]
        writing = [one for one in there if one.state is HostPageState.WRITING]
        self._account.check_owner(_slots(found), Owner.INDEX)
        self._account.check_owner(_slots([*writing, *self.gone]), Owner.IN_FLIGHT)
        slots = [*_slots([*there, *self.gone]), *self.free_slots]
        if sorted(slots) != list(range(self.total)):
            raise ConservationError(f"of {self.total} of {self.name} are owned: {sorted(slots)}")
        for one in there:
            if one.may_go and not one.is_queued:
                raise ConservationError(f"{self.name} {one.slot} would never be evicted")


def _slots(some: Iterable[InSlot]) -> Pages:
    return np.array([one.slot for one in some], np.int32)
