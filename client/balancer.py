"""The choice of a router for each call: one that has not failed lately, and has few calls."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

FIRST_PAUSE_SECONDS: Final = 0.1
MOST_PAUSE_SECONDS: Final = 5.0


@dataclass(slots=True)
class _Router:
    calls: int = 0
    """Open calls."""
    failures: int = 0
    """Failures in a row."""
    not_before: float = 0.0
    """The time on the clock before which the router is not called."""


class Balancer:
    """The routers of a cluster, as one client knows them; for any thread.

    Args:
        servers: ``HOST:PORT`` of each.
        clock: the time in seconds.
    """

    def __init__(self, servers: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        if not servers or len(set(servers)) < len(servers):
            raise ValueError(f"servers: one or more, each once, got {list(servers)}")
        self._routers = {server: _Router() for server in servers}
        self._clock = clock
        self._lock = threading.Lock()
        self.is_closed = False
        """Whether the client is closed: no call begins any more."""

    def choose(self) -> tuple[str, float]:
        """The router to call next, and the seconds until it may be called."""
        with self._lock:
            now = self._clock()

            def rank(server: str) -> tuple[float, int, float]:
                router = self._routers[server]
                wait = max(router.not_before - now, 0.0)
                return wait, router.calls, random.random()  # noqa: S311 (no secret)

            chosen = min(self._routers, key=rank)
            return chosen, max(self._routers[chosen].not_before - now, 0.0)

    def begin(self, server: str) -> None:
        """Note that a call begins."""
        with self._lock:
            self._routers[server].calls += 1

    def end(self, server: str) -> None:
        """Note that a call has ended, however it did."""
        with self._lock:
            self._routers[server].calls -= 1

    def answered(self, server: str) -> None:
        """Note that a router has sent a good answer."""
        with self._lock:
            self._routers[server].failures = 0

    def failed(self, server: str, retry_seconds: float | None) -> None:
        """Note that a call has failed and may pass later.

        The router is not called again before the time that it asks for; else the pause doubles with
        each failure. Calls that fail during the pause belong to the same outage, which counts once.
        """
        with self._lock:
            router, now = self._routers[server], self._clock()
            is_known = now < router.not_before
            if retry_seconds is None:
                if is_known:
                    return
                pause = min(FIRST_PAUSE_SECONDS * 2**router.failures, MOST_PAUSE_SECONDS)
                retry_seconds = pause * random.uniform(0.5, 1)  # noqa: S311 (no secret)
            if not is_known:
                router.failures = min(router.failures + 1, 10)
            router.not_before = max(router.not_before, now + retry_seconds)
