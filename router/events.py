"""What a reader of a live request is told."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position of the output, or of the prompt."""

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

    def plus(self, other: PhaseTimings) -> PhaseTimings:
        """Each phase of one attempt, and of another after it."""
        return PhaseTimings(
            queue=self.queue + other.queue,
            prefill=self.prefill + other.prefill,
            transfer=self.transfer + other.transfer,
            decode=self.decode + other.decode,
        )


class FinishReason(StrEnum):
    """Why a choice is complete; a request's `outcome` metric label is that of its first."""

    STOP = "stop"
    """End of sequence, a stop token or a stop string."""
    LENGTH = "length"
    """max_tokens."""
    ABORT = "abort"
    """Abort, or the last reader went away."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens of a choice that came since its last delta, and text that is safe to show."""

    index: int
    """Position of the first token in the output."""
    tokens: tuple[Token, ...]
    text: str
    choice: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt's tokens but the first; on the first delta of all alone."""


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """Why a choice is complete."""

    finish_reason: FinishReason
    matched: int | str | None
    """The token id or the string that stopped it."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The last event of a request that did not fail."""

    choices: tuple[ChoiceEnd, ...]
    prompt_tokens: int
    completion_tokens: int
    """Of all choices together."""
    cached_tokens: int
    timings: PhaseTimings
    seed: int


Event = Delta | Completion
