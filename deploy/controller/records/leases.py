"""The leases that a controller gives to workers, and its own: when are they surely over?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.engine.worker.worker_lease import Renewal, boottime
from kvrelay.router.notifier import Notifier


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """How long leases last; the same for all controllers of a cluster."""

    worker_seconds: float
    """A worker's, from the stamp that its renewal carries."""
    controller_seconds: float
    """A controller's, from when it asked the store whether it still is the latest."""

    @property
    def margin_seconds(self) -> float:
        """For clocks that run at different rates, and for what a thread has just begun."""
        return 1 + (self.worker_seconds + self.controller_seconds) / 10


class Leases:
    """What one controller may promise, and what it must take others to have promised.

    It reads no clock: times are the caller's, of one clock. A renewal that is *asked for* here at
    some time lets the worker serve until `worker_seconds` later at most, however late it is sent:
    it carries a stamp that the worker made earlier. A controller asks for none when its own lease
    is over, so its successor knows when the last one was.

    Args:
        epoch: of this controller, from the store.
        times: how long leases last.
        began: when the store had answered that the epoch is this controller's.
        clock: where callers have their times from.
    """

    def __init__(
        self,
        epoch: int,
        times: LeaseTimes,
        *,
        began: float,
        clock: Callable[[], float] = boottime,
    ) -> None:
        self.epoch = epoch
        self.clock = clock
        self.times = times
        self._held_at = began
        self._given_up = False
        self._held = Notifier()
        self._asked: dict[str, float] = {}
        # The first controller has no predecessor who could have promised anything.
        self._predecessors_end = (
            -math.inf if epoch == 1 else began + times.controller_seconds + times.worker_seconds
        )

    def hold(self, asked_at: float) -> None:
        """The store says that no later controller had begun, and was asked at this time."""
        self._held_at = max(self._held_at, asked_at)
        self._held.notify_all()

    def give_up(self) -> None:
        """A later controller has begun: renew nothing any more."""
        self._given_up = True

    @property
    def is_given_up(self) -> bool:
        """Whether there is a later controller."""
        return self._given_up

    def is_held(self, now: float) -> bool:
        """Whether this controller may renew leases."""
        return not self._given_up and now < self._held_at + self.times.controller_seconds

    async def until_held(self) -> None:
        """Wait until this controller may act; for ever if it has a successor."""
        while not self.is_held(self.clock()):
            await self._held.wait()

    def renew(self, incarnation: str, stamp: float | None, now: float) -> Renewal | None:
        """What to send to a worker, whose latest answer was this stamp; None: nothing.

        Args:
            incarnation: the worker's.
            stamp: on the worker's clock, from an answer that has arrived; None: it has not said
                one.
            now: the time.
        """
        if not self.is_held(now):
            return None
        self._asked[incarnation] = max(now, self._asked.get(incarnation, -math.inf))
        return Renewal(self.epoch, self.times.worker_seconds, stamp)

    def heard(self, incarnation: str, now: float) -> None:
        """A worker has started: its first lease had begun by now."""
        self._asked[incarnation] = max(now, self._asked.get(incarnation, -math.inf))

    def over_at(self, incarnation: str) -> float:
        """From when on an incarnation does not serve, if nobody renews its lease before."""
        ours = self._asked.get(incarnation, -math.inf) + self.times.worker_seconds
        return max(ours, self._predecessors_end) + self.times.margin_seconds

    def is_over(self, incarnation: str) -> bool:
        """Whether an incarnation will never serve again, whatever has become of its process.

        The store must have said after `over_at` that there was no later controller, who could
        have renewed the lease.
        """
        return not self._given_up and self._held_at >= self.over_at(incarnation)

    async def until_over(self, incarnation: str) -> None:
        """Wait until `is_over`, which only an answer of the store can make true."""
        while not self.is_over(incarnation):
            await self._held.wait()

    def forget(self, incarnation: str) -> None:
        """An incarnation's death is confirmed."""
        self._asked.pop(incarnation, None)
