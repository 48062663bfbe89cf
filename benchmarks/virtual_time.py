"""An event loop whose clock jumps from timer to timer: hours of waiting cost nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

_REAL_WAIT_SECONDS = 0.01


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time. Nothing that it waits for may be outside of it but threads.

    Args:
        threads_work: whether a thread is at work for it, so that the clock must stand still.
    """

    def __init__(self, threads_work: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self._now = 1000.0
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None) -> Any:
            if timeout and threads_work():
                return select(_REAL_WAIT_SECONDS)
            self._now += timeout or 0.0
            return []

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        """Virtual seconds."""
        return self._now
