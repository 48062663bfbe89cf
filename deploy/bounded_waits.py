"""The waits between attempts, for something that may never come, and for work that must end."""

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
"""The number of looks at a task in the time that it may take."""


class Pauses:
    """Pauses between attempts, each twice as long as the one before, up to a limit.

    When there was no pause for as long as the limit, the next one is the shortest again.

    Args:
        longest_seconds: the limit.
    """

    def __init__(self, longest_seconds: float = LONGEST_SECONDS) -> None:
        self._longest = longest_seconds
        self._next = _FIRST_SECONDS
        self._ended = -math.inf

    async def pause(self) -> None:
        """Sleep before the next attempt."""
        if time.monotonic() - self._ended > self._longest:
            self._next = _FIRST_SECONDS
        await asyncio.sleep(self._next)
        self._next = min(2 * self._next, self._longest)
        self._ended = time.monotonic()


async def is_done_within(task: asyncio.Future[Any], seconds: float) -> bool:
    """Wait until a task is done, or this event loop has run for `seconds`; cancel nothing.

    Sometimes the loop cannot run, because its process was stopped or some code held the
    interpreter. Such a time counts as a tenth of `seconds` at most: an answer may have come that
    the loop could not read.
    """
    for _ in range(_LOOKS):
        await asyncio.wait({task}, timeout=seconds / _LOOKS)
        if task.done():
            return True
    return False


async def finished(work: Coroutine[Any, Any, T]) -> T:
    """Wait for the result of work that a cancellation of the caller must not cut short.

    The cancellation is raised after the work has ended, unless the work itself has raised an error.
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
