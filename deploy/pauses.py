"""Waits before something is tried again."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Final

_FIRST_SECONDS: Final = 0.1
_LONGEST_SECONDS: Final = 10.0


class Pauses:
    """Each pause is twice as long as the one before, up to a limit.

    They begin with the shortest again once there was none for as long as the longest.
    """

    def __init__(self) -> None:
        self._next = _FIRST_SECONDS
        self._ended = -math.inf

    async def pause(self) -> None:
        """Sleep before the next try."""
        if time.monotonic() - self._ended > _LONGEST_SECONDS:
            self._next = _FIRST_SECONDS
        await asyncio.sleep(self._next)
        self._next = min(2 * self._next, _LONGEST_SECONDS)
        self._ended = time.monotonic()
