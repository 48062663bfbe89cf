"""The tier below the host: pages of the host pool go to a store, and come back to the host.

*Storing* copies pages that the host is likely to evict: the least recently used ones, while less
than half of the host pool is free. Pages that were asked for again are copied at once. It holds the
pages while they are read, and nothing waits for it.

*Prefetching* brings the pages of a prompt that the host lacks into its pool, as far as the store
has them. From then on they are found there, and go to the device like all pages of the host.

The engine thread calls everything here; the end of an order is passed to `finish`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from kvrelay.mem_cache.counts import TierCounts
from kvrelay.mem_cache.host.host_page import HostPage, HostPageState
from kvrelay.mem_cache.host.host_pages import HostPages
from kvrelay.mem_cache.host.tier_speed import TierSpeed
from kvrelay.mem_cache.storage.storage_orders import (
    Fetch,
    Forget,
    LookUp,
    StorageEnded,
    StorageStream,
    Store,
)
from kvrelay.mem_cache.storage.storage_pages import (
    MOST_PAGES,
    NOTHING_BEFORE,
    RETRY_SECONDS,
    StoragePage,
    StoreState,
)
from kvrelay.wire.load import PoolCounts

ORDER_BYTES: Final = 8 << 20
"""The most bytes of one order: a prefetch that is given up ends with its running order."""
MOST_STORES: Final = 2
"""The most orders to store at a time."""
MOST_FETCHES: Final = 2
"""The most prompts at a time whose pages are on their way to the host. With `MOST_STORES` there are
no more orders than a store takes at a time, so that look-ups do not wait behind them."""
MOST_LOOKS: Final = 16
"""The most look-ups at a time."""
HANG_SECONDS: Final = 1.0
"""Seconds without an answer after which storage gets no more orders until it answers."""
_TRIES: Final = 64
"""The candidates examined in one pass: most may be stored, or evicted, already."""


@dataclass(eq=False, slots=True)
class Prefetch:
    """The pages of a prompt that are brought from the store to the host."""

    keys: Sequence[bytes]
    """The hashes of the prompt's whole pages."""
    tokens: Sequence[bytes]
    """The tokens of each page."""
    is_worth: Callable[[int, int], bool]
    """A function that tells whether to fetch pages: the place of the first one, and their
    number."""
    num_here: int = 0
    """The number of the prompt's pages that the host had when the store was asked."""
    num_found: int = 0
    """The number of pages that host and store have together; 0: not known yet."""
    wanted: int = 0
    """The number of requests that want it; 0: no further order begins."""
    ended_at: float | None = None
    """The moment when all its pages had come to the host, by the tier's clock; None: not yet."""

    @property
    def ended(self) -> bool:
        """Whether all its pages have come to the host."""
        return self.ended_at is not None


@dataclass(frozen=True, slots=True)
class _Ordered:
    """Pages that are on their way to the host."""

    prefetch: Prefetch
    pages: list[HostPage]


