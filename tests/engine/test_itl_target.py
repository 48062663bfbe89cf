"""A batch that generates keeps its pace beside long prompts, which still end."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from kvrelay.decode_worker.request import HandedOverRequest
from kvrelay.engine.executor.step import Step
from kvrelay.pacing.chunk_size import NONE_WAIT
from kvrelay.wire.speeds import StepSpeeds
from tests.engine.simulation import Simulation, SimWorker, reference
from tests.engine.simulation.clockwork import Clockwork, is_prompt
from tests.engine.test_scenarios import step_until
from tests.pairwise import few

CHUNK = 512
STEP_SECONDS = 0.012
TOKEN_SECONDS = 0.0005
PAIR_SECONDS = 2e-7
ROW_SECONDS = 0.0008


class OneWorker(Clockwork):
    """A worker that computes prompts and generates, about as fast as a small model on a core.

    Args:
        decode: it is a decode worker that gets no prompt from a prefill worker.
    """

    costs = (STEP_SECONDS, TOKEN_SECONDS, PAIR_SECONDS, ROW_SECONDS)
    """Seconds of a step, and of each token, pair and row in it."""

    def __init__(self, *, decode: bool = False, **options: Any) -> None:
        kind = {"local": 1.0} if decode else {"aggregated": True}
        super().__init__(1, 16, 2000, 32, CHUNK, workers=1, audit_pages=False, **kind, **options)

    def step_seconds(self, step: Step[Any]) -> float:
        seconds, of_token, of_pair, of_row = self.costs
        for item in step.scheduled:
            if is_prompt(item):
                context = item.token_state.kv_len
                seconds += item.num_tokens * of_token
                seconds += item.num_tokens * (context + item.num_tokens / 2) * of_pair
            else:
                seconds += of_row
        return seconds


def prompt_of(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(97) for _ in range(tokens)]


def stream_beside_prompts(
    *, tokens: int = 1024, every: float = 0.5, **options: Any
) -> tuple[float, float]:
    """Eight steady streams while prompts of so many tokens arrive, one every so many seconds.

    Returns:
        The 99th percentile of the streams' inter-token latencies, and the seconds until all
        prompts have ended.
    """
    rng, simulation = random.Random(0), OneWorker(**options)
    learn(simulation, rng)
    streams = [simulation.submit(prompt_of(rng, 8), 400) for _ in range(8)]
    simulation.run_until(simulation.clock + 1)
    begun, prompts = simulation.clock, []
    for _ in range(6):
        prompts.append(simulation.submit(prompt_of(rng, tokens), 4))
        simulation.run_until(simulation.clock + every)
    simulation.run_until(simulation.clock + 60)
    for one in streams + prompts:
        assert one.output == reference(one.prompt, one.max_tokens)
    simulation.assert_at_baseline()
    itl = np.concatenate([np.diff(simulation.emitted_at[one]) for one in streams])
    return np.percentile(itl, 99), max(simulation.ended_at[one] for one in prompts) - begun


def learn(simulation: Clockwork, rng: random.Random) -> None:
    """Let a worker learn what its steps cost."""
    for _ in range(4):
        simulation.submit(prompt_of(rng, 700), 3)
        simulation.run_until(simulation.clock + 3)


@pytest.mark.parametrize("itl_target", [0.0, 1000.0], ids=["default", "loose"])
def test_first_prompts_of_a_worker_keep_the_pace_too(itl_target: float) -> None:
    """It cannot know what they cost before it has computed some."""
    rng = random.Random(3)
    simulation = OneWorker(decode=True, **({"itl_target": itl_target} if itl_target else {}))
    stream = simulation.submit(prompt_of(rng, 8), 100)
    simulation.run_until(simulation.clock + 0.5)
    simulation.submit(prompt_of(rng, 1024), 2)
    simulation.run_until(simulation.clock + 0.2)
    assert not simulation.decodes[0].context.speed_learner.speeds.prompts_known
    assert max(np.diff(simulation.emitted_at[stream])) < 0.06
    simulation.run_until(simulation.clock + 10)
    assert simulation.decodes[0].context.speed_learner.speeds.prompts_known
    simulation.assert_at_baseline()


@few(1)
@pytest.mark.parametrize("decode", [False, True], ids=["aggregated", "decode"])
def test_itl_beside_long_prompts_keeps_the_target(decode: bool) -> None:
    unbounded, fastest = stream_beside_prompts(decode=decode, itl_target=1e6)
    assert unbounded > 0.2
    for target, slower in (100, 1.3), (60, 1.5):
        itl, seconds = stream_beside_prompts(decode=decode, itl_target=target)
        assert itl <= 1.15 * target / 1000
        assert seconds < slower * fastest


def test_a_first_token_is_there_by_its_target_where_steps_could_be_shorter() -> None:
    """Six prompts at once: without a target the last of them takes longer, in shorter steps."""

    def last_first_token(**options: Any) -> tuple[float, float]:
        rng, simulation = random.Random(7), OneWorker(**options)
        learn(simulation, rng)
        streams = [simulation.submit(prompt_of(rng, 8), 200) for _ in range(8)]
        simulation.run_until(simulation.clock + 1)
        prompts = [simulation.submit(prompt_of(rng, 600), 2) for _ in range(6)]
        simulation.run_until(simulation.clock + 30)
        simulation.assert_at_baseline()
        gaps = np.concatenate([np.diff(simulation.emitted_at[one]) for one in streams])
        first = max(simulation.emitted_at[one][0] - one.arrived for one in prompts)
        return first, float(gaps.max())

    learnt, gap = last_first_token()
    late, largest = last_first_token(ttft_target=2250)
    patient, smallest = last_first_token(ttft_target=60_000)
    assert late < 2.3 < learnt < patient
    assert smallest < gap <= 1.15 * learnt / 12
    assert largest <= 1.15 * 2.25 / 8


def test_no_step_is_longer_for_what_has_had_its_first_token_or_may_wait() -> None:
    simulation = OneWorker(decode=True)
    (worker,) = simulation.decodes
    computing = worker.scheduler._steps.computing
    for priority in (1, 0):
        simulation.submit([priority] * 1600, 2, priority)
        step_until(simulation, lambda: len(computing) > 0)
        simulation.clock += 5.0
        assert computing.waiting.seconds == (0.0 if priority else 5.0)
        (request,) = computing
        request.output_ids.append(3)
        assert computing.waiting == NONE_WAIT
        request.output_ids.clear()
        simulation.run_until(simulation.clock + 5)
    simulation.assert_at_baseline()


def test_the_work_of_many_that_wait_is_the_sum_of_each_one_s_not_that_of_one_long_prompt() -> None:
    rng, simulation = random.Random(8), OneWorker()
    learn(simulation, rng)
    simulation.submit(prompt_of(rng, 8), 200)
    simulation.run_until(simulation.clock + 0.5)
    computing = simulation.decodes[0].scheduler._steps.computing
    for _ in range(8):
        simulation.submit(prompt_of(rng, 1024), 2)
    step_until(simulation, lambda: len(computing) == 8)
    left = [(tokens, one.held.kv_committed_len) for one, tokens in computing.tokens_left.items()]
    assert computing.waiting.tokens == sum(tokens for tokens, _ in left) > 7 * 1024
    pairs = sum(sum(range(computed + 1, computed + tokens + 1)) for tokens, computed in left)
    assert computing.waiting.pairs == pairs <= 8 * 1024 * 1025 // 2
    simulation.run_until(simulation.clock + 60)
    simulation.assert_at_baseline()


def test_itl_target_follows_from_the_idle_step() -> None:
    """Beside eight it is small for a short prompt, larger for long ones, which end sooner so."""
    idle = STEP_SECONDS + ROW_SECONDS
    itl, _ = stream_beside_prompts(tokens=128, every=2.0)
    assert itl <= 1.15 * 3 * idle
    _, fastest = stream_beside_prompts(itl_target=1e6)
    itl, seconds = stream_beside_prompts()
    assert itl <= 1.15 * 16 * idle
    assert seconds < 1.2 * fastest


@few(6)
@pytest.mark.parametrize("cached", [0, 500], ids=["fresh", "cached"])
@pytest.mark.parametrize(
    ("rows", "tokens", "steps"),
    [
        *((24, 200, 1), (12, 280, 2)),
        *((11, 280, 6), (8, 280, 6), (6, 600, 6)),
        *((5, 280, 5), (4, 280, 3), (3, 280, 2), (2, 280, 1), (1, 280, 1)),
    ],
)
@pytest.mark.parametrize("decode", [False, True], ids=["aggregated", "decode"])
def test_a_prompt_takes_few_steps_beside_few_requests_and_beside_many(
    decode: bool, rows: int, tokens: int, steps: int, cached: int
) -> None:
    """But on a decode worker, which computes few: there it takes six.

    Its chunks do not shrink as it goes on, though each attends to more tokens: each has a cost of
    its own, and a part of what is left would become ever less.
    """
    rng, simulation = random.Random(4), OneWorker(decode=decode)
    learn(simulation, rng)
    history = prompt_of(rng, cached)
    if history:
        simulation.submit(history, 2)
        simulation.run_until(simulation.clock + 5)
    streams = [simulation.submit(prompt_of(rng, 8), 100) for _ in range(rows)]
    simulation.run_until(simulation.clock + 0.5)
    chunks = watch_chunks(simulation.decodes[0])
    simulation.submit(history + prompt_of(rng, tokens), 2)
    simulation.run_until(simulation.clock + 10)
    assert [len(stream.output) for stream in streams] == [100] * rows
    assert sum(chunks) < tokens + 16  # what is cached is not computed
    assert len(chunks) == (6 if decode else steps)
    assert len(set(chunks[:-1])) <= 1


def test_a_long_prompt_stalls_a_single_request_for_no_more_than_the_longest_step() -> None:
    rng, simulation = random.Random(6), OneWorker()
    learn(simulation, rng)
    stream = simulation.submit(prompt_of(rng, 8), 60)
    simulation.run_until(simulation.clock + 0.3)
    chunks = watch_chunks(simulation.decodes[0])
    simulation.submit(prompt_of(rng, 1024), 2)
    simulation.run_until(simulation.clock + 10)
    assert len(chunks) > 2
    assert max(np.diff(simulation.emitted_at[stream])) <= 1.15 * 16 * (STEP_SECONDS + ROW_SECONDS)


def test_a_target_that_cannot_be_kept_starves_no_prompt() -> None:
    itl, seconds = stream_beside_prompts(itl_target=1)
    # Each step computes 16 tokens of a prompt.
    assert itl < 1.1 * (STEP_SECONDS + 9 * ROW_SECONDS + 16 * (TOKEN_SECONDS + 1024 * PAIR_SECONDS))
    assert seconds < 12


def test_chunks_are_whole_while_nothing_generates() -> None:
    rng, simulation = random.Random(1), OneWorker(itl_target=1)
    learn(simulation, rng)
    request, begun = simulation.submit(prompt_of(rng, 1024), 1), simulation.clock
    simulation.run_until(simulation.clock + 5)
    expected = 2 * STEP_SECONDS + 1024 * (TOKEN_SECONDS + 512 * PAIR_SECONDS)
    assert simulation.ended_at[request] - begun == pytest.approx(expected, rel=0.01)


def test_second_token_does_not_wait_for_a_whole_chunk() -> None:
    """No step is planned before its first token is known: that step would be without it."""
    rng, simulation = random.Random(2), OneWorker(itl_target=60)
    learn(simulation, rng)
    requests = [simulation.submit(prompt_of(rng, 512), 3) for _ in range(4)]
    simulation.run_until(simulation.clock + 10)
    for request in requests:
        first, second, _ = simulation.emitted_at[request]
        assert second - first < 1.15 * 0.06
    simulation.assert_at_baseline()


def watch_chunks(decode: SimWorker) -> list[int]:
    """The tokens of each chunk that a worker launches from now on."""
    chunks: list[int] = []
    launch = decode.launch

    def watch(step: Step[Any]) -> None:
        chunks.extend(item.num_tokens for item in step.scheduled if is_prompt(item))
        launch(step)

    decode.launch = watch  # type: ignore[method-assign]
    return chunks


def test_a_chunk_is_small_while_a_prefill_worker_computes_what_is_handed_over() -> None:
    """Its next token would wait for the end of the chunk."""
    simulation = Simulation(1, 16, 200, 8, CHUNK, workers=1, itl_target=1)
    (prefill,), (decode,) = simulation.prefills, simulation.decodes
    decode.context.speed_learner.speeds = StepSpeeds(seconds_per_token=0.001, prompts_known=True)
    chunks = watch_chunks(decode)
    simulation.can_end_step = lambda worker: worker is not prefill  # type: ignore[method-assign]
    handed_over = simulation.submit(list(range(40)), 3)

    def begun() -> bool:
        requests = decode.context.requests.values()
        return any(isinstance(one, HandedOverRequest) and one.hand_over.begun for one in requests)

    step_until(simulation, begun)
    simulation.local = 1.0
    local = simulation.submit(list(range(90)) * 10, 2)
    step_until(simulation, lambda: bool(chunks))
    assert chunks[0] == 16
    del simulation.can_end_step
    simulation.run()
    for request in (handed_over, local):
        assert request.output == reference(request.prompt, request.max_tokens)
    simulation.assert_at_baseline()


@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
def test_no_long_step_is_planned_ahead_of_one_that_joins(long: bool) -> None:
    """While its last pages are being read, what it would wait for is not begun."""
    simulation = Simulation(1, 16, 200, 8, CHUNK, workers=1)
    (decode,) = simulation.decodes
    decode.forward_seconds = 0.02 if long else 0.001
    running = simulation.submit(list(range(30)), 100)
    step_until(simulation, lambda: bool(decode.context.steps.running == 2))
    end_read = simulation.end_read
    simulation.end_read = lambda worker: None  # type: ignore[method-assign]
    handed_over = simulation.submit(list(range(40)), 3)
    step_until(simulation, lambda: bool(decode.agent.ordered))
    in_flight = set()
    for _ in range(30):
        simulation.step()
        in_flight.add(decode.context.steps.running)
    assert max(in_flight) == (1 if long else 2)
    simulation.end_read = end_read  # type: ignore[method-assign]
    simulation.run()
    for request in (running, handed_over):
        assert request.output == reference(request.prompt, request.max_tokens)
    simulation.assert_at_baseline()


@pytest.mark.parametrize("stuck", [False, True], ids=["reads", "stuck"])
def test_a_chunk_is_small_while_a_hand_over_is_about_to_end(stuck: bool) -> None:
    """A request whose last pages are being read does not wait for a whole chunk then.

    If the read is stuck, chunks are whole again: nothing else generates.
    """
    simulation = Simulation(1, 16, 200, 8, CHUNK, workers=1, itl_target=1)
    (decode,) = simulation.decodes
    decode.context.speed_learner.speeds = StepSpeeds(seconds_per_token=0.001, prompts_known=True)
    chunks = watch_chunks(decode)
    handed_over = simulation.submit(list(range(40)), 3)
    step_until(simulation, lambda: bool(decode.agent.ordered))
    simulation.local = 1.0
    simulation.end_read = lambda worker: None  # type: ignore[method-assign]
    (reading,) = decode.context.requests.values()
    assert isinstance(reading, HandedOverRequest)
    reading.announced_at = reading.read_at = 1e-9 if stuck else math.inf
    local = simulation.submit(list(range(90)) * 10, 2)
    step_until(simulation, lambda: bool(chunks))
    assert chunks[0] == (CHUNK if stuck else 16)
    del simulation.end_read
    simulation.run()
    for request in (handed_over, local):
        assert request.output == reference(request.prompt, request.max_tokens)
    simulation.assert_at_baseline()
