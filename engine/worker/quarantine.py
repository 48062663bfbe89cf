"""The limit on the time that memory may be in quarantine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvrelay.engine.scheduler.metrics import WorkerMetrics

_LOOKS = 10
"""How often the quarantine's age is checked within the limit."""


class QuarantineLimit:
    """The longest time that memory may be in quarantine.

    A fence that has not passed for so long will not pass, so the memory is lost until the worker is
    restarted.

    Args:
        metrics: knows the age of the quarantine, as of the engine's latest pass.
        seconds: the longest time in quarantine; 0: no limit.
        run_a_pass: returns after the engine has run a whole pass, or a part of one.
    """

    def __init__(
        self, metrics: WorkerMetrics, seconds: float, run_a_pass: Callable[[], Awaitable[None]]
    ) -> None:
        self._metrics = metrics
        self._seconds = seconds
        self._run_a_pass = run_a_pass

    async def exceeded(self) -> None:
        """Wait until memory is in quarantine for too long, which may be never."""
        if not self._seconds:
            await asyncio.Event().wait()
        while True:
            await asyncio.sleep(self._seconds / _LOOKS)
            if await self.is_exceeded():
                return

    async def is_exceeded(self) -> bool:
        """Whether memory is in quarantine for too long now."""
        if self._metrics.quarantine_age > self._seconds:
            # The first pass may be a part of one; the second is whole and finds passed fences.
            await self._run_a_pass()
            await self._run_a_pass()
        return self._metrics.quarantine_age > self._seconds
