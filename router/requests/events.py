"""The events that a reader of a live request gets, and their parts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvrelay.wire.output import PhaseTimings, SampledToken


class FinishReason(StrEnum):
    """The reason why a choice is complete; the first choice's is the request's `outcome` label."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """The limit max_tokens."""
    ABORT = "abort"
    """A call of Abort, or the loss of the last reader."""


@dataclass(slots=True)  # not frozen: see `RequestOutput`
class Delta:
    """A choice's tokens since its last delta, and the text that is safe to show."""

    index: int
    """The position of the first token in the output."""
    tokens: tuple[SampledToken, ...]
    text: str
    choice: int = 0
    prompt_logprobs: tuple[SampledToken, ...] = ()
    """Scores of prompt tokens, in order; on deltas of their own before the first token."""


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """The end of a complete choice."""

    finish_reason: FinishReason
    matched_stop: int | str | None
    """The token id or the string that stopped the choice."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The last event of a request that did not fail."""

    choices: tuple[ChoiceEnd, ...]
    prompt_tokens: int
    completion_tokens: int
    """Output tokens of all choices together."""
    cached_tokens: int
    timings: PhaseTimings
    seed: int
    history_digest: str = ""
    """The digest of the session's history, this turn included; empty: no turn of a session."""


Event = Delta | Completion
