"""Signals to workers' processes, as an operator, the kernel or a bad day sends them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from contextlib import suppress

from tests.chaos.cluster import ChaosCluster, wake

KINDS = ("SIGKILL", "SIGKILL", "SIGTERM", "SIGSTOP", "SIGSTOP for a time")
LONGEST_STOP_SECONDS = 4.0


class Signals:
    """Sends signals to random workers; a role may lose all of its workers at once."""

    def __init__(self, chaos: ChaosCluster, rng: random.Random) -> None:
        self._chaos = chaos
        self._rng = rng
        self._waking: set[asyncio.Task[None]] = set()

    async def send_one(self) -> str:
        """Send one; returns which, or why none was sent."""
        workers = sorted(self._chaos.cluster.workers.values(), key=lambda one: one.name)
        if not workers:
            return "nobody to signal"
        worker, kind = self._rng.choice(workers), self._rng.choice(KINDS)
        number = getattr(signal, kind.split()[0])
        with suppress(ProcessLookupError):
            os.kill(worker.pid, number)
        if kind == "SIGSTOP for a time":
            seconds = self._rng.uniform(0.5, LONGEST_STOP_SECONDS)
            task = asyncio.create_task(self._wake_after(worker.pid, seconds))
            self._waking.add(task)
            task.add_done_callback(self._waking.discard)
        return kind

    async def settle(self) -> None:
        """Wait until everybody who was stopped for a time goes on."""
        await asyncio.gather(*self._waking)

    async def _wake_after(self, pid: int, seconds: float) -> None:
        await asyncio.sleep(seconds)
        wake(pid)
