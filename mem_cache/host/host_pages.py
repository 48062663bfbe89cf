"""The pages of the host pool: who owns each, and by which hash it is found.

A page here holds what one page holds in every pool of the device without a window together, and has
the same number in each of the host's pools for them. It is named by its page hash
(`wire/page_hash.py`), and is kept only as long as the page before it is: so what is found begins
with a prompt's first page, and what was forgotten takes along all that continues it. What it holds
in a window's pool has an account of its own (`host_windows.py`), and goes with it at the
latest. The life of its slot is told in `host_slots.py`.
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
    """The account of the host pool. The engine thread alone calls it.

    Args:
        total: pages.
        page_size: tokens a page.
        on_found: called with a page that is found from now on (True), or no more (False).
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
        """Pages that were evicted to make room, so far."""
        self.version = 0
        """Higher than before if something more can be found."""
        self._slots: HostSlots[HostPage] = HostSlots(HOST, total, page_size)
        self._on_found = on_found
        # By the last use, the oldest first. A page was used after all that continue it.
        self._pages: OrderedDict[bytes, HostPage] = OrderedDict()
        self._uses = 0

    @property
    def total(self) -> int:
        """Pages of the pool."""
        return self._slots.total

    def __iter__(self) -> Iterator[HostPage]:
        """All pages that can be found."""
        return (page for page in self._pages.values() if page.state is HostPageState.CACHED)

    # Finding

    def get(self, key: bytes) -> HostPage | None:
        """The page of this hash, if it is here, or being written."""
        return self._pages.get(key)

    def num_known(self, keys: Sequence[bytes]) -> int:
        """How many of a prompt's first pages are here, or being written."""
        for number, key in enumerate(keys):
            if key not in self._pages:
                return number
        return len(keys)

    def find(self, keys: Sequence[bytes], tokens: Sequence[bytes]) -> list[HostPage]:
        """The longest row of neighbours that can be read, of those named, from the first on."""
        found: list[HostPage] = []
        for key, own in zip(keys, tokens, strict=True):
            page = self._pages.get(key)
            if page is None or page.state is not HostPageState.CACHED or page.tokens != own:
                break
            found.append(page)
        if found:
            self._use(found[-1])
        return found

    def num_continuable(self, row: Sequence[HostPage]) -> int:
        """How many pages of a row can be continued behind: what is seen there of windows is here.

        Looks at no more than a window of a row that can be continued at its end.

        Args:
            row: found just now; whoever asks has what is before its first page.
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
        """A page, and those before it, were asked for, though the device may have them."""
        self._use(page)

    def _use(self, last: HostPage) -> None:
        for page in last.path():
            self._pages.move_to_end(page.key)
            self._uses += 1
            page.used = self._uses

    # Writing

    def reserve(
        self, before: bytes | None, keys: Sequence[bytes], tokens: Sequence[bytes], place: int
    ) -> list[HostPage]:
        """Take pages for the neighbours named, the first ones if not all fit. Nobody finds them.

        Evicts what was used longest ago.

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
            self._use(parent)
        return taken

    def _evict(self, number: int, keep: HostPage | None) -> int:
        """Evict up to `number` pages that nobody reads or continues; returns how many."""
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
        """A copy has ended: let its first `num_valid` pages be found, and free the others.

        Whatever was forgotten meanwhile is freed, not found.
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
        """A copy has ended, and its pages were told to `end_write`: let its valid parts be read."""
        self.windows[pool].end_write(parts, valid)
        self.version += 1

    # Reading

    def pin(self, pages: Iterable[HostPage]) -> None:
        """A copy or a peer reads these pages from now on: they stay."""
        self._slots.pin(pages)

    def unpin(self, pages: Iterable[HostPage]) -> None:
        """End one `pin`; frees what was forgotten meanwhile, and is read by nobody else."""
        self._slots.unpin(pages)

    # Forgetting

    def forget(self, key: bytes) -> int:
        """Let nobody find a page any more, nor what continues it; returns how many they are."""
        page = self._pages.get(key)
        return 0 if page is None else self._remove_subtree(page)

    def _remove_subtree(self, top: HostPage) -> int:
        """Take a page out, and what continues it. What copies use is freed when they end."""
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
        """The counts of the pool, and of each window's."""
        return (self.counts(), *(window.counts() for window in self.windows.values()))

    def counts(self) -> PoolCounts:
        """How many pages are in each state."""
        return self._slots.counts()

    def check(self) -> None:
        """Raise `ConservationError` if a page was lost or is counted twice. O(1)."""
        self._slots.check()
        for window in self.windows.values():
            window.check()

    def check_pages(self) -> None:
        """`check`, and each page by itself. For tests and debugging.

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
        """Let nobody find a page, nor its parts; its slot stays its owner's."""
        del self._pages[page.key]
        for pool, part in list(page.parts.items()):
            self.windows[pool].drop(part)
        if page.parent is not None:
            page.parent.children.discard(page)
        if page.state is HostPageState.CACHED:
            self._on_found(page, False)

    def _may_go_now(self, page: HostPage | None) -> None:
        """What continued a page may be gone."""
        if page is not None:
            self._slots.queue.push(page)
