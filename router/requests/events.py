"""The events that a reader of a live request gets, and what they are made of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvrelay.wire.output import PhaseTimings, SampledToken


class FinishReason(StrEnum):
    """Why a choice is complete; a request's `outcome` metric label is that of its first."""

    STOP = "stop"
    """End of sequence, a stop token or a stop string."""
    LENGTH = "length"
    """max_tokens."""
    ABORT = "abort"
    """Abort, or the last reader went away."""


@dataclass(slots=True)  # not frozen: see `RequestOutput`
class Delta:
    """Tokens of a choice that came since its last delta, and text that is safe to show."""

    index: int
    """Position of the first token in the output."""
    tokens: tuple[SampledToken, ...]
    text: str
    choice: int = 0
    prompt_logprobs: tuple[SampledToken, ...] = ()
    """Of tokens of the prompt, in order; on deltas of their own before the first token."""


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """Why a choice is complete."""

    finish_reason: FinishReason
    matched_stop: int | str | None
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
    history_digest: str = ""
    """Of a session's turn: of its history, this turn included."""


Event = Delta | Completion
