"""What a worker reports of a request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvrelay.router.events import PhaseTimings, Token, TokenLogprobs


class EndReason(StrEnum):
    """Why a worker has nothing more to say of a choice."""

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
    RETRACTED = "retracted"
    """Its memory went to others: to be submitted again, with what it has emitted."""


class FailureReason(StrEnum):
    """Why an attempt is over before its end, and another one may do better."""

    WORKER_LOST = "worker_lost"
    ABORTED = "aborted"
    """A worker gave it up, unasked."""
    PEER_LOST = "peer_lost"
    """The hand-over's stream broke."""
    PEER_FAILED = "peer_failed"
    READ_FAILED = "read_failed"
    PAGE_MISMATCH = "page_mismatch"
    """Other bytes were read than were computed."""
    TRANSFER_REFUSED = "transfer_refused"
    """The transport between the two is too slow, or does not work."""
    PROTOCOL_ERROR = "protocol_error"
    """A hand-over message came where it may not."""
    FAILED = "failed"
    """The worker did not say why."""


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """The end of a choice on one worker."""

    reason: EndReason
    matched: int | str | None = None
    """The token id or the string that stopped it."""
    error: str = ""
    retryable: bool = False
    """Another attempt could complete it."""
    cause: FailureReason | None = None
    """Of a retryable failure; None: the worker did not say."""


@dataclass(frozen=True, slots=True)
class WorkerOutput:
    """What one engine step of one worker did for one choice of a request."""

    request_id: str
    attempt: int
    index: int
    """Position of the first token in the output."""
    tokens: tuple[Token, ...]
    timings: PhaseTimings
    end: WorkerEnd | None
    """Set on this worker's last output of the choice."""
    cached_tokens: int = 0
    """Prompt tokens that the worker found in its prefix index."""
    choice: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt's tokens but the first; from whoever computed it, with its last chunk."""
