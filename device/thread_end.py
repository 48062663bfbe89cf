"""The time that a worker's end waits for its threads, as device, disk and NIXL may hang forever."""

from __future__ import annotations

import threading
import time
from typing import Final, Protocol

CLOSE_SECONDS: Final = 7.0
"""Seconds for all threads together. A supervisor gives the whole end of the worker more, and kills
the process after that."""
LEAST_SECONDS: Final = 0.1
"""Seconds for each thread, even if another one has used up the time."""


class Closable(Protocol):
    """A thread of a worker."""

    def close(self, seconds: float) -> None:
        """End it; give up what has not ended after `seconds`."""
        ...


def close_all(*threads: Closable | None) -> None:
    """Close threads one after the other, all within `CLOSE_SECONDS`. Blocks."""
    ends_at = time.monotonic() + CLOSE_SECONDS
    for thread in threads:
        if thread is not None:
            thread.close(seconds_until(ends_at))


def seconds_until(ends_at: float) -> float:
    """Compute the seconds left for a thread until a moment of `time.monotonic`, at the least."""
    return max(ends_at - time.monotonic(), LEAST_SECONDS)


def ended_within(thread: threading.Thread, seconds: float) -> bool:
    """Wait for the end of a thread, but not for longer. Returns whether it has ended."""
    thread.join(seconds)
    return not thread.is_alive()
