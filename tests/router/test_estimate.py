"""When a worker is expected to have computed a prompt."""

from __future__ import annotations

import random
import statistics

import pytest

from kvrelay.router.placement.estimate import (
    ExpectedPrompts,
    expect_prompt,
    most_tokens_ahead,
    tokens_ahead,
)
from kvrelay.wire.load import WorkerLoad, sum_by_size
from kvrelay.wire.speeds import StepSpeeds
from kvrelay.wire.worker_info import WorkerRole

SPEEDS = StepSpeeds(seconds_per_token=0.001, chunk_tokens=512, prompts_known=True)


def queue(
    *prompts: int,
    speeds: StepSpeeds = SPEEDS,
    role: WorkerRole = WorkerRole.PREFILL,
    sent: tuple[int, ...] = (),
    backlog: float = float("inf"),
    running: int = 0,
    reused: float = 0.0,
) -> ExpectedPrompts:
    load = WorkerLoad(
        running_requests=running,
        speeds=speeds,
        prompts_by_size=sum_by_size(prompts),
        reused_share=reused,
    )
    return ExpectedPrompts(role, load, sent, backlog)


def test_an_idle_worker_has_the_prompt_alone_to_compute() -> None:
    expected = expect_prompt(queue(), 300)
    assert (expected.queue_seconds, expected.prompt_seconds) == (0.0, pytest.approx(0.3))


def test_nothing_is_expected_of_a_worker_that_has_measured_no_prompt() -> None:
    unknown = StepSpeeds(seconds_per_step=1.0, seconds_per_row=1.0, rows_known=True)
    assert expect_prompt(queue(10_000, speeds=unknown), 300).seconds == 0


def test_prompts_of_about_the_same_length_come_one_after_the_other() -> None:
    prompts = range(257, 512, 8)
    shorter = sum(one for one in prompts if one <= 400)
    expected = expect_prompt(queue(*prompts), 400)
    assert expected.prompt_seconds == pytest.approx(0.4)
    assert expected.queue_seconds == pytest.approx((2 * shorter + 400) / 1000, rel=0.1)
    assert expected.seconds == expected.queue_seconds + expected.prompt_seconds


def test_a_short_prompt_does_not_wait_for_the_whole_of_a_long_one() -> None:
    assert expect_prompt(queue(100_000), 100).queue_seconds == pytest.approx(0.1)


def test_a_long_prompt_waits_for_the_short_ones() -> None:
    assert expect_prompt(queue(*[100] * 20), 5_000).queue_seconds == pytest.approx(2.0)


def test_a_prompt_with_a_priority_waits_for_nothing() -> None:
    assert expect_prompt(queue(*[300] * 9), 300, priority=-1).seconds == pytest.approx(0.3)


def test_what_was_sent_since_the_load_came_is_before_it() -> None:
    assert expect_prompt(queue(300, sent=(300, 290)), 511).queue_seconds == pytest.approx(0.89)


def test_no_more_is_before_it_than_is_left() -> None:
    """Some has ended since the load came."""
    assert expect_prompt(queue(300, 300, backlog=250), 400).queue_seconds == pytest.approx(0.25)


def test_a_worker_that_reuses_prefixes_may_have_this_one() -> None:
    expected = expect_prompt(queue(1000, reused=0.75), 1000)
    assert (expected.queue_seconds, expected.prompt_seconds) == pytest.approx((0.25, 0.25))


def test_what_a_worker_is_known_to_have_is_not_computed() -> None:
    assert expect_prompt(queue(), 1000, cached_tokens=900).seconds == pytest.approx(0.1)
    assert expect_prompt(queue(), 1000, cached_tokens=1000).seconds == pytest.approx(0.001)
    # It may have more than is known.
    assert expect_prompt(queue(reused=0.75), 1000, cached_tokens=100).seconds == pytest.approx(0.25)


def test_what_is_reused_is_attended_to() -> None:
    speeds = StepSpeeds(seconds_per_pair=1e-6, prompts_known=True)
    whole, first = speeds.prompt_seconds(1000), speeds.prompt_seconds(750)
    expected = expect_prompt(queue(speeds=speeds, reused=0.75), 1000)
    assert expected.prompt_seconds == pytest.approx(whole - first)


@pytest.mark.parametrize("role", [WorkerRole.AGGREGATED, WorkerRole.DECODE])
def test_rows_that_generate_slow_a_worker_that_computes_beside_them(role: WorkerRole) -> None:
    speeds = StepSpeeds(
        seconds_per_token=0.001, seconds_per_row=0.01, chunk_tokens=100, prompts_known=True
    )
    alone = expect_prompt(queue(200, speeds=speeds), 300)
    busy = expect_prompt(queue(200, speeds=speeds, role=role, running=4), 300)
    assert busy.queue_seconds == pytest.approx(alone.queue_seconds + 2 * 0.04)
    assert busy.prompt_seconds == pytest.approx(alone.prompt_seconds + 3 * 0.04)
    # On a prefill worker those that run are computed, and only handed over.
    assert expect_prompt(queue(200, speeds=speeds, running=4), 300) == alone


def computed_before(prompts: list[int], tokens: int, chunk: int = 64) -> int:
    """What a worker computes before the last token of a new prompt, by its rule for a step."""
    left = [*prompts, tokens]
    done = 0
    while left[-1]:
        turn = next(i for i, one in enumerate(left) if one)
        budget = chunk
        others = sorted(range(turn + 1, len(left)), key=lambda i: (left[i], i))
        for i, most in (
            (turn, (budget + 1) // 2),
            *((i, chunk) for i in others if left[i] < left[turn]),
            (turn, chunk),
            *((i, chunk) for i in others),
        ):
            share = min(left[i], most, budget)
            left[i], budget, done = left[i] - share, budget - share, done + share
    return done - tokens


def test_the_estimate_is_near_what_the_rule_for_steps_does() -> None:
    rng, ratios = random.Random(0), []
    for _ in range(300):
        prompts = [int(2 ** rng.uniform(5, 12)) for _ in range(rng.randint(0, 30))]
        tokens = int(2 ** rng.uniform(5, 12))
        expected = tokens_ahead(sum_by_size(prompts), tokens)
        ratios.append((expected + tokens) / (computed_before(prompts, tokens) + tokens))
    assert statistics.median(ratios) == pytest.approx(1, abs=0.05)
    assert sorted(ratios)[290] < 2
    assert min(ratios) > 0.25


@pytest.mark.parametrize("tokens", [512, 700, 1023, 1024])
def test_prompts_of_one_length_are_all_computed_before_it(tokens: int) -> None:
    prompts = [tokens] * 5
    assert most_tokens_ahead(sum_by_size(prompts), tokens) == computed_before(prompts, tokens)
    # Of longer ones as much as is computed beside them and itself.
    assert most_tokens_ahead(sum_by_size([*prompts, 100_000]), tokens) == 11 * tokens
