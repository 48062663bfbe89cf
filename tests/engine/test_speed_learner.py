"""What a worker learns of its speeds from the steps that it has measured."""

from __future__ import annotations

import random
import time

import pytest

from kvrelay.engine.scheduler.speed_learner import SpeedLearner
from kvrelay.wire.speeds import StepSpeeds, StepWork

CPU = StepSpeeds(
    seconds_per_step=0.004,
    seconds_per_token=0.0006,
    seconds_per_pair=0.3e-6,
    seconds_per_row=0.0012,
    seconds_per_row_pair=0.5e-6,
    chunk_tokens=512,
)


def chunks(tokens: int, chunk: int = 512) -> list[StepWork]:
    """The steps of one prompt."""
    return [
        StepWork.of_prompt(min(chunk, tokens - start), context=start)
        for start in range(0, tokens, chunk)
    ]


def learn(
    works: list[StepWork], truth: StepSpeeds = CPU, *, noise: float = 0.0, seed: int = 0
) -> SpeedLearner:
    learner, rng = SpeedLearner(512), random.Random(seed)
    for work in works:
        learner.observe(work, truth.seconds_of(work) * rng.lognormvariate(0, noise))
    return learner


def mixed_load(seed: int, number: int = 600) -> list[StepWork]:
    """Prompts of many lengths in chunks, and steps of rows between them."""
    rng = random.Random(seed)
    works: list[StepWork] = []
    while len(works) < number:
        works += chunks(int(2 ** rng.uniform(4, 12)))
        rows = rng.randint(1, 32)
        works += [StepWork(rows=rows, row_pairs=rows * rng.randint(10, 2000)) for _ in range(4)]
    return works


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_it_finds_what_steps_cost(noise: float):
    speeds = learn(mixed_load(1), noise=noise).speeds
    assert speeds.prompts_known
    assert speeds.rows_known

    def within(value: float) -> object:
        return pytest.approx(value, rel=0.2 if noise else 0.03)

    for tokens in (64, 256, 1024, 4096):
        assert speeds.prompt_seconds(tokens) == within(CPU.prompt_seconds(tokens))
    assert speeds.prompt_seconds(100, 3000) == within(CPU.prompt_seconds(100, 3000))
    for rows in (1, 8, 32):
        assert speeds.step_seconds(rows, 1000) == within(CPU.step_seconds(rows, 1000))


def test_long_prompts_are_foretold_to_cost_more_than_in_proportion():
    """Of prompts up to 2048 tokens it learns what those of 8192 take."""
    works = [step for n in (300, 700, 1500, 2048) * 20 for step in chunks(n)]
    speeds = learn(works).speeds
    assert speeds.prompt_seconds(8192) == pytest.approx(CPU.prompt_seconds(8192), rel=0.05)
    assert speeds.prompt_seconds(8192) > 1.5 * 4 * speeds.prompt_seconds(2048)


def test_it_tells_rows_and_chunks_of_mixed_steps_apart():
    rng, works = random.Random(2), []
    for _ in range(400):
        rows, chunk = rng.randint(0, 16), rng.choice((0, 100, 300, 500))
        prompt = StepWork.of_prompt(chunk, context=rng.choice((0, 500)))
        works.append(StepWork(prompt.prompt_tokens, prompt.prompt_pairs, rows, rows * 500))
    speeds = learn(works).speeds
    assert speeds.prompt_seconds(400) == pytest.approx(CPU.prompt_seconds(400), rel=0.05)
    assert speeds.step_seconds(8, 500) == pytest.approx(CPU.step_seconds(8, 500), rel=0.05)


def test_nothing_is_known_before_three_steps_of_a_kind():
    learner = SpeedLearner(512)
    for number in range(3):
        assert learner.speeds == StepSpeeds(chunk_tokens=512), number
        learner.observe(StepWork.of_prompt(256), 0.5)
    assert learner.speeds.prompts_known
    assert not learner.speeds.rows_known
    assert learner.speeds.prompt_seconds(256) == pytest.approx(0.5, rel=0.01)


