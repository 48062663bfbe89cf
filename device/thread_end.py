"""How long the end of a worker waits for its threads: device, disk and NIXL may hang for ever."""

from __future__ import annotations

import threading
import time
from typing import Final, Protocol

CLOSE_SECONDS: Final = 7.0
"""For all threads together. Less than a supervisor gives the worker's whole end, which would kill
the process in the midst of it."""
LEAST_SECONDS: Final = 0.1
"""For each thread, though another one has used up the time."""


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
    """What is left for a thread until a moment of `time.monotonic`, or the least."""
    return max(ends_at - time.monotonic(), LEAST_SECONDS)


def ended_within(thread: threading.Thread, seconds: float) -> bool:
    """Wait for the end of a thread, but not for longer; returns whether it has ended."""
    thread.join(seconds)
    return not thread.is_alive()
