"""Waits: before something is tried again, for what may never come, and for what must be done."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")
_FIRST_SECONDS: Final = 0.1
LONGEST_SECONDS: Final = 10.0
_LOOKS: Final = 10
"""At what is waited for, in the time that it may take."""


class Pauses:
    """Each pause is twice as long as the one before, up to a limit.

    They begin with the shortest again once there was none for as long as the longest.

    Args:
        longest_seconds: the limit.
    """

    def __init__(self, longest_seconds: float = LONGEST_SECONDS) -> None:
        self._longest = longest_seconds
        self._next = _FIRST_SECONDS
        self._ended = -math.inf

    async def pause(self) -> None:
        """Sleep before the next try."""
        if time.monotonic() - self._ended > self._longest:
            self._next = _FIRST_SECONDS
        await asyncio.sleep(self._next)
        self._next = min(2 * self._next, self._longest)
        self._ended = time.monotonic()


async def is_done_within(task: asyncio.Future[Any], seconds: float) -> bool:
    """Wait for a task for as long as this event loop has run for `seconds`; cancels nothing.

    A time in which the loop did not run, because its process was stopped or some code held the
    interpreter, counts as a tenth of `seconds` at most: an answer may have come meanwhile that
    nobody could take.
    """
    for _ in range(_LOOKS):
        await asyncio.wait({task}, timeout=seconds / _LOOKS)
        if task.done():
            return True
    return False


async def finished(work: Coroutine[Any, Any, T]) -> T:
    """Wait for the result of work, which the cancellation of its caller does not cut short.

    The cancellation is raised then, unless the work has raised something itself.
    """
    task, cancelled = asyncio.create_task(work), None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result
