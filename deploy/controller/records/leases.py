"""The leases that a controller gives to workers, and its own: when each is surely over."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.engine.worker.worker_lease import Renewal, boottime
from kvrelay.router.notifier import Notifier


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """The durations of leases; the same for all controllers of a cluster."""

    worker_seconds: float
    """The duration of a worker's lease, from the stamp that its renewal carries."""
    controller_seconds: float
    """The duration of a controller's lease.

    It counts from when it asked the store whether it still is the latest.
    """

    @property
    def margin_seconds(self) -> float:
        """The allowance for clocks that differ in rate, and for work that has just begun."""
        return 1 + (self.worker_seconds + self.controller_seconds) / 10


class Leases:
    """The leases that one controller has given, and those that its predecessors may have given.

    All times are the caller's, of one clock. A renewal carries a stamp that the worker made before
    the renewal was *asked for* here. So it lets the worker serve for at most `worker_seconds` from
    then, however late it is sent. A controller makes no renewal after its own lease is over, so its
    successor knows the latest possible time of one.

    Args:
        epoch: this controller's epoch, from the store.
        times: the durations of leases.
        began: the time when the store had answered that the epoch is this controller's.
        clock: the clock from which callers take their times.
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
        """Extend the controller's lease: when asked at this time, the store knew no later one."""
        self._held_at = max(self._held_at, asked_at)
        self._held.notify_all()

    def give_up(self) -> None:
        """Renew nothing any more, because a later controller has begun."""
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
        """Return the renewal to send to a worker; None if this controller's own lease is over.

        Args:
            incarnation: the worker's incarnation.
            stamp: the latest stamp that the worker has sent, on its own clock; None: it has sent
                none.
            now: the time.
        """
        if not self.is_held(now):
            return None
        self._asked[incarnation] = max(now, self._asked.get(incarnation, -math.inf))
        return Renewal(self.epoch, self.times.worker_seconds, stamp)

    def heard(self, incarnation: str, now: float) -> None:
        """Note that a worker has started: its first lease had begun by now."""
        self._asked[incarnation] = max(now, self._asked.get(incarnation, -math.inf))

    def over_at(self, incarnation: str) -> float:
        """Return the time from which an incarnation does not serve, if its lease is not renewed."""
        ours = self._asked.get(incarnation, -math.inf) + self.times.worker_seconds
        return max(ours, self._predecessors_end) + self.times.margin_seconds

    def is_over(self, incarnation: str) -> bool:
        """Return whether an incarnation will never serve again, even if its process still runs.

        The store must have said after `over_at` that there was no later controller, which could
        have renewed the lease.
        """
        return not self._given_up and self._held_at >= self.over_at(incarnation)

    async def until_over(self, incarnation: str) -> None:
        """Wait until `is_over`, which only an answer of the store can make true."""
        while not self.is_over(incarnation):
            await self._held.wait()

    def forget(self, incarnation: str) -> None:
        """Forget an incarnation whose death is confirmed."""
        self._asked.pop(incarnation, None)
