"""What a worker reports of a request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvrelay.router.events import PhaseTimings, Token


class EndReason(StrEnum):
    """Why a worker has nothing more to say of a request."""

    STOP = "stop"
    """Complete: end of sequence, a stop token or a stop string."""
    LENGTH = "length"
    """Complete: max_tokens."""
    ABORTED = "aborted"
    """Given up, as a rule because the router cancelled it."""
    HANDED_OVER = "handed_over"
    """The prefill side is done; the decode side goes on."""
    FAILED = "failed"
    """See the error."""


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """The end of a request on one worker."""

    reason: EndReason
    matched: int | str | None = None
    """The token id or the string that stopped it."""
    error: str = ""
    retryable: bool = False
    """Another attempt could complete it."""


@dataclass(frozen=True, slots=True)
class WorkerOutput:
    """What one engine step of one worker did for one request."""

    request_id: str
    attempt: int
    index: int
    """Position of the first token in the output."""
    tokens: tuple[Token, ...]
    timings: PhaseTimings
    end: WorkerEnd | None
    """Set on this worker's last output of the request."""
    cached_tokens: int = 0
    """Prompt tokens that the worker found in its prefix index."""
