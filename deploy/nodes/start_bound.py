"""How long a worker may take to start: it depends on how much it has to read."""

from __future__ import annotations

from typing import Final

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.worker.weights_read import weight_bytes

SLOWEST_BYTES_PER_SECOND: Final = 50e6
"""At which weights come from a disk that still counts as usable."""


def start_seconds(config: WorkerConfig) -> float:
    """For a worker's start: the option, and the time to read all weights from a slow disk."""
    return config.start_timeout + weight_bytes(config) / SLOWEST_BYTES_PER_SECOND