def test_one_size_alone_is_taken_to_cost_by_the_token():
    speeds = learn([StepWork.of_prompt(256)] * 10).speeds
    took = CPU.prompt_seconds(256)
    assert speeds.prompt_seconds(64) == pytest.approx(took / 4, rel=0.1)
    assert speeds.prompt_seconds(1024) == pytest.approx(4 * took, rel=0.1)


def test_one_number_of_rows_alone_is_taken_to_cost_by_the_step():
    speeds = learn([StepWork(rows=4, row_pairs=400)] * 10).speeds
    assert speeds.step_seconds(1, 100) == pytest.approx(CPU.step_seconds(4, 100), rel=0.2)


def test_steps_that_were_held_up_change_nothing():
    works = mixed_load(3)
    undisturbed, disturbed, rng = SpeedLearner(512), SpeedLearner(512), random.Random(3)
    for work in works:
        seconds = CPU.seconds_of(work)
        undisturbed.observe(work, seconds)
        disturbed.observe(work, seconds * (50 if rng.random() < 0.05 else 1))
    expected = undisturbed.speeds.prompt_seconds(1000)
    assert disturbed.speeds.prompt_seconds(1000) == pytest.approx(expected, rel=0.1)


def test_a_first_forward_that_compiles_is_forgotten():
    learner = SpeedLearner(512)
    for seconds in (30.0, 0.1, 0.1):
        learner.observe(StepWork.of_prompt(256), seconds)
    assert learner.speeds.prompt_seconds(256) == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize("factor", [0.25, 4])
def test_another_speed_is_learnt_anew(factor: float):
    learner = learn(mixed_load(4))
    for work in mixed_load(5, number=800):
        learner.observe(work, factor * CPU.seconds_of(work))
    expected = factor * CPU.prompt_seconds(1024)
    assert learner.speeds.prompt_seconds(1024) == pytest.approx(expected, rel=0.15)


def test_what_is_not_seen_any_more_is_still_known():
    learner = learn(mixed_load(6))
    for _ in range(5000):
        learner.observe(work := StepWork(rows=8, row_pairs=4000), CPU.seconds_of(work))
    expected = CPU.prompt_seconds(1024)
    assert learner.speeds.prompt_seconds(1024) == pytest.approx(expected, rel=0.2)


def test_no_part_costs_less_than_nothing():
    """Steps that get cheaper with their context, as noise may have it."""
    learner = SpeedLearner(512)
    for context in (0, 100, 200, 400, 800, 1600) * 10:
        learner.observe(StepWork.of_prompt(256, context), 0.2 - context / 16_000)
    speeds = learner.speeds
    assert min(speeds.seconds_per_step, speeds.seconds_per_token, speeds.seconds_per_pair) >= 0
    assert 0.1 < speeds.prompt_seconds(256, 1600) < 0.2


def test_it_remembers_a_bounded_number_of_kinds():
    learner, rng = SpeedLearner(512), random.Random(7)
    for _ in range(4000):
        rows = rng.randint(1, 2**20)
        learner.observe(StepWork(rows=rows, row_pairs=rows * rng.randint(1, 2**20)), 0.01)
    assert len(learner._kinds) <= 64


def test_steps_without_work_or_time_say_nothing():
    learner = SpeedLearner(512)
    for _ in range(10):
        learner.observe(StepWork(), 1.0)
        learner.observe(StepWork(rows=1, row_pairs=1), 0.0)
    assert learner.speeds == StepSpeeds(chunk_tokens=512)


def test_a_step_costs_microseconds():
    """Some 20; the bound is for a machine that does other things, too."""
    learner, works = learn(mixed_load(8)), mixed_load(9, number=2000)
    begun = time.process_time()
    for work in works:
        learner.observe(work, 0.01)
    assert (time.process_time() - begun) / len(works) < 500e-6
