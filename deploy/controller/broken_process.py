"""The end of a process that can no longer supervise its workers."""

from __future__ import annotations

import logging
import os
from typing import Final

BROKEN: Final = 74
"""The exit status of such a process; Ray takes it for a crash and starts another controller."""


def end_broken_process() -> None:
    """End this process at once, because nothing renews its workers' leases any more.

    A detached controller's next process takes the workers over; those of `kvrelay serve` end.
    """
    logging.shutdown()
    os._exit(BROKEN)
