"""What a reader of a live request is told."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position of the output."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The most likely tokens, best first."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token of the output."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class PhaseTimings:
    """Seconds a request spent in each phase."""

    queue: float = 0.0
    prefill: float = 0.0
    transfer: float = 0.0
    decode: float = 0.0

    def merged(self, other: PhaseTimings) -> PhaseTimings:
        """Each phase as whoever knows it says.

        The larger one, not the sum: a worker reports zero for a phase that is
        not its own and may report its own more than once.
        """
        return PhaseTimings(
            queue=max(self.queue, other.queue),
            prefill=max(self.prefill, other.prefill),
            transfer=max(self.transfer, other.transfer),
            decode=max(self.decode, other.decode),
        )


class FinishReason(StrEnum):
    """Why a request is complete; also its value of the `outcome` metric label."""

    STOP = "stop"
    """End of sequence, a stop token or a stop string."""
    LENGTH = "length"
    """max_tokens."""
    ABORT = "abort"
    """Abort, or the last reader went away."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens that came since the last delta, and text that is safe to show."""

    index: int
    """Position of the first token in the output."""
    tokens: tuple[Token, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Completion:
    """The last event of a request that did not fail."""

    finish_reason: FinishReason
    matched: int | str | None
    """The token id or the string that stopped it."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timings: PhaseTimings
    seed: int


Event = Delta | Completion
