"""Decides whether a prefill worker computes a prompt, or the decode worker itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from kvrelay.router.estimate import PromptQueue, tokens_ahead
from kvrelay.wire.speeds import NO_WORK, StepSpeeds, StepWork

_HAND_OVER_WORTH: Final = 1.25
"""An idle decode worker may take so many times as long as a prefill worker: nothing is handed over,
and nobody else waits."""

_DELAY_WEIGHT: Final = 0.1
"""A prompt may come a second later, so that requests that generate do not lose ten of theirs.
Without this a decode worker that is busy all the time gets prompts that cost throughput."""


class Reason(StrEnum):
    """Why an attempt's prompt is computed where it is."""

    NO_CHOICE = "no_choice"
    """No other worker that can take it is ready: this is how a cluster serves without any
    prefill worker."""
    MODE = "mode"
    """Decode workers compute no prompts: `--placement disaggregated`."""
    SUSPECT = "suspect"
    """Earlier attempts have failed where it would be computed else."""
    IDLE = "idle"
    """The decode worker has nothing to do."""
    SOONER = "sooner"
    """Its first token is expected there sooner."""
    UNKNOWN = "unknown"
    """Nothing is known of the workers' speeds yet."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two workers that may compute a prompt."""

    queue: PromptQueue
    cached_tokens: int = 0
    """Of the prompt, that its prefix index is expected to have."""
    num_requests: int = 0
    """That it has, running or waiting."""

    def own_tokens(self, tokens: int) -> int:
        """Those that it would have to compute of an input of so many."""
        return max(tokens - self.cached_tokens, 1)


@dataclass(frozen=True, slots=True)
class Decision:
    """Who computes a prompt."""

    by_decode: bool
    reason: Reason


def decide(tokens: int, prefill: Side, decode: Side, itl_target: float | None = None) -> Decision:
    """Let that worker compute a prompt which is expected to have its first token sooner.

    Beside requests that generate a decode worker computes small chunks only, so that these keep
    their pace: a long prompt takes long there. What these lose all the same counts a little, too.
    What a decode worker has not measured itself is taken to be as it is on the prefill worker.

    Args:
        tokens: of the input, one or more.
        prefill: the prefill worker that would be chosen.
        decode: the decode worker that generates in any case.
        itl_target: seconds that a step with prompts may take beside requests that generate;
            None: as follows from the speeds.
    """
    there_speeds = prefill.queue.load.speeds
    here_speeds = _filled_in(decode.queue.load.speeds, there_speeds)
    is_idle = not decode.num_requests
    if not (there_speeds.prompts_known and here_speeds.rows_known):
        return Decision(is_idle, Reason.IDLE if is_idle else Reason.UNKNOWN)
    there = _seconds(tokens, prefill, there_speeds)
    if is_idle:
        by_decode = _seconds(tokens, decode, here_speeds) <= _HAND_OVER_WORTH * there
        return Decision(by_decode, Reason.IDLE if by_decode else Reason.SOONER)
    here = _seconds_beside(tokens, decode, here_speeds, itl_target)
    here += _DELAY_WEIGHT * _delay_of_others(tokens, decode, here_speeds)
    return Decision(here < there, Reason.SOONER)


def _delay_of_others(tokens: int, side: Side, speeds: StepSpeeds) -> float:
    """Seconds that requests which generate lose to a prompt beside them, all together."""
    own = side.own_tokens(tokens)
    pairs = StepWork.of_prompt(own, tokens - own).prompt_pairs
    each = own * speeds.seconds_per_token + pairs * speeds.seconds_per_pair
    return side.queue.load.running_requests * each


def _filled_in(own: StepSpeeds, of_prefill: StepSpeeds) -> StepSpeeds:
    """The speeds of a decode worker, which may have computed no prompts yet."""
    if own.prompts_known:
        return own
    return replace(
        own,
        seconds_per_token=of_prefill.seconds_per_token,
        seconds_per_pair=of_prefill.seconds_per_pair,
    )


def _seconds_beside(tokens: int, side: Side, speeds: StepSpeeds, itl_target: float | None) -> float:
    """Expected seconds until the first token, in chunks beside those that generate."""
    load = side.queue.load
    generating = StepWork(rows=max(load.running_requests, 1), row_pairs=load.held_tokens)
    most = speeds.chunk_tokens or tokens
    backlog = sum(side.queue.by_size) + tokens
    chunk = speeds.most_tokens_beside(generating, tokens // 2, most, backlog, itl_target)
    return _seconds(tokens, side, replace(speeds, chunk_tokens=chunk), generating)


def _seconds(tokens: int, side: Side, speeds: StepSpeeds, generating: StepWork = NO_WORK) -> float:
    """Expected seconds until the first token, behind the prompts that come before it."""
    own = side.own_tokens(tokens)
    pairs = StepWork.of_prompt(own, tokens - own).prompt_pairs
    ahead = math.ceil(min(tokens_ahead(side.queue.by_size, own), side.queue.backlog_tokens))
    # They are taken to be as long as this one, and so to attend to as much each.
    pairs += ahead * pairs // own
    return speeds.seconds_of(replace(generating, prompt_tokens=own + ahead, prompt_pairs=pairs))
