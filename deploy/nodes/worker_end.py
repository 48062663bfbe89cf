"""Why a worker's process ended, as far as its controller has learnt."""

from __future__ import annotations

from enum import StrEnum

from kvrelay.mem_cache.errors import ConservationError


class WorkerEnd(StrEnum):
    """The value is a label of metrics."""

    DRAINED = "drained"
    """It had drained."""
    CONSERVATION = "conservation"
    """It found its account of memory wrong: pages were lost, or had two owners."""
    ENGINE_FAILED = "engine_failed"
    """Its engine, its transfer agent or its forwards failed."""
    SILENT = "silent"
    """It did not answer for too long, so it was killed."""
    LOST = "lost"
    """It ended, or was out of reach until its lease was over, and nobody said why."""

    @classmethod
    def of_failure(cls, reason: str) -> WorkerEnd:
        """The cause behind what `Worker.failed` returns, which begins with the error's name."""
        error, _, _ = reason.partition(":")
        return cls.CONSERVATION if error == ConservationError.__name__ else cls.ENGINE_FAILED
