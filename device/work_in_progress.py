"""The work that a thread is at, and for how long, by which a hanging thread is found."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import NamedTuple


class OldestWork(NamedTuple):
    """The piece of work that a thread is at."""

    seconds: float
    """The seconds since it was handed over, or since the previous piece ended, if that was
    later."""
    tokens: int
    """The size of the piece."""
    number: int
    """The number of the piece, if it has one."""


class WorkInProgress:
    """The pieces of work that were handed to a thread, which does them in order. For any thread."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[int, int]] = deque()
        """The tokens and the number of each piece."""
        self._since = 0.0
        self._lock = threading.Lock()

    def begin(self, tokens: int, number: int = 0) -> None:
        """Hand over a piece of work of this size; its number identifies it."""
        with self._lock:
            if not self._pieces:
                self._since = time.monotonic()
            self._pieces.append((tokens, number))

    def end(self) -> None:
        """Note that the oldest piece has ended."""
        with self._lock:
            self._pieces.popleft()
            self._since = time.monotonic()

    @property
    def count(self) -> int:
        """The number of pieces that have not ended."""
        with self._lock:
            return len(self._pieces)

    @property
    def oldest(self) -> OldestWork | None:
        """The oldest piece; None: there is nothing to do."""
        with self._lock:
            if not self._pieces:
                return None
            return OldestWork(time.monotonic() - self._since, *self._pieces[0])
