"""The result of placement: the workers for an attempt, or the one that is missing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvrelay.router.placement.ranking import Candidate
from kvrelay.wire.worker_info import WorkerRole


class Reason(StrEnum):
    """Why an attempt's prompt is computed where it is."""

    NO_CHOICE = "no_choice"
    """The only place: no other worker that can take the prompt is ready.

    A cluster without any prefill worker serves so.
    """
    MODE = "mode"
    """Decode workers compute no prompts: `--placement disaggregated`."""
    SUSPECT = "suspect"
    """Earlier attempts have failed at the other place."""
    IDLE = "idle"
    """The decode worker has nothing to do."""
    SOONER = "sooner"
    """The first token is expected here sooner."""
    UNKNOWN = "unknown"
    """The workers' speeds are not known yet."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The workers for an attempt."""

    decode: Candidate
    """The worker that generates the output."""
    prefill: Candidate | None
    """The worker that computes the input and hands it over; None: `decode` computes it, too."""
    reason: Reason
    """Why this worker computes the input."""
    lent_tokens: int = 0
    """Tokens of the input that `prefill` has, or is expected to read from `decode`."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """The result when no workers can serve an attempt now."""

    missing: WorkerRole
    refusal: str = ""
    """Why a decode worker reads from no prefill worker, if that is the reason."""