class StorageTier:
    """The tier that stores pages of the host pool, and brings them back to it.

    Args:
        pages: the account of the host pool.
        page_bytes: of one page, over all pools.
        stream: carries orders out.
        speed: of reads from the store.
        state: of the store.
        clock: seconds.
    """

    def __init__(
        self,
        pages: HostPages,
        page_bytes: int,
        stream: StorageStream,
        speed: TierSpeed,
        state: StoreState,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = TierCounts()
        """The tier's counts so far."""
        self.state = state
        """The latest known state of the store."""
        self.speed = speed
        self._pages = pages
        self._page_bytes = page_bytes
        self._stream = stream
        self._clock = clock
        self._retry_at = 0.0
        self._numbers = count(1)
        self._most_pages = max(1, min(MOST_PAGES, ORDER_BYTES // page_bytes))
        self._asked_again: deque[HostPage] = deque(maxlen=max(1024, pages.total))
        """Pages to store at once, each with those before it."""
        self._by_age: deque[HostPage] = deque(maxlen=max(1024, pages.total))
        """Pages to store while the host is short of pages."""
        self._stores: dict[int, list[HostPage]] = {}
        self._looks: dict[int, Prefetch] = {}
        self._fetches: dict[int, _Ordered] = {}
        self._waiting: deque[Prefetch] = deque()
        """Prefetches whose pages were found, but that have not begun."""
        self._asked: dict[int, float] = {}
        """The time of each order of a look-up or a fetch; the oldest first."""

    # To the store

    def offer(self, page: HostPage) -> None:
        """Offer a page that is new on the host."""
        if not page.stored:
            self._by_age.append(page)

    def write_back(self) -> None:
        """Store the pages that wait for it, unless the store takes none."""
        if self.state.write_error and self._clock() < self._retry_at:
            return
        while len(self._stores) < MOST_STORES and (pages := self._take_batch()):
            self._pages.pin(pages)
            number = next(self._numbers)
            self._stores[number] = pages
            self._stream.start(Store(number, list(map(_storage_page, pages))))

    def _take_batch(self) -> list[HostPage]:
        """Take pages that are not stored, each after the one that it continues."""
        batch: list[HostPage] = []
        is_short = bool(self._by_age) and self._is_short()
        for _ in range(_TRIES):
            queue = self._asked_again
            if not queue and is_short:
                queue = self._by_age
            if not queue or len(batch) >= self._most_pages:
                break
            page = queue.popleft()
            row, room = _not_stored(page), self._most_pages - len(batch)
            for one in row[:room]:
                one.stored = True
                batch.append(one)
            if len(row) > room:
                queue.appendleft(page)
        return batch

    def _is_short(self) -> bool:
        counts = self._pages.counts()
        return 2 * counts.free < counts.total

    def _end_store(self, pages: list[HostPage], ended: StorageEnded) -> None:
        there = set(ended.found)
        counts = self.counts
        for page in pages:
            page.stored = page.key in there
            counts.written_pages += page.stored
            counts.dropped_pages += not page.stored
        self._pages.unpin(pages)
        counts.write_bytes += len(there) * self._page_bytes
        counts.write_seconds += ended.seconds

    def forget(self, keys: Sequence[bytes]) -> None:
        """Make the store drop these pages and their continuations."""
        self._stream.start(Forget(next(self._numbers), keys))

    # From the store

    def prefetch(
        self,
        keys: Sequence[bytes],
        tokens: Sequence[bytes],
        is_worth: Callable[[int, int], bool],
    ) -> Prefetch | None:
        """Begin to bring pages that the host lacks; None if it lacks none, or if storage hangs.

        The caller must call `leave` once, when it no longer wants the prefetch. If one that brings
        all of it runs already, that one is returned.

        As the prompt is asked for, the host's pages of it are used again, and are stored if they
        are not.

        Args:
            keys: the hashes of the prompt's whole pages.
            tokens: of each.
            is_worth: see `Prefetch`.
        """
        for running in self._running():
            if running.keys[: len(keys)] == keys:
                if self._has_all(keys):
                    return None
                running.wanted += 1
                return running
        if self.hangs or len(self._looks) >= MOST_LOOKS:
            return None
        prefetch = Prefetch(keys, tokens, is_worth)
        number = next(self._numbers)
        self._looks[number] = prefetch
        self._asked[number] = self._clock()
        self._stream.start(LookUp(number, keys))
        if self._pages.num_known(keys) == len(keys):
            return None
        prefetch.wanted = 1
        return prefetch

    def _has_all(self, keys: Sequence[bytes]) -> bool:
        """Whether the host has all of these pages, and none is still being written."""
        pages = map(self._pages.get, keys)
        return all(page is not None and page.state is HostPageState.CACHED for page in pages)

    @property
    def hangs(self) -> bool:
        """Whether storage has not answered for so long that no request should wait for it."""
        oldest = next(iter(self._asked.values()), None)
        return oldest is not None and self._clock() - oldest > HANG_SECONDS

    def _running(self) -> list[Prefetch]:
        """List the prefetches that have not ended."""
        fetching = [one.prefetch for one in self._fetches.values()]
        return [*self._looks.values(), *self._waiting, *fetching]

    def leave(self, prefetch: Prefetch) -> None:
        """Note that one request left it. After the last one, only pages on their way still come."""
        prefetch.wanted -= 1

    def _end(self, prefetch: Prefetch) -> None:
        prefetch.ended_at = self._clock()

    def _end_look(self, prefetch: Prefetch, ended: StorageEnded) -> None:
        there = set(ended.found)
        self._note_stored(prefetch.keys, there)
        last = first = self._pages.num_known(prefetch.keys)
        while last < len(prefetch.keys) and prefetch.keys[last] in there:
            last += 1
        if last == first or not prefetch.wanted:
            self._end(prefetch)
        elif not prefetch.is_worth(first, last - first):
            self.counts.slow_loads += 1
            self._end(prefetch)
        else:
            prefetch.num_here, prefetch.num_found = first, last
            self._waiting.append(prefetch)

    def _note_stored(self, keys: Sequence[bytes], there: Container[bytes]) -> None:
        """Note which of the host's pages of a prompt are stored; queue others to be stored."""
        lacking = last = None
        for key in keys:
            page = self._pages.get(key)
            if page is None or page.state is not HostPageState.CACHED:
                break
            if not page.pins:  # else it may just be written
                page.stored = key in there
            last, lacking = page, lacking if page.stored else page
        if last is not None:
            self._pages.use(last)
        if lacking is not None:
            self._asked_again.append(lacking)

    def _fetch_more(self) -> None:
        """Begin waiting prefetches, as many as may begin now."""
        while self._waiting and len(self._fetches) < MOST_FETCHES:
            prefetch = self._waiting.popleft()
            if not self._fetch(prefetch):
                self._end(prefetch)

    def _fetch(self, prefetch: Prefetch) -> bool:
        """Order the next pages of a prompt. Returns False if there are none, or no room."""
        keys, first = prefetch.keys, self._pages.num_known(prefetch.keys)
        last = min(prefetch.num_found, first + self._most_pages)
        if not prefetch.wanted or first >= last:
            return False
        before = keys[first - 1] if first else None
        pages = self._pages.reserve(before, keys[first:last], prefetch.tokens[first:last], first)
        if not pages:
            return False
        for page in pages:
            page.stored = True
        number = next(self._numbers)
        self._fetches[number] = _Ordered(prefetch, pages)
        self._asked[number] = self._clock()
        self._stream.start(Fetch(number, list(map(_storage_page, pages))))
        return True

    def _end_fetch(self, ordered: _Ordered, ended: StorageEnded) -> None:
        pages, there = ordered.pages, set(ended.found)
        num_valid = next((at for at, p in enumerate(pages) if p.key not in there), len(pages))
        self._pages.end_write(pages, num_valid)
        counts, nbytes = self.counts, num_valid * self._page_bytes
        counts.loaded_pages += num_valid
        counts.load_bytes += nbytes
        counts.load_seconds += ended.seconds
        if num_valid == len(pages):
            self.speed.observe(nbytes, ended.seconds)
            self._waiting.appendleft(ordered.prefetch)
        else:
            self._end(ordered.prefetch)

    # Both

    def finish(self, ended: StorageEnded) -> None:
        """Take the end of an order. Unknown ones, and second ends, are ignored."""
        self.state = ended.state
        self.counts.evicted_pages = ended.state.evicted_pages
        self.counts.broken_pages = ended.state.broken_pages
        self._asked.pop(ended.operation, None)
        if (stored := self._stores.pop(ended.operation, None)) is not None:
            self._end_store(stored, ended)
            if ended.state.write_error:
                self._retry_at = self._clock() + RETRY_SECONDS
        elif (looked := self._looks.pop(ended.operation, None)) is not None:
            self._end_look(looked, ended)
        elif (fetched := self._fetches.pop(ended.operation, None)) is not None:
            self._end_fetch(fetched, ended)
        self._fetch_more()

    def expected_seconds(self, pages: int) -> float:
        """Estimate the seconds until `pages` pages would have come, behind those ordered before."""
        fetching = [one.prefetch.num_found - one.pages[0].place for one in self._fetches.values()]
        waiting = [one.num_found - one.num_here for one in self._waiting]
        return self.speed.seconds((sum(fetching) + sum(waiting) + pages) * self._page_bytes)

    def pool_counts(self) -> tuple[PoolCounts, ...]:
        """List the account of the part of the store that this worker fills, if it keeps one."""
        return () if self.state.pool is None else (self.state.pool,)


def _not_stored(page: HostPage) -> list[HostPage]:
    """List a page and those before it that are not stored, in order; none if one cannot be read."""
    row: list[HostPage] = []
    for one in page.path():
        if one.stored:
            break
        row.append(one)
    return row[::-1] if all(one.state is HostPageState.CACHED for one in row) else []


def _storage_page(page: HostPage) -> StoragePage:
    before = NOTHING_BEFORE if page.parent is None else page.parent.key
    return StoragePage(page.key, before, page.tokens, page.slot)
