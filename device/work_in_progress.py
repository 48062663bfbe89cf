"""What a thread works on, and for how long: a thread that hangs is found by it."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import NamedTuple


class OldestWork(NamedTuple):
    """The piece of work that a thread is at."""

    seconds: float
    """Since it was handed over, or since the one before it ended, if that was later."""
    tokens: int
    """Its size."""
    number: int
    """Its own, if it has one."""


class WorkInProgress:
    """The pieces of work that were handed to a thread, which does them in order. Any thread."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[int, int]] = deque()
        """The tokens and the number of each."""
        self._since = 0.0
        self._lock = threading.Lock()

    def begin(self, tokens: int, number: int = 0) -> None:
        """A piece of work of this size is handed over; its number tells it from others."""
        with self._lock:
            if not self._pieces:
                self._since = time.monotonic()
            self._pieces.append((tokens, number))

    def end(self) -> None:
        """The oldest piece has ended."""
        with self._lock:
            self._pieces.popleft()
            self._since = time.monotonic()

    @property
    def count(self) -> int:
        """The pieces that have not ended."""
        with self._lock:
            return len(self._pieces)

    @property
    def oldest(self) -> OldestWork | None:
        """The oldest piece; None: there is nothing to do."""
        with self._lock:
            if not self._pieces:
                return None
            return OldestWork(time.monotonic() - self._since, *self._pieces[0])
