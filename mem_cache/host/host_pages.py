"""The pages of the host pool: the owner of each, and the hash by which it is found.

A page here holds one page's KV of all the device's pools without a window. It has the same number
in each of the host's pools for them. It is named by its page hash (`wire/page_hash.py`), and is
kept only as long as the page before it.

So the pages found begin with a prompt's first page, and a forgotten page takes all that continue it
along. Its KV in a window's pool has an account of its own (`host_windows.py`), and goes with it at
the latest. `host_slots.py` has the life of its slot.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from kvrelay.mem_cache.errors import ConservationError
from kvrelay.mem_cache.host.host_page import HostPage, HostPageState, HostPart
from kvrelay.mem_cache.host.host_slots import HostSlots
from kvrelay.mem_cache.host.host_windows import HostWindow
from kvrelay.wire.load import PoolCounts

HOST = "host"
"""The pool's name: a label of its metrics."""


class HostPages:
    """The account of the host pool. Only the engine thread calls it.

    Args:
        total: pages.
        page_size: tokens a page.
        on_found: called with a page that is found from now on (True), or no longer (False).
        windows: the accounts of windows' pools, by the numbers of the device's.
    """

    def __init__(
        self,
        total: int,
        page_size: int,
        on_found: Callable[[HostPage, bool], None],
        windows: Mapping[int, HostWindow] = MappingProxyType({}),
    ) -> None:
        self.page_size = page_size
        self.windows = windows
        """The accounts of windows' pools, by the numbers of the device's."""
        self.evicted = 0
        """The number of pages that were evicted to make room, so far."""
        self.version = 0
        """A number that rises when something more can be found."""
        self._slots: HostSlots[HostPage] = HostSlots(HOST, total, page_size)
        self._on_found = on_found
        # By the last use, the oldest first. A page was used after all that continue it.
        self._pages: OrderedDict[bytes, HostPage] = OrderedDict()
        self._uses = 0

    @property
    def total(self) -> int:
        """The number of pages of the pool."""
        return self._slots.total

    def __iter__(self) -> Iterator[HostPage]:
        """Iterate over all pages that can be found."""
        return (page for page in self._pages.values() if page.state is HostPageState.CACHED)

    # Finding

    def get(self, key: bytes) -> HostPage | None:
        """Get the page of this hash, if it is here, or being written."""
        return self._pages.get(key)

    def num_known(self, keys: Sequence[bytes]) -> int:
        """Count the first pages of a prompt that are here, or being written."""
        for number, key in enumerate(keys):
            if key not in self._pages:
                return number
        return len(keys)

    def find(self, keys: Sequence[bytes], tokens: Sequence[bytes]) -> list[HostPage]:
        """Find the longest row of named pages that can be read, from the first on."""
        found: list[HostPage] = []
        for key, own in zip(keys, tokens, strict=True):
            page = self._pages.get(key)
            if page is None or page.state is not HostPageState.CACHED or page.tokens != own:
                break
            found.append(page)
        if found:
            self.use(found[-1])
        return found

    def num_continuable(self, row: Sequence[HostPage]) -> int:
        """Count the pages of a row after which a prompt can continue with all its windows' parts.

        Examines no more than a window of a row that can be continued at its end.

        Args:
            row: found just now; the caller has the pages before its first one.
        """
        end, windows = len(row), self.windows.values()
        longest = max([window.behind for window in windows], default=0)
        for at in reversed(range(len(row))):
            if at < end - longest:
                break
            page = row[at]
            if not page.parts or any(
                at >= end - window.behind and window.part(page) is None for window in windows
            ):
                end = at
        return end

    def use(self, page: HostPage) -> None:
        """Note that a page and those before it were asked for, though the device may have them."""
        for one in page.path():
            self._pages.move_to_end(one.key)
            self._uses += 1
            one.used = self._uses

    # Writing

    def reserve(
        self, before: bytes | None, keys: Sequence[bytes], tokens: Sequence[bytes], place: int
    ) -> list[HostPage]:
        """Take pages for a row of hashes, the first ones if not all fit. They are not found yet.

        Evicts the least recently used pages.

        Args:
            before: the hash of the page before the first; it is here. None: there is none.
            keys: of pages that are not here.
            tokens: of each.
            place: of the first in its prompt.
        """
        parent = None if before is None else self._pages[before]
        free = self._slots.free
        number = min(len(keys), free + self._evict(len(keys) - free, parent))
        slots = self._slots.reserve(number)
        if parent is not None and number and parent.children:
            for window in self.windows.values():
                window.keep_behind(parent)
        taken = []
        for offset, slot in enumerate(slots):
            page = HostPage(keys[offset], tokens[offset], place + offset, slot, parent)
            assert page.key not in self._pages, "a page is written twice"
            self._pages[page.key] = page
            if parent is not None:
                parent.children.add(page)
            taken.append(page)
            parent = page
        if parent is not None:
            self.use(parent)
        return taken

    def _evict(self, number: int, keep: HostPage | None) -> int:
        """Evict up to `number` pages that nothing reads or continues. Returns how many."""
        evicted: list[HostPage] = []
        while len(evicted) < number and (page := self._slots.queue.pop()) is not None:
            if page is keep:
                continue
            self._take_out(page)
            self._may_go_now(page.parent)
            evicted.append(page)
        self._may_go_now(keep)
        self._slots.drop(evicted)
        self.evicted += len(evicted)
        return len(evicted)

    def end_write(self, pages: Sequence[HostPage], num_valid: int) -> None:
        """End a copy: let its first `num_valid` pages be found, and free the others.

        Pages that were forgotten meanwhile are freed, not found.
        """
        valid = [page for page in pages[:num_valid] if page.state is HostPageState.WRITING]
        self._slots.end_write(valid)
        for page in valid:
            self._on_found(page, True)
        for page in pages[num_valid:]:
            self._remove_subtree(page)
        self._slots.end_gone([page for page in pages if page.state is HostPageState.GONE])
        self.version += 1

    def end_window_write(self, pool: int, parts: Sequence[HostPart], valid: Sequence[bool]) -> None:
        """End a copy of parts, after `end_write` for its pages: let its valid parts be read."""
        self.windows[pool].end_write(parts, valid)
        self.version += 1

    # Reading

    def pin(self, pages: Iterable[HostPage]) -> None:
        """Note that a copy or a peer reads these pages, so that they stay."""
        self._slots.pin(pages)

    def unpin(self, pages: Iterable[HostPage]) -> None:
        """End one `pin`; frees pages that were forgotten meanwhile and have no other reader."""
        self._slots.unpin(pages)

    # Forgetting

    def forget(self, key: bytes) -> int:
        """Make a page and its continuations unfindable. Returns how many they are."""
        page = self._pages.get(key)
        return 0 if page is None else self._remove_subtree(page)

    def _remove_subtree(self, top: HostPage) -> int:
        """Take out a page and its continuations. Pages that copies use are freed when these end."""
        if top.state is HostPageState.GONE:
            return 0
        removed = list(top.subtree())
        for page in removed:
            self._take_out(page)
        self._slots.drop(removed)
        self._may_go_now(top.parent)
        return len(removed)

    # Counts and checks

    def pool_counts(self) -> tuple[PoolCounts, ...]:
        """List the counts of the pool, and of each window's pool."""
        return (self.counts(), *(window.counts() for window in self.windows.values()))

    def counts(self) -> PoolCounts:
        """Count the pages by state."""
        return self._slots.counts()

    def check(self) -> None:
        """Raise `ConservationError` if a page was lost or is counted twice. O(1)."""
        self._slots.check()
        for window in self.windows.values():
            window.check()

    def check_pages(self) -> None:
        """Run `check`, and check each page by itself. For tests and debugging.

        Raises:
            ConservationError: names the page.
        """
        self._slots.check_each(list(self._pages.values()))
        for page in self._pages.values():
            parent = page.parent
            if parent is not None and self._pages.get(parent.key) is not parent:
                raise ConservationError(f"host page {page.slot} continues one that is not here")
        for window in self.windows.values():
            window.check_parts(self._pages.values())

    # Inside

    def _take_out(self, page: HostPage) -> None:
        """Make a page and its parts unfindable; its slot keeps its owner."""
        del self._pages[page.key]
        for pool, part in list(page.parts.items()):
            self.windows[pool].drop(part)
        if page.parent is not None:
            page.parent.children.discard(page)
        if page.state is HostPageState.CACHED:
            self._on_found(page, False)

    def _may_go_now(self, page: HostPage | None) -> None:
        """Queue a page for eviction, if it has no continuation any more."""
        if page is not None:
            self._slots.queue.push(page)
