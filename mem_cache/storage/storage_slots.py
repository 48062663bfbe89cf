"""The slots of a store of files: which page each has, and which is reused first.

A page goes together with its continuations here, because no request would ask for them any more.

::

    FREE --take--> WRITING --publish--> STORED --evicted, dropped--> FREE
                      |                    |
                      +---- give back      +-- dropped while it is read: free when that has ended
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvrelay.mem_cache.errors import ConservationError
from kvrelay.mem_cache.storage.storage_pages import STORAGE
from kvrelay.wire.load import PoolCounts


@dataclass(eq=False, slots=True)
class StoredPage:
    """A page that a slot has."""

    key: bytes
    before: bytes
    """The key of the page before."""
    slot: int
    pins: int = 0
    """The number of operations that read it."""
    failed: bool = False
    """Whether it could not be read the last time."""


class StorageSlots:
    """The account of one folder's slots.

    Args:
        total: slots.
        page_size: tokens a page.
    """

    def __init__(self, total: int, page_size: int) -> None:
        self.total = total
        self.evicted = 0
        """The number of pages that were evicted to make room, so far."""
        self._page_size = page_size
        # Stacks; the lowest slot is taken first, so that segments are begun as late as possible.
        self._free = list(range(total))[::-1]
        self._writing: set[int] = set()
        # By the last use, the oldest first.
        self._pages: OrderedDict[bytes, StoredPage] = OrderedDict()
        self._following: dict[bytes, set[bytes]] = {}
        """The keys of the pages here that continue a page, by its key."""
        self._gone: dict[int, StoredPage] = {}
        """The pages that are no longer found but still read by operations, by their slots."""
        self._num_pinned = 0

    def __iter__(self) -> Iterator[StoredPage]:
        """Iterate over the pages that are found, the least recently used one first."""
        return iter(self._pages.values())

    def __len__(self) -> int:
        """The number of pages that are found."""
        return len(self._pages)

    def find(self, key: bytes) -> StoredPage | None:
        """Get the page of this hash, if it is here."""
        return self._pages.get(key)

    def use(self, keys: Iterable[bytes]) -> None:
        """Note that a row of pages was asked for. The first is kept longest, as all need it."""
        for key in reversed(list(keys)):
            if key in self._pages:
                self._pages.move_to_end(key)

    # Beginning

    def adopt(self, pages: Iterable[tuple[int, bytes, bytes]]) -> None:
        """Begin with these pages, each a slot, a key and that of the page before, oldest first.

        No slot and no key comes twice.
        """
        for slot, key, before in pages:
            self._add(StoredPage(key, before, slot))
        taken = {page.slot for page in self._pages.values()}
        self._free = [slot for slot in reversed(range(self.total)) if slot not in taken]

    # Writing

    def take(self, number: int) -> tuple[list[int], list[StoredPage]]:
        """Take up to `number` slots to write to, evicting the least recently used pages.

        Returns:
            The slots, and the evicted pages, whose slots may be among them.
        """
        evicted: list[StoredPage] = []
        while len(self._free) < number:
            page = next((page for page in self._pages.values() if not page.pins), None)
            if page is None:
                break
            evicted += self.drop(page)
        self.evicted += len(evicted)
        taken = [self._free.pop() for _ in range(min(number, len(self._free)))]
        self._writing.update(taken)
        return taken, evicted

    def publish(self, slot: int, key: bytes, before: bytes) -> None:
        """Give a slot that was taken this page, so that it is found. Its hash must not be here."""
        assert key not in self._pages, "a page is kept twice"
        self._writing.remove(slot)
        self._add(StoredPage(key, before, slot))

    def give_back(self, slot: int) -> None:
        """Free a slot that was taken and has no page."""
        self._writing.remove(slot)
        self._free.append(slot)

    # Reading

    def pin(self, page: StoredPage) -> None:
        """Note that an operation reads a page that is found, so that its slot stays."""
        assert self._pages.get(page.key) is page, "a page is read that nobody finds"
        self._num_pinned += not page.pins
        page.pins += 1

    def unpin(self, page: StoredPage) -> None:
        """End one `pin`; frees the slot of a page that was dropped meanwhile."""
        page.pins -= 1
        if page.pins:
            return
        if self._gone.pop(page.slot, None) is None:
            self._num_pinned -= 1
        else:
            self._free.append(page.slot)

    # Removing

    def drop(self, page: StoredPage) -> list[StoredPage]:
        """Make a page and its continuations unfindable. Returns those that were found."""
        return self.drop_all([page.key]) if self._pages.get(page.key) is page else []

    def drop_all(self, keys: Iterable[bytes]) -> list[StoredPage]:
        """Drop the pages of these hashes, whether or not they are here, and their continuations."""
        todo, dropped = list(keys), []
        while todo:
            key = todo.pop()
            todo += self._following.get(key, ())
            page = self._pages.get(key)
            if page is not None:
                dropped.append(page)
                self._remove(page)
        return dropped

    # Counts and checks

    def counts(self) -> PoolCounts:
        """Count the slots by state."""
        return PoolCounts(
            pool=STORAGE,
            page_size=self._page_size,
            total=self.total,
            free=len(self._free),
            held=0,
            cached_evictable=len(self._pages) - self._num_pinned,
            cached_protected=self._num_pinned,
            session=0,
            quarantined=0,
            promised=0,
            in_flight=len(self._writing) + len(self._gone),
        )

    def check(self) -> None:
        """Raise `ConservationError` if a slot was lost or is counted twice. O(1)."""
        counts = self.counts()
        if counts.accounted != self.total or counts.cached_evictable < 0:
            raise ConservationError(f"{counts.accounted} of {self.total} slots: {counts}")

    # Inside

    def _add(self, page: StoredPage) -> None:
        self._pages[page.key] = page
        self._following.setdefault(page.before, set()).add(page.key)

    def _remove(self, page: StoredPage) -> None:
        del self._pages[page.key]
        following = self._following[page.before]
        following.remove(page.key)
        if not following:
            del self._following[page.before]
        if page.pins:
            self._num_pinned -= 1
            self._gone[page.slot] = page
        else:
            self._free.append(page.slot)
