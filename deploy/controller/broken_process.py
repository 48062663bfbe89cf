"""The end of a process that can supervise workers no longer."""

from __future__ import annotations

import logging
import os
from typing import Final

BROKEN: Final = 74
"""The exit status; Ray takes it for a crash, and starts another controller."""


def end_broken_process() -> None:
    """End this process at once: nobody renews the leases of its workers any more.

    A detached controller's next process takes the workers over; those of `kvrelay serve` end.
    """
    logging.shutdown()
    os._exit(BROKEN)
