"""Lets coroutines wait until something has changed."""

from __future__ import annotations

import asyncio


class Notifier:
    """Wakes all coroutines that wait when it is notified, as `asyncio.Condition`, without a lock.

    A notification is not stored: look at the state, then call `wait` with no
    `await` in between. For one event loop only.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify_all(self) -> None:
        """Wakes all who wait now."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self) -> None:
        """Returns after the next notification."""
        await self._event.wait()
