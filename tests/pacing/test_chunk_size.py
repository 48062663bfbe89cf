"""How many tokens of a prompt a step computes beside rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.pacing.chunk_size import (
    NO_TARGETS,
    LatencyTargets,
    WaitingPrompts,
    choose_chunk_tokens,
    count_backlog,
)
from kvrelay.wire.speeds import StepSpeeds, StepWork


def test_chunks_are_a_part_of_the_longest_prompt_or_of_a_third_of_all_that_is_left():
    assert count_backlog(1000, tokens_left=10) == 1000
    assert count_backlog(1000, tokens_left=6000) == 2000
    assert count_backlog(0, tokens_left=0) == 0


def test_beside_many_rows_a_step_is_as_long_as_a_few_of_theirs_but_bounded() -> None:
    """Only where all prompts are the worker's own."""
    speeds = StepSpeeds(0.01, 0.001, 0.0, 0.002, prompts_known=True, rows_known=True)

    def seconds(rows: int, own_prompts: bool, target: float | None = None) -> float:
        work = StepWork(rows=rows)
        targets = LatencyTargets(itl_seconds=target)
        tokens = choose_chunk_tokens(speeds, work, 0, 10_000, 60, targets, own_prompts=own_prompts)
        return speeds.seconds_of(StepWork(tokens, 0, rows))

    idle = speeds.step_seconds(1)
    assert seconds(12, own_prompts=True) == pytest.approx(6 * speeds.step_seconds(12), rel=0.01)
    assert seconds(40, own_prompts=True) == pytest.approx(24 * idle, rel=0.01)
    assert seconds(11, own_prompts=True) == seconds(11, own_prompts=False)
    assert seconds(40, own_prompts=False) == pytest.approx(1.5 * speeds.step_seconds(40), rel=0.01)
    assert seconds(40, own_prompts=True, target=0.15) == pytest.approx(0.15, rel=0.01)


@pytest.mark.parametrize(
    ("waited", "targets", "seconds"),
    [
        (0.0, NO_TARGETS, 0.126),  # a sixth of the backlog beside eight rows
        (3.0, NO_TARGETS, 0.25),
        (100.0, NO_TARGETS, 0.626),  # all of it
        (100.0, LatencyTargets(itl_seconds=0.1), 0.1),
        (3.0, LatencyTargets(ttft_seconds=10.0), 0.126),
        # 0.225 s for rows: 8.65 steps, of which one with a part of the prompt is in flight.
        (1.175, LatencyTargets(ttft_seconds=2.0), 0.026 + 0.6 / (8.65 - 1 - 0.6 / 8.65 / 0.026)),
        (1.5, LatencyTargets(ttft_seconds=2.0), 0.25),
        (4.0, LatencyTargets(ttft_seconds=2.0), 0.5),
        (4.0, LatencyTargets(itl_seconds=0.1, ttft_seconds=2.0), 0.1),
    ],
)
def test_steps_lengthen_as_the_oldest_prompt_waits(
    waited: float, targets: LatencyTargets, seconds: float
) -> None:
    """To a twelfth of that, or as far as a target for first tokens wants it."""
    speeds = StepSpeeds(0.01, 0.001, 0.0, 0.002, prompts_known=True, rows_known=True)
    rows = StepWork(rows=8)
    waiting = WaitingPrompts(waited, 600)
    tokens = choose_chunk_tokens(speeds, rows, 0, 10_000, 600, targets, waiting=waiting)
    assert speeds.seconds_of(StepWork(tokens, 0, 8)) == pytest.approx(seconds, rel=0.02)


def test_a_target_is_not_taken_for_out_of_reach_because_many_prompts_wait() -> None:
    """Eight prompts attend to their own tokens alone: to an eighth of one long prompt's pairs."""
    speeds = StepSpeeds(0.01, 1e-4, 1e-7, 2e-3, prompts_known=True, rows_known=True)
    rows, one = StepWork(rows=8), StepWork.of_prompt(1024)
    waiting = WaitingPrompts(0.0, 8 * one.prompt_tokens, 8 * one.prompt_pairs)
    alone = 8 * (speeds.seconds_of(one) - speeds.seconds_per_step)
    own = speeds.seconds_of(rows)
    targets = LatencyTargets(ttft_seconds=alone + 24 * own)
    limited = replace(speeds, chunk_tokens=512)
    tokens = choose_chunk_tokens(limited, rows, 0, 512, 2000, targets, waiting=waiting)
    chunk = replace(StepWork.of_prompt(tokens), rows=8)
    assert speeds.seconds_of(chunk) == pytest.approx(
        own + alone / (23 - alone / 24 / own), rel=0.02
    )
