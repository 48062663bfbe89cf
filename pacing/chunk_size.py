"""The size of a chunk: how many tokens of a prompt a step computes beside requests that generate.

Engines cut their prompts by it, and routers estimate with it when a prompt will be computed.
A small chunk keeps the pace of the running batch (ITL), a large one ends the prompt sooner (TTFT).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from kvrelay.wire.speeds import StepSpeeds, StepWork

_LEAST_TOKENS: Final = 16
"""The least prompt tokens of any step, so that prompts end."""
_UNMEASURED_TOKENS: Final = 64
"""Prompt tokens beside rows until prompts are measured, which takes a few steps."""
_IDLE_STEPS: Final = 2.5
"""A step with prompts may always take as long as this many idle steps (of one row)."""
_OWN_STEPS: Final = 1.5
"""A step with prompts may always take as long as this many steps of its batch without prompts.

Beside a large batch prompts would starve otherwise.
"""
_BACKLOG_STEPS: Final = 6
"""The number of steps for a backlog beside a batch, so that the batch keeps its pace."""
_MOST_IDLE_STEPS: Final = 16
"""A backlog makes no step longer than this many idle steps, unless a prompt has waited long."""
_STEPS_WAITED: Final = 12
"""A step may take this part of what the oldest prompt has waited.

So first tokens and inter-token latencies grow together where more comes than can be computed.
"""
_STEPS_TO_TARGET: Final = 8
"""A step takes at most this part of a target for first tokens, or of what is late already."""
_BACKLOG_ROWS: Final = 6
"""A worker that computes its own prompts spreads a backlog over fewer steps below this many rows.

With fewer rows, the number of steps falls by their square: a long step delays fewer requests then.
Each step beside a prompt adds to the prompt's wait.
"""
_MANY_ROWS: Final = 12
"""From this many rows on, a worker that computes its own prompts does not spread a backlog.

Each step then costs much beside prompts. If prompts arrive faster than short steps compute
them, each waits for seconds.
"""
_MANY_OWN_STEPS: Final = 6
"""From `_MANY_ROWS` on, a step may take as long as this many steps of its batch without prompts."""
_MOST_OWN_IDLE_STEPS: Final = 24
"""From `_MANY_ROWS` on, no step is longer than this many idle steps for that reason."""


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """The latencies that a user has set."""

    itl_seconds: float | None = None
    """Seconds that a step with prompts may take beside running requests; None: learnt."""
    ttft_seconds: float | None = None
    """Seconds from a request's arrival to its first token; None: as many as its steps take."""


@dataclass(frozen=True, slots=True)
class WaitingPrompts:
    """The prompts that have no first token yet."""

    seconds: float = 0.0
    """The time since the oldest of them arrived."""
    tokens: int = 0
    """Tokens that are left of all of them."""
    pairs: int = 0
    """Pairs of one of these tokens and one that it attends to."""


NONE_WAIT: Final = WaitingPrompts()
"""An estimate's assumption: the prompt comes only now."""
NO_TARGETS: Final = LatencyTargets()
"""The targets of a user who has set none."""


def choose_chunk_tokens(
    speeds: StepSpeeds,
    rows: StepWork,
    context: int,
    most: int,
    backlog_tokens: int,
    targets: LatencyTargets = NO_TARGETS,
    *,
    waiting: WaitingPrompts = NONE_WAIT,
    own_prompts: bool = False,
) -> int:
    """Choose the most tokens of a prompt that a step computes while its rows keep their pace.

    The result is at least 16 (`most`, if that is less), and at most 64 while steps with prompts
    were not measured.

    Args:
        speeds: what steps cost on the worker.
        rows: what the step computes beside the prompt.
        context: tokens of the prompt whose KV is there.
        most: tokens of the prompt that the step may compute at all.
        backlog_tokens: tokens of all prompts, as `count_backlog` counts them.
        targets: an inter-token latency bounds the step, whatever waits. Without one the bound
            follows from the speeds, the rows, the backlog and the time to a first token.
        waiting: the prompts without a first token.
        own_prompts: no other worker computes these prompts. The backlog then takes fewer steps,
            beside few rows and beside many.
    """
    if not speeds.prompts_known:
        return min(_UNMEASURED_TOKENS, most)
    bound = targets.itl_seconds
    if bound is None:
        bound = max(
            _bound_seconds(speeds, rows, context, backlog_tokens, own_prompts),
            _late_seconds(speeds, rows, waiting, targets.ttft_seconds),
        )
    keeps, breaks = min(_LEAST_TOKENS, most), most + 1
    while breaks - keeps > 1:
        tokens = (keeps + breaks) // 2
        if _seconds_beside(speeds, rows, tokens, context) <= bound:
            keeps = tokens
        else:
            breaks = tokens
    return keeps


def _bound_seconds(
    speeds: StepSpeeds, rows: StepWork, context: int, backlog_tokens: int, own_prompts: bool
) -> float:
    """Bound the seconds of a step with prompts that are not late."""
    idle, own = speeds.step_seconds(1), speeds.seconds_of(rows)
    steps = float(_BACKLOG_STEPS)
    if own_prompts:
        steps = max(steps * min(rows.rows / _BACKLOG_ROWS, 1) ** 2, 1)
    part = _seconds_beside(speeds, rows, math.ceil(backlog_tokens / steps), context)
    bound = max(_IDLE_STEPS * idle, _OWN_STEPS * own, min(part, _MOST_IDLE_STEPS * idle))
    if own_prompts and rows.rows >= _MANY_ROWS:
        bound = max(bound, min(_MANY_OWN_STEPS * own, _MOST_OWN_IDLE_STEPS * idle))
    return bound


def _late_seconds(
    speeds: StepSpeeds, rows: StepWork, waiting: WaitingPrompts, target: float | None
) -> float:
    """Bound the seconds of a step whose prompts have waited.

    With a target for first tokens a step is as long as that takes. The time of its rows is lost to
    prompts in each step, so the fewer steps are left, the longer they are.
    """
    own = speeds.seconds_of(rows)
    whole = replace(rows, prompt_tokens=waiting.tokens, prompt_pairs=waiting.pairs)
    alone = replace(speeds, chunk_tokens=0).seconds_of(whole) - own  # no row's time in it
    if target is None:
        return min(own + alone, waiting.seconds / _STEPS_WAITED)
    spare, own_least = target - waiting.seconds - alone, max(own, 1e-6)
    in_flight = own + alone / max(spare / own_least, 1.0)  # the step that ends before this one
    steps = max((spare - in_flight) / own_least, 1.0)
    return min(own + alone / steps, max(target, waiting.seconds) / _STEPS_TO_TARGET)


def _seconds_beside(speeds: StepSpeeds, rows: StepWork, tokens: int, context: int) -> float:
    """Expect the seconds of a step with `tokens` of a prompt, behind `context`, beside the rows."""
    chunk = StepWork.of_prompt(tokens, context)
    return speeds.seconds_of(replace(chunk, rows=rows.rows, row_pairs=rows.row_pairs))


def count_backlog(longest_tokens: int, tokens_left: int) -> int:
    """Count the prompt tokens that are divided into chunks beside rows.

    The longest prompt counts as a whole until it ends, so that its chunks do not shrink. A third of
    what is left of all counts if it is more, so that many prompts get larger chunks.

    Args:
        longest_tokens: the length of the longest unfinished prompt, its computed part included.
        tokens_left: the tokens that are left of all prompts.
    """
    return max(longest_tokens, tokens_left // 3)
