"""The account of one window's pool on the host: which pages of the host have their part there.

A window sees of a prefix what lies before its end. So a page of the host may have its part of a
window or not, and a part has an owner, a state and an end of its own::

    FREE --reserve--> WRITING --end_write--> CACHED --evicted, or its page is--> FREE
                         |                      |
                         +- its page is gone ---+--> GONE --its copies have ended--> FREE

A part is evicted by itself: its page stays. First those that a prompt has *passed*: pages behind
them are here, and its end does not see them. Then what was used longest ago. So a long prompt takes
the room of its own beginning, and not that of the other prompts' ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

from kvrelay.mem_cache.account import Owner, PageAccount
from kvrelay.mem_cache.errors import ConservationError
from kvrelay.mem_cache.host_eviction import HostEvictionQueue
from kvrelay.mem_cache.host_page import HostPage, HostPageState, HostPart
from kvrelay.wire.load import PoolCounts


class HostWindow:
    """Parts of pages in one window's pool of the host. `HostPages` and `HostTier` alone change it.

    Args:
        pool: its number among the device's pools.
        name: a label of its metrics.
        total: parts.
        page_size: tokens a page.
        behind: pages that a token sees of this window at the start of a page; at least one.
    """

    def __init__(self, pool: int, name: str, total: int, page_size: int, behind: int) -> None:
        assert behind > 0, "a window of one token sees no page"
        self.behind = behind
        self._pool = pool
        self._name = name
        self._page_size = page_size
        self._account = PageAccount(name, total)
        self._queue: HostEvictionQueue[HostPart] = HostEvictionQueue()
        # In the order in which they were passed.
        self._passed: dict[HostPart, None] = {}
        self._uses = 0
        self._gone: set[HostPart] = set()
        # Counted apart from the owners of pages, so that the one proves the other.
        self._cached = self._pinned = self._in_flight = 0

    @property
    def total(self) -> int:
        """Parts that it has room for."""
        return self._account.total

    def part(self, page: HostPage) -> HostPart | None:
        """A page's part, if it can be read."""
        part = page.parts.get(self._pool)
        return part if part is not None and part.state is HostPageState.CACHED else None

    def parts(self, pages: Sequence[HostPage]) -> tuple[HostPart, ...]:
        """The parts of pages that all have one."""
        return tuple(page.parts[self._pool] for page in pages)

    # Writing

    def reserve(self, pages: Sequence[HostPage]) -> list[HostPart]:
        """Take room for the parts of neighbours, of the last ones if not all fit.

        Evicts others; nobody reads what is taken until `end_write`.

        Args:
            pages: in order; none has a part here.
        """
        free = self._account.by_owner[Owner.FREE]
        number = min(len(pages), free + self._evict(len(pages) - free))
        slots = self._account.allocate((("write to host", number),), Owner.IN_FLIGHT)
        self._in_flight += number
        taken = []
        for page, slot in zip(pages[len(pages) - number :], slots.tolist(), strict=True):
            assert self._pool not in page.parts, "a part is written twice"
            part = page.parts[self._pool] = HostPart(page, slot)
            taken.append(part)
        self.use(taken)
        if taken:
            self._pass_before(taken[-1].page)
        return taken

    def end_write(self, parts: Sequence[HostPart], valid: Sequence[bool]) -> None:
        """A copy has ended: let what is valid be read, and free the rest.

        A part whose page is gone meanwhile is freed.
        """
        for part, is_valid in zip(parts, valid, strict=True):
            if part.state is HostPageState.WRITING and not is_valid:
                self.drop(part)
        found = [part for part in parts if part.state is HostPageState.WRITING]
        self._move(found, Owner.IN_FLIGHT, Owner.INDEX)
        self._cached += len(found)
        self._in_flight -= len(found)
        for part in found:
            part.state = HostPageState.CACHED
            self._queue.push(part)
        self._end_gone([part for part in parts if part.state is HostPageState.GONE])

    # Reading

    def use(self, parts: Sequence[HostPart]) -> None:
        """These were asked for, or written: they go after all others, and are not passed now."""
        for part in parts:
            self._passed.pop(part, None)
            self._uses += 1
            part.used = self._uses

    def pin(self, parts: Iterable[HostPart]) -> None:
        """A copy reads these parts from now on: they stay."""
        for part in parts:
            assert part.state is HostPageState.CACHED, "a part is read that is not written"
            self._pinned += not part.pins
            part.pins += 1

    def unpin(self, parts: Iterable[HostPart]) -> None:
        """End one `pin`; frees those whose page is gone, and that nobody else reads."""
        ended = []
        for part in parts:
            part.pins -= 1
            if part.pins:
                continue
            if part.state is HostPageState.GONE:
                ended.append(part)
            else:
                self._pinned -= 1
                self._queue.push(part)
        self._end_gone(ended)

    # Leaving

    def drop(self, part: HostPart) -> None:
        """Take a part from its page. It is freed when the copies that use it have ended."""
        was_cached = part.state is HostPageState.CACHED
        self._take_out(part)
        if was_cached and not part.pins:
            self._move([part], Owner.INDEX, Owner.FREE)
            self._cached -= 1
            return
        self._gone.add(part)
        if was_cached:
            self._move([part], Owner.INDEX, Owner.IN_FLIGHT)
            self._cached -= 1
            self._pinned -= 1
            self._in_flight += 1

    def _evict(self, number: int) -> int:
        """Evict up to `number` parts that nobody reads; returns how many."""
        evicted = 0
        while evicted < number and (part := self._next_to_go()) is not None:
            self.drop(part)
            evicted += 1
        return evicted

    def _next_to_go(self) -> HostPart | None:
        passed = next((part for part in self._passed if part.may_go), None)
        return self._queue.pop() if passed is None else passed

    def _pass_before(self, last: HostPage) -> None:
        """Mark as passed what a token behind `last` does not see of its prompt.

        Not beyond a page where prompts part: others will come that go on there.
        """
        for number, page in enumerate(last.path()):
            if len(page.children) > 1:
                return
            if number < self.behind:
                continue
            part = page.parts.get(self._pool)
            if part is None or part in self._passed:
                return
            self._passed[part] = None

    def keep_behind(self, page: HostPage) -> None:
        """Prompts part behind a page from now on: what is seen there was not passed after all."""
        for one in islice(page.path(), self.behind):
            if (part := one.parts.get(self._pool)) is not None:
                self._passed.pop(part, None)

    def _take_out(self, part: HostPart) -> None:
        """Let nobody find a part; its slot stays its owner's."""
        del part.page.parts[self._pool]
        self._passed.pop(part, None)
        part.state = HostPageState.GONE

    def _end_gone(self, parts: Sequence[HostPart]) -> None:
        self._gone.difference_update(parts)
        self._move(parts, Owner.IN_FLIGHT, Owner.FREE)
        self._in_flight -= len(parts)

    def _move(self, parts: Sequence[HostPart], source: Owner, target: Owner) -> None:
        self._account.move(((self._name, len(parts)),), _slots(parts), source, target)

    # Counts and checks

    def counts(self) -> PoolCounts:
        """How many parts are in each state."""
        return PoolCounts(
            pool=self._name,
            page_size=self._page_size,
            total=self.total,
            free=self._account.by_owner[Owner.FREE],
            held=0,
            cached_evictable=self._cached - self._pinned,
            cached_protected=self._pinned,
            session=0,
            quarantined=0,
            promised=0,
            in_flight=self._in_flight,
        )

    def check(self) -> None:
        """Raise `ConservationError` if a part was lost or is counted twice. O(1)."""
        counts, owners = self.counts(), self._account.by_owner
        if counts.accounted != self.total or owners[Owner.INDEX] != self._cached:
            raise ConservationError(f"{counts.accounted} of {self.total}, {owners}: {counts}")

    def check_parts(self, pages: Iterable[HostPage]) -> None:
        """`check`, and each part by itself. For tests and debugging.

        Args:
            pages: all that are found, or being written.

        Raises:
            ConservationError: names the part.
        """
        self.check()
        parts = [page.parts[self._pool] for page in pages if self._pool in page.parts]
        found = [part for part in parts if part.state is HostPageState.CACHED]
        writing = [part for part in parts if part.state is HostPageState.WRITING]
        self._account.check_owner(_slots(found), Owner.INDEX)
        self._account.check_owner(_slots([*writing, *self._gone]), Owner.IN_FLIGHT)
        slots = [*_slots([*parts, *self._gone]), *self._account.free_pages]
        if sorted(slots) != list(range(self.total)):
            raise ConservationError(f"of {self.total} of {self._name} are owned: {sorted(slots)}")
        for part in parts:
            if part.may_go and not part.is_queued:
                raise ConservationError(f"{self._name} {part.slot} would never be evicted")
        if not set(parts).issuperset(self._passed):
            raise ConservationError(f"{self._name}: a part that is gone would be evicted")


def _slots(parts: Iterable[HostPart]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array([part.slot for part in parts], np.int32)
