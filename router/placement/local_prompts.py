"""The choice of a prompt's place: a prefill worker, or the decode worker itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from kvrelay.pacing.chunk_size import (
    NO_TARGETS,
    LatencyTargets,
    WaitingPrompts,
    choose_chunk_tokens,
    count_backlog,
)
from kvrelay.router.placement.chosen import Reason
from kvrelay.router.placement.estimate import ExpectedPrompts, most_tokens_ahead
from kvrelay.wire.speeds import NO_WORK, StepSpeeds, StepWork

_HAND_OVER_WORTH: Final = 1.25
"""The most time of an idle decode worker for a prompt, in multiples of a prefill worker's.

It may take longer, because nothing is handed over and nobody else waits.
"""
_OUTPUT_SHARE: Final = 0.5
"""The most time for the output of a queue's last prompt, as a part of the queue's time."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two workers that may compute a prompt."""

    queue: ExpectedPrompts
    cached_tokens: int = 0
    """Tokens of the prompt that its prefix index is expected to have."""
    num_requests: int = 0
    """The requests that it has, running or waiting."""
    lent_tokens: int = 0
    """Tokens of the prompt that it may read from the other worker, which has them."""
    lent_seconds: float = 0.0
    """Expected seconds to read them."""

    @property
    def backlog_tokens(self) -> float:
        """Tokens of prompts that it has to compute, without those in steps in flight."""
        return min(sum(self.queue.by_size), self.queue.backlog_tokens)

    def computing_tokens(self, chunk_tokens: int) -> float:
        """Tokens of prompts still to be computed in steps in flight.

        Each step computes `chunk_tokens` at most. Their prompts have left the queue and have not
        begun to generate. One step runs, and is half done on average; the next one may be planned.
        """
        unwaiting = self.queue.backlog_tokens - sum(self.queue.by_size)
        if not chunk_tokens or math.isinf(unwaiting):
            return 0.0
        in_flight = min(max(unwaiting, 0.0), 2 * chunk_tokens)
        return in_flight - min(in_flight, chunk_tokens) / 2

    def lent(self, tokens: int, tokens_per_second: float) -> Side:
        """The side, with tokens of the prompt that it may read from the other worker so fast."""
        seconds = (tokens - self.cached_tokens) / tokens_per_second
        return replace(self, lent_tokens=tokens, lent_seconds=seconds)

    def own_tokens(self, tokens: int) -> int:
        """The tokens that it would have to compute of an input of `tokens`."""
        return max(tokens - self.cached_tokens, 1)


@dataclass(frozen=True, slots=True)
class Decision:
    """The choice of the worker that computes a prompt."""

    by_decode: bool
    reason: Reason
    lent_tokens: int = 0
    """Tokens of the prompt that the prefill worker has or will read; it computes the rest."""


def decide(
    tokens: int, prefill: Side, decode: Side, targets: LatencyTargets = NO_TARGETS
) -> Decision:
    """Choose the worker that is expected to have the prompt's first token sooner.

    Beside running requests a decode worker computes only small chunks, to keep their inter-token
    latency: a long prompt takes long there. If the decode worker has more to do than the prefill
    worker, outputs included, the prompt also delays each of its requests. That delay counts, too:
    without it, a decode worker that is the pair's bottleneck would get prompts that cost
    throughput.

    A speed that one of them has not measured is assumed to be the other's. While no speed is known,
    the one with fewer tokens to compute gets the prompt.

    Args:
        tokens: the input's length, at least 1.
        prefill: the prefill worker that would be chosen. It reads the tokens that it may be lent,
            if that is faster than to compute them.
        decode: the decode worker that generates in any case.
        targets: the latencies that are wanted.
    """
    there_speeds = _filled_in(prefill.queue.load.speeds, decode.queue.load.speeds)
    here_speeds = _filled_in(decode.queue.load.speeds, there_speeds)
    is_idle = not decode.num_requests
    if not (there_speeds.prompts_known and here_speeds.rows_known):
        fewer = decode.backlog_tokens < prefill.backlog_tokens
        return Decision(is_idle or fewer, Reason.IDLE if is_idle else Reason.UNKNOWN)
    prefill, there, lent_tokens = _read_if_sooner(tokens, prefill, there_speeds)
    if is_idle:
        by_decode = _seconds(tokens, decode, here_speeds) <= _HAND_OVER_WORTH * there
        if by_decode:
            return Decision(by_decode, Reason.IDLE)
        return Decision(by_decode, Reason.SOONER, lent_tokens)
    here = _seconds_beside(tokens, decode, here_speeds, targets)
    here += decode.num_requests * _delay(tokens, prefill, there_speeds, decode, here_speeds)
    return Decision(here < there, Reason.SOONER, 0 if here < there else lent_tokens)


def expect_lent(tokens: int, prefill: Side) -> int:
    """The tokens of a prompt that a prefill worker has or will read, as in a `Decision`."""
    speeds = prefill.queue.load.speeds
    return _read_if_sooner(tokens, prefill, speeds)[2] if speeds.prompts_known else 0


