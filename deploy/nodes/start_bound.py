"""The time that a worker may take to start, which depends on the size of its weights."""

from __future__ import annotations

from typing import Final

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.worker.weights_read import weight_bytes

SLOWEST_BYTES_PER_SECOND: Final = 50e6
"""The lowest rate at which a usable disk reads weights."""


def start_seconds(config: WorkerConfig) -> float:
    """Return the time for a start: the option, plus reading all weights at that rate."""
    return config.start_timeout + weight_bytes(config) / SLOWEST_BYTES_PER_SECOND
