"""A rotation of callers: the turns for work of which little runs at a time."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class _Waiter:
    """A caller's work that waits for its turn."""

    def __init__(self, caller: str, size: int) -> None:
        self.caller = caller
        self.size = size
        self.turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """True: it may begin; False: it was dropped for another caller's work."""


class FairTurns:
    """A queue in which callers take turns. Call it on one event loop.

    Whoever has waited longest since its last turn is next, and of its work the oldest. While the
    sizes of all work are over a bound, the newest of the caller with the most is dropped.

    Args:
        at_once: the most work that runs at a time.
        most: the most of all sizes together; a single work may have more.
    """

    def __init__(self, at_once: int, most: int) -> None:
        self._free = at_once
        self._most = most
        self._waiting: OrderedDict[str, deque[_Waiter]] = OrderedDict()  # by caller
        self._sizes: dict[str, int] = {}  # of the work that waits, by caller
        self.held = 0
        """The sizes of all work that runs or waits."""

    @asynccontextmanager
    async def turn(
        self, caller: str, size: int, full: Callable[[], Exception]
    ) -> AsyncIterator[None]:
        """A context in which the work runs; see `begin`."""
        await self.begin(caller, size, full)
        try:
            yield
        finally:
            self.end(size)

    async def begin(self, caller: str, size: int, full: Callable[[], Exception]) -> None:
        """Return when the work may begin; whoever calls it calls `end` later.

        Raises what `full` makes if there is no room for the work, also if it is dropped while it
        waits.
        """
        if self.held and not self._make_room(caller, size):
            raise full()
        self.held += size
        if self._free:
            self._free -= 1
            return
        waiter = _Waiter(caller, size)
        self._waiting.setdefault(caller, deque()).append(waiter)
        self._sizes[caller] = self._sizes.get(caller, 0) + size
        try:
            may_begin = await waiter.turn
        except asyncio.CancelledError:
            if waiter.turn.cancelled():
                self._remove(waiter)
                self.held -= size
            elif waiter.turn.result():  # its turn has come at the same time
                self.end(size)
            raise
        if not may_begin:
            raise full()

    def end(self, size: int) -> None:
        """End work that has begun; the next caller's turn has come."""
        self.held -= size
        while self._waiting:
            caller, own = next(iter(self._waiting.items()))
            waiter = own[0]
            self._remove(waiter)
            if own:
                self._waiting.move_to_end(caller)
            if not waiter.turn.done():  # it may have been cancelled just now
                waiter.turn.set_result(True)
                return
        self._free += 1

    def _make_room(self, caller: str, size: int) -> bool:
        """Drop waiting work of callers who have more than this one would; return if that does."""
        sizes, missing = dict(self._sizes), self.held + size - self._most
        waiting = {one: iter(reversed(queue)) for one, queue in self._waiting.items()}
        dropped: list[_Waiter] = []
        while missing > 0:
            greedy = max(sizes, key=sizes.__getitem__, default=caller)
            if greedy == caller or sizes[greedy] <= sizes.get(caller, 0) + size:
                return False  # so nobody's is dropped for nothing
            last = next(waiting[greedy])
            sizes[greedy] -= last.size
            if not last.turn.done():  # else it counts until its caller notices
                missing -= last.size
                dropped.append(last)
        for one in dropped:
            self._remove(one)
            self.held -= one.size
            one.turn.set_result(False)
        return True

    def _remove(self, waiter: _Waiter) -> None:
        own = self._waiting.get(waiter.caller)
        if own is None or waiter not in own:
            return
        own.remove(waiter)
        self._sizes[waiter.caller] -= waiter.size
        if not own:
            del self._waiting[waiter.caller], self._sizes[waiter.caller]
