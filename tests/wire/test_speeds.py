"""What a worker's speeds say of work to come."""

from __future__ import annotations

import pytest

from kvrelay.wire.load import sum_by_size
from kvrelay.wire.speeds import StepSpeeds, StepWork

SPEEDS = StepSpeeds(
    seconds_per_step=1,
    seconds_per_token=0.1,
    seconds_per_pair=0.001,
    seconds_per_row=0.5,
    seconds_per_row_pair=0.01,
    chunk_tokens=100,
)


def test_a_prompt_takes_its_steps_its_tokens_and_what_they_attend_to():
    assert SPEEDS.prompt_seconds(1) == pytest.approx(1 + 0.1 + 0.001)
    assert SPEEDS.prompt_seconds(100) == pytest.approx(1 + 10 + 5.05)
    assert SPEEDS.prompt_seconds(101) == pytest.approx(2 + 10.1 + 5.151)


def test_a_prompt_behind_a_context_takes_what_is_left_of_the_whole():
    whole = StepSpeeds(seconds_per_token=0.1, seconds_per_pair=0.001)
    rest = whole.prompt_seconds(300) - whole.prompt_seconds(200)
    assert whole.prompt_seconds(100, context=200) == pytest.approx(rest)


def test_rows_are_computed_in_each_step_of_a_prompt():
    alone = SPEEDS.prompt_seconds(250)
    work = StepWork.of_prompt(250)
    beside = StepWork(work.prompt_tokens, work.prompt_pairs, rows=4, row_pairs=40)
    assert SPEEDS.seconds_of(beside) == pytest.approx(alone + 3 * (4 * 0.5 + 40 * 0.01))


def test_a_step_of_rows():
    assert SPEEDS.step_seconds(2, context=10) == pytest.approx(1 + 1 + 0.2)


def test_nothing_is_expected_of_a_worker_that_has_measured_nothing():
    assert StepSpeeds(chunk_tokens=512).prompt_seconds(10_000) == 0
    assert StepSpeeds().step_seconds(8) == 0


def test_prompts_are_summed_by_size():
    assert sum_by_size([]) == sum_by_size([0]) == ()
    assert sum_by_size([1, 1, 2, 3, 4, 7, 0, 8]) == (2, 5, 11, 8)
