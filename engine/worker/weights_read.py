"""The part of its weights that a starting worker has read."""

from __future__ import annotations

from kvrelay.engine.config import WorkerConfig


class WeightsRead:
    """The bytes that one thread has read, for other threads to see.

    Args:
        total_bytes: the bytes to read.
    """

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._read_bytes = 0

    def add(self, nbytes: int) -> None:
        """Count bytes that were read."""
        self._read_bytes += nbytes

    @property
    def share(self) -> float:
        """The share from 0 to 1; files also have headers, so it may stay a little below 1."""
        return min(1.0, self._read_bytes / self._total_bytes) if self._total_bytes else 0.0


def weight_bytes(config: WorkerConfig) -> int:
    """Sum the sizes of the model's files, and of the draft model's if there is one."""
    folders = [config.model_path, config.draft_model_path]
    return sum(
        file.stat().st_size
        for folder in folders
        if folder is not None
        for file in folder.glob("*.safetensors")
    )
