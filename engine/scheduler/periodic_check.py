"""A check that the engine's loop makes from time to time."""

from __future__ import annotations

import time

CHECKS_IN_TIMEOUT = 3
"""How often peers are checked within the timeout after which a silent one is given up."""


class PeriodicCheck:
    """A timer that tells the loop, which asks every pass, when a check is due.

    Args:
        seconds: between two checks.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.next_at = time.monotonic() + seconds
        """The moment when the check is due next, by `time.monotonic`."""

    def is_due(self, now: float) -> bool:
        """Whether to make the check now; if so, the next one is due later."""
        if now < self.next_at:
            return False
        self.next_at = now + self._seconds
        return True
