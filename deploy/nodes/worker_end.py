"""The cause of the end of a worker's process, as far as its controller knows it."""

from __future__ import annotations

from enum import StrEnum

from kvrelay.mem_cache.errors import ConservationError


class WorkerEnd(StrEnum):
    """The causes; each value is a label of metrics."""

    DRAINED = "drained"
    """The worker had drained."""
    CONSERVATION = "conservation"
    """The worker found its account of memory wrong: pages were lost, or had two owners."""
    ENGINE_FAILED = "engine_failed"
    """The worker's engine, its transfer agent or its forward passes failed."""
    SILENT = "silent"
    """The worker did not answer for too long, so it was killed."""
    LOST = "lost"
    """The process ended, or was unreachable until its lease was over; the cause is not known."""

    @classmethod
    def of_failure(cls, reason: str) -> WorkerEnd:
        """Return the cause behind the text of `Worker.failed`, which begins with the error."""
        error, _, _ = reason.partition(":")
        return cls.CONSERVATION if error == ConservationError.__name__ else cls.ENGINE_FAILED