def _read_if_sooner(tokens: int, prefill: Side, speeds: StepSpeeds) -> tuple[Side, float, int]:
    """Expect a prefill worker to read what it may be lent, if that is faster than computing it.

    Returns:
        The side, with what is read as cached; the seconds until its first token; and the lent
        tokens, 0 if nothing is read.
    """
    there = _seconds(tokens, prefill, speeds)
    if prefill.lent_tokens > prefill.cached_tokens:
        borrower = replace(prefill, cached_tokens=prefill.lent_tokens)
        seconds = prefill.lent_seconds + _seconds(tokens, borrower, speeds)
        if seconds < there:
            return borrower, seconds, prefill.lent_tokens
    return prefill, there, 0


def _delay(
    tokens: int, prefill: Side, there_speeds: StepSpeeds, decode: Side, here_speeds: StepSpeeds
) -> float:
    """Seconds by which the pair's whole work ends later if decode computes the prompt.

    What the prefill worker computes last has all of its output to be generated after that. So a
    prefill worker with a long queue sets the pace, though the decode worker has as much to do. A
    short queue does not, as new requests keep the decode worker at work after those. Nor does any
    queue beside a decode worker that has prompts to compute already.
    """
    token_there = _seconds_per_token(tokens, prefill, there_speeds)
    token_here = _seconds_per_token(tokens, decode, here_speeds)
    steps = prefill.computing_tokens(there_speeds.chunk_tokens)
    there = (prefill.backlog_tokens + steps) * token_there
    here = decode.backlog_tokens * token_here + _outputs_seconds(decode, here_speeds)
    last = decode.queue.load.output_tokens * here_speeds.step_seconds(1)
    if not decode.backlog_tokens:
        there += min(last, _OUTPUT_SHARE * there)
    by_decode = max(here + decode.own_tokens(tokens) * token_here, there)
    by_prefill = max(here, there + prefill.own_tokens(tokens) * token_there)
    return max(by_decode - by_prefill, 0.0)


def _seconds_per_token(tokens: int, side: Side, speeds: StepSpeeds) -> float:
    """Seconds that each token of such a prompt adds to a step that runs in any case."""
    own = side.own_tokens(tokens)
    pairs = StepWork.of_prompt(own, tokens - own).prompt_pairs
    return speeds.seconds_per_token + speeds.seconds_per_pair * pairs / own


def _outputs_seconds(side: Side, speeds: StepSpeeds) -> float:
    """Seconds to generate all outstanding output tokens of a worker, all rows in one batch."""
    load, rows = side.queue.load, side.num_requests
    tokens = load.growth_tokens + load.output_tokens * max(rows - load.running_requests, 0)
    step = speeds.seconds_of(StepWork(rows=rows, row_pairs=load.held_tokens))
    return step * tokens / rows


def _filled_in(own: StepSpeeds, of_other: StepSpeeds) -> StepSpeeds:
    """The speeds of a worker, with the other one's where it has computed no prompts yet."""
    if own.prompts_known:
        return own
    return replace(
        own,
        seconds_per_step=own.seconds_per_step or of_other.seconds_per_step,
        seconds_per_token=of_other.seconds_per_token,
        seconds_per_pair=of_other.seconds_per_pair,
        prompts_known=of_other.prompts_known,
    )


def _seconds_beside(tokens: int, side: Side, speeds: StepSpeeds, targets: LatencyTargets) -> float:
    """Expected seconds until the first token, in chunks beside running requests."""
    load = side.queue.load
    generating = StepWork(rows=max(load.running_requests, 1), row_pairs=load.held_tokens)
    most = speeds.chunk_tokens or tokens
    own = side.own_tokens(tokens)
    left = math.ceil(side.backlog_tokens) + own
    # They are assumed to be as long as this one.
    pairs = StepWork.of_prompt(own, tokens - own).prompt_pairs * left // own
    chunk = choose_chunk_tokens(
        speeds,
        generating,
        tokens // 2,
        most,
        count_backlog(own, left),
        targets,
        waiting=WaitingPrompts(0.0, left, pairs),
    )
    return _seconds(tokens, side, replace(speeds, chunk_tokens=chunk), generating)


def _seconds(tokens: int, side: Side, speeds: StepSpeeds, generating: StepWork = NO_WORK) -> float:
    """Expected seconds until the first token, behind the prompts that come before it."""
    own = side.own_tokens(tokens)
    pairs = StepWork.of_prompt(own, tokens - own).prompt_pairs
    waiting = min(most_tokens_ahead(side.queue.by_size, own), side.queue.backlog_tokens)
    ahead = math.ceil(waiting + side.computing_tokens(speeds.chunk_tokens))
    # They are assumed to be as long as this one, so each attends to as many tokens.
    pairs += ahead * pairs // own
    return speeds.seconds_of(replace(generating, prompt_tokens=own + ahead, prompt_pairs=pairs))
