"""The account of one window's pool on the host: the pages of the host that have parts there.

A window sees the last pages of a prefix. So a page of the host may have a part for a window or not.
A part has a slot, with an owner and an end of its own (`host_slots.py`). It is dropped with its
page at the latest.

A part is evicted by itself: its page stays. First come parts that a prompt has *passed*: pages
behind them are here, and its end does not see them. Then come the least recently used ones. So a
long prompt takes the room of its own beginning, and not that of other prompts' ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from kvrelay.mem_cache.errors import ConservationError
from kvrelay.mem_cache.host.host_page import HostPage, HostPageState, HostPart
from kvrelay.mem_cache.host.host_slots import HostSlots
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
        self._slots: HostSlots[HostPart] = HostSlots(name, total, page_size)
        # In the order in which they were passed.
        self._passed: dict[HostPart, None] = {}
        self._uses = 0

    @property
    def total(self) -> int:
        """The number of parts that it has room for."""
        return self._slots.total

    def part(self, page: HostPage) -> HostPart | None:
        """Get a page's part, if it can be read."""
        part = page.parts.get(self._pool)
        return part if part is not None and part.state is HostPageState.CACHED else None

    def parts(self, pages: Sequence[HostPage]) -> tuple[HostPart, ...]:
        """Get the parts of pages that all have one."""
        return tuple(page.parts[self._pool] for page in pages)

    # Writing

    def reserve(self, pages: Sequence[HostPage]) -> list[HostPart]:
        """Take room for the parts of pages in a row, of the last ones if not all fit.

        Evicts others. Nothing reads the new parts until `end_write`.

        Args:
            pages: in order; none has a part here.
        """
        free = self._slots.free
        number = min(len(pages), free + self._evict(len(pages) - free))
        slots = self._slots.reserve(number)
        taken = []
        for page, slot in zip(pages[len(pages) - number :], slots, strict=True):
            assert self._pool not in page.parts, "a part is written twice"
            part = page.parts[self._pool] = HostPart(page, slot)
            taken.append(part)
        self.use(taken)
        if taken:
            self._pass_before(taken[-1].page)
        return taken

    def end_write(self, parts: Sequence[HostPart], valid: Sequence[bool]) -> None:
        """End a copy: let its valid parts be read, and free the rest.

        A part whose page is gone meanwhile is freed.
        """
        for part, is_valid in zip(parts, valid, strict=True):
            if part.state is HostPageState.WRITING and not is_valid:
                self.drop(part)
        self._slots.end_write([part for part in parts if part.state is HostPageState.WRITING])
        self._slots.end_gone([part for part in parts if part.state is HostPageState.GONE])

    # Reading

    def use(self, parts: Sequence[HostPart]) -> None:
        """Note that these were asked for, or written: they go last, and are no longer passed."""
        for part in parts:
            self._passed.pop(part, None)
            self._uses += 1
            part.used = self._uses

    def pin(self, parts: Iterable[HostPart]) -> None:
        """Note that a copy reads these parts, so that they stay."""
        self._slots.pin(parts)

    def unpin(self, parts: Iterable[HostPart]) -> None:
        """End one `pin`; frees parts whose page is gone and that have no other reader."""
        self._slots.unpin(parts)

    # Leaving

    def drop(self, part: HostPart) -> None:
        """Take a part from its page. It is freed when the copies that use it have ended."""
        del part.page.parts[self._pool]
        self._passed.pop(part, None)
        self._slots.drop([part])

    def _evict(self, number: int) -> int:
        """Evict up to `number` parts that nothing reads. Returns how many."""
        evicted = 0
        while evicted < number and (part := self._next_to_go()) is not None:
            self.drop(part)
            evicted += 1
        return evicted

    def _next_to_go(self) -> HostPart | None:
        passed = next((part for part in self._passed if part.may_go), None)
        return self._slots.queue.pop() if passed is None else passed

    def _pass_before(self, last: HostPage) -> None:
        """Mark the parts of a prompt that a token behind `last` does not see as passed.

        It stops at a page where prompts branch, because other prompts will continue from there.
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
        """Unmark the parts that are seen behind a page, because prompts branch there now."""
        for one in islice(page.path(), self.behind):
            if (part := one.parts.get(self._pool)) is not None:
                self._passed.pop(part, None)

    # Counts and checks

    def counts(self) -> PoolCounts:
        """Count the parts by state."""
        return self._slots.counts()

    def check(self) -> None:
        """Raise `ConservationError` if a part was lost or is counted twice. O(1)."""
        self._slots.check()

    def check_parts(self, pages: Iterable[HostPage]) -> None:
        """Run `check`, and check each part by itself. For tests and debugging.

        Args:
            pages: all that are found, or being written.

        Raises:
            ConservationError: names the part.
        """
        parts = [page.parts[self._pool] for page in pages if self._pool in page.parts]
        self._slots.check_each(parts)
        if not set(parts).issuperset(self._passed):
            raise ConservationError(f"{self._slots.name}: a part that is gone would be evicted")
