"""The time that this process may serve without a word from its controller."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_LONGEST_SLEEP_SECONDS: Final = 1.0
"""The longest `sleep`, which does not count suspended time, while the lease does."""


def boottime() -> float:
    """Read a clock, in seconds, that neither suspension nor changes of the time of day affect."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def lease_clock(*, suspended_alone: bool) -> Callable[[], float]:
    """Choose the clock of a worker's lease, on both sides, in seconds.

    Args:
        suspended_alone: whether the worker's machine may be suspended while its controller goes on
            and believes it dead. If both are suspended together, no message is missed.
    """
    return boottime if suspended_alone else time.monotonic


@dataclass(frozen=True, slots=True)
class Renewal:
    """A message by which a controller lets a worker go on."""

    epoch: int
    """The controller's epoch, greater than that of every controller before it."""
    seconds: float
    """The length of the lease, from the stamp on."""
    stamp: float | None
    """The worker's latest stamp that the controller knew when it sent this, by the worker's clock.

    None: it has sent none yet, so nothing is renewed.
    """


class StaleEpochError(Exception):
    """An error for a caller that is no longer the controller: its successor was heard from."""

    def __init__(self, stale: int, current: int) -> None:
        super().__init__(stale, current)
        self.stale = stale
        self.current = current

    def __str__(self) -> str:
        return f"epoch {self.stale} is over: {self.current} has begun"


class WorkerLease:
    """The lease under which a worker may serve, given by its controller. For any thread.

    It lasts a number of seconds from a stamp. A stamp is a time on this process's clock, which the
    process sent before the controller sent the renewal. However late that arrives, the controller
    knows an upper bound of the lease's end. The two clocks need not agree.

    A lease that has run out stays so: the process may have been stopped, and others may believe it
    dead. A lease that was never begun lasts forever: nothing supervises the worker.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = boottime) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._epoch = 0
        self._ends_at = math.inf
        self._on_end: Callable[[], object] = lambda: None

    def begin(self, seconds: float, on_end: Callable[[], object]) -> None:
        """Begin the lease; it lasts `seconds` from now, unless it is renewed.

        Args:
            seconds: from now.
            on_end: ends the process. Every thread that finds that the lease has run out calls it.
        """
        self._on_end = on_end
        self._ends_at = self._clock() + seconds

    def stamp(self) -> float:
        """Return the present time, for the next renewal."""
        return self._clock()

    def renew(self, renewal: Renewal) -> None:
        """Take a renewal, which may be a late one.

        Raises StaleEpochError if a later controller has been heard from.
        """
        with self._lock:
            if renewal.epoch < self._epoch:
                raise StaleEpochError(renewal.epoch, self._epoch)
            self._epoch = renewal.epoch
            if not self._has_run_out() and renewal.stamp is not None:
                self._ends_at = max(self._ends_at, renewal.stamp + renewal.seconds)

    @property
    def has_run_out(self) -> bool:
        """Whether this process must not serve any more."""
        with self._lock:
            return self._has_run_out()

    def check(self) -> None:
        """End the process if the lease has run out. Call it before anything that serves others."""
        if self.has_run_out:
            self._on_end()

    def watch(self) -> None:
        """Wait until the lease has run out, and end the process. For a thread of its own."""
        while not self.has_run_out:
            time.sleep(min(max(self._ends_at - self._clock(), 0), _LONGEST_SLEEP_SECONDS))
        self._on_end()

    def _has_run_out(self) -> bool:
        return self._clock() >= self._ends_at
