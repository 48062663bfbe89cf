"""How many tokens of a prompt a step computes beside rows."""

from __future__ import annotations

import pytest

from kvrelay.pacing.chunk_size import choose_chunk_tokens, count_backlog
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
        tokens = choose_chunk_tokens(speeds, work, 0, 10_000, 60, target, own_prompts=own_prompts)
        return speeds.seconds_of(StepWork(tokens, 0, rows))

    idle = speeds.step_seconds(1)
    assert seconds(12, own_prompts=True) == pytest.approx(6 * speeds.step_seconds(12), rel=0.01)
    assert seconds(40, own_prompts=True) == pytest.approx(24 * idle, rel=0.01)
    assert seconds(11, own_prompts=True) == seconds(11, own_prompts=False)
    assert seconds(40, own_prompts=False) == pytest.approx(1.5 * speeds.step_seconds(40), rel=0.01)
    assert seconds(40, own_prompts=True, target=0.15) == pytest.approx(0.15, rel=0.01)
