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


class WorkInProgress:
    """The pieces of work that were handed to a thread, which does them in order. Any thread."""

    def __init__(self) -> None:
        self._tokens: deque[int] = deque()
        self._since = 0.0
        self._lock = threading.Lock()

    def begin(self, tokens: int) -> None:
        """A piece of work of this size is handed over."""
        with self._lock:
            if not self._tokens:
                self._since = time.monotonic()
            self._tokens.append(tokens)

    def end(self) -> None:
        """The oldest piece has ended."""
        with self._lock:
            self._tokens.popleft()
            self._since = time.monotonic()

    @property
    def oldest(self) -> OldestWork | None:
        """The oldest piece; None: there is nothing to do."""
        with self._lock:
            if not self._tokens:
                return None
            return OldestWork(time.monotonic() - self._since, self._tokens[0])
