"""How long this process may serve without a word from its controller."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_LONGEST_SLEEP_SECONDS: Final = 1.0
"""`sleep` does not count the time in which the machine is suspended; the lease does."""


def boottime() -> float:
    """Seconds on a clock that no step of the time of day moves, and no suspension stops."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def lease_clock(*, suspended_alone: bool) -> Callable[[], float]:
    """The clock of a worker's lease, on both sides, in seconds.

    Args:
        suspended_alone: whether the worker's machine may be suspended while its controller goes on,
            which then believes it dead. Where both are suspended, nobody misses a word meanwhile.
    """
    return boottime if suspended_alone else time.monotonic


@dataclass(frozen=True, slots=True)
class Renewal:
    """What a controller sends to let a worker go on."""

    epoch: int
    """The controller's: each one has a greater one than all before it."""
    seconds: float
    """How long the lease lasts, from the stamp on."""
    stamp: float | None
    """On the worker's clock: what the worker has said last, before this was sent.

    None: it has said nothing yet, so nothing is renewed.
    """


class StaleEpochError(Exception):
    """The caller is not the controller any more: the worker has heard from its successor."""

    def __init__(self, stale: int, current: int) -> None:
        super().__init__(stale, current)
        self.stale = stale
        self.current = current

    def __str__(self) -> str:
        return f"epoch {self.stale} is over: {self.current} has begun"


class WorkerLease:
    """The leave to serve that a worker has from its controller. Any thread may use it.

    It lasts a number of seconds from a stamp: a time on this process's clock that the process
    said before the controller sent the renewal. However long that took to arrive, the controller
    knows an upper bound for the lease's end, though the two clocks have nothing to do with each
    other.

    A lease that has run out stays so: the process may have been stopped for a while, and others
    may take it for dead. A lease that was never begun lasts for ever: nobody supervises the worker.

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
        """Let the lease last for so long from now, unless it is renewed.

        Args:
            seconds: from now.
            on_end: ends the process. Is called, perhaps by several threads, by who finds that the
                lease has run out.
        """
        self._on_end = on_end
        self._ends_at = self._clock() + seconds

    def stamp(self) -> float:
        """The present time, for the next renewal."""
        return self._clock()

    def renew(self, renewal: Renewal) -> None:
        """Take a renewal, which may be a late one.

        Raises StaleEpochError if a later controller than the sender has been heard of.
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
