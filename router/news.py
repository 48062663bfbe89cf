"""Waking those who wait for something to change."""

from __future__ import annotations

import asyncio


class News:
    """Wakes every waiter at each announcement; costs nothing between them.

    Announcements are not stored: whoever waits must have looked at the state
    before, with no `await` in between. For one event loop only.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def announce(self) -> None:
        """Wakes everyone who waits now."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def next(self) -> None:
        """Returns after the next announcement."""
        await self._event.wait()
