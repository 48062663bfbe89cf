"""A wake-up of coroutines that wait for a change."""

from __future__ import annotations

import asyncio


class Notifier:
    """A condition that wakes all waiting coroutines, like `asyncio.Condition` without a lock.

    A notification is not stored: look at the state, then call `wait` with no
    `await` in between. For one event loop only.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[float, asyncio.Future[None]]] = []

    def notify_all(self) -> None:
        """Wake all who wait now, by their places."""
        waiting, self._waiting = self._waiting, []
        for _, one in sorted(waiting, key=lambda waiter: waiter[0]):
            if not one.done():  # its coroutine may have been cancelled
                one.set_result(None)

    def wait(self, place: float = 0.0) -> asyncio.Future[None]:
        """Return a future that is done after the next notification.

        Args:
            place: the place in line; those with lower ones are woken first.
        """
        notified = asyncio.get_running_loop().create_future()
        self._waiting.append((place, notified))
        return notified
