"""Memory scenarios that need a scheduler, by number. `tests.mem_cache.test_scenarios` has all."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kvrelay.decode_worker.hand_over_stream import PeerMessage
from kvrelay.decode_worker.request import HandedOverRequest
from kvrelay.engine.config import Speculation
from kvrelay.engine.executor.step import StepEnded
from kvrelay.engine.scheduler.commands import Stop
from kvrelay.kv_transfer.hand_over.states import DecodeState
from kvrelay.wire.hand_over import Released
from kvrelay.wire.output import EndReason
from kvrelay.wire.submit import RequestKey
from tests.engine.simulation import SimRequest, Simulation, count, reference

CHUNK = 16


def one_pair(seed: int, **options: Any) -> Simulation:
    sizes = {"page_size": 4, "pages": 60, "rows": 4, "chunk": CHUNK, "workers": 1}
    return Simulation(seed, **{**sizes, **options})


def random_prompts(seed: int, count: int, length: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(97) for _ in range(length)] for _ in range(count)]


def step_until(simulation: Simulation, reached: Callable[[], bool]) -> None:
    while not reached():
        assert simulation.step(), "it never comes to this"


@pytest.mark.parametrize("seed", range(4))
def test_scenario_9_aborted_chunk_emits_nothing_when_its_forward_ends(seed: int) -> None:
    simulation = one_pair(seed)
    request = simulation.submit(list(range(40)), 4)
    prefill = request.prefill
    step_until(simulation, lambda: bool(prefill.steps) and prefill.steps[0].number == 2)
    simulation.cancel(request, prefill)
    prefill.turn()
    (pages, rows) = prefill.kv_cache.audit.counts()
    # The first chunk is published, and stays locked with what the second still writes.
    assert (pages.held, pages.promised, pages.quarantined) == (0, 0, 4)
    assert (pages.cached_protected, pages.cached_evictable) == (4, 0)
    assert (rows.held, rows.quarantined) == (0, 1)
    prefill.end_step()
    prefill.turn()
    (pages, rows) = prefill.kv_cache.audit.counts()
    assert (pages.free + 4, pages.cached_evictable, rows.free) == (pages.total, 4, rows.total)
    simulation.run()
    assert not request.tokens
    assert {end.reason for end in request.ends.values()} == {EndReason.ABORTED}
    simulation.assert_at_baseline()


def has_result(request: SimRequest) -> bool:
    """The prompt is computed; its engine has not heard of it."""
    messages = request.prefill.inbox
    ended = [message for message in messages if isinstance(message, StepEnded)]
    return any(computed.tokens for message in ended for computed in message.outputs)


def has_verdict(request: SimRequest) -> bool:
    """The decode side may activate the request; its engine has not heard of it."""
    messages = request.decode.inbox
    return any(
        isinstance(m, PeerMessage) and isinstance(m.sequenced.message, Released) for m in messages
    )


def is_in(request: SimRequest, state: DecodeState) -> bool:
    mine = request.decode.context.requests.get(request.key)
    return isinstance(mine, HandedOverRequest) and mine.hand_over.state is state


POINTS: dict[str, Callable[[SimRequest], bool]] = {
    "computed": has_result,
    "announced": lambda request: is_in(request, DecodeState.ANNOUNCED),
    "read": lambda request: is_in(request, DecodeState.READ),
    "to be activated": has_verdict,
}


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("seed", range(3))
def test_scenario_10_drain_releases_a_finished_prefill_that_is_not_merged_yet(
    seed: int, point: str
) -> None:
    simulation = one_pair(seed)
    request = simulation.submit(list(range(40)), 6)
    step_until(simulation, lambda: POINTS[point](request))
    assert request.decode.kv_cache.audit.page_counts()[0].held == 10
    for worker in simulation.workers:
        worker.inbox.post(Stop())
    simulation.run()
    for worker in simulation.workers:
        assert worker.engine.stopped
    assert request.output == reference(request.prompt, 6)[: len(request.output)]
    assert request.ends[request.decode.name].reason is EndReason.ABORTED
    simulation.assert_at_baseline()


@pytest.mark.parametrize("length", [CHUNK, CHUNK + 1, 40, 3 * CHUNK])
def test_scenario_46_no_token_is_sampled_from_a_chunk_but_the_last(length: int) -> None:
    simulation = one_pair(length)
    rng = random.Random(length)
    prompts = [[rng.randrange(97) for _ in range(length)] for _ in range(4)]
    requests = [simulation.submit(prompt, 3) for prompt in prompts]
    (prefill,) = simulation.prefills
    chunks: dict[str, list[tuple[int, bool]]] = {r.key.request_id: [] for r in requests}
    launch = prefill.launch

    def watch(step) -> None:
        for item in step.scheduled:
            chunks[item.request.key.request_id].append((item.num_tokens, item.sample))
        launch(step)

    prefill.launch = watch  # type: ignore[method-assign]
    simulation.run()
    for request in requests:
        counts, samples = zip(*chunks[request.key.request_id], strict=True)
        assert sum(counts) == length
        assert list(samples) == [False] * (len(counts) - 1) + [True]
        assert len(counts) >= -(-length // CHUNK)
        assert request.output == reference(request.prompt, 3)
    simulation.assert_at_baseline()


@pytest.mark.parametrize("seed", range(4))
def test_scenario_5_a_finish_beside_chunks_frees_the_slot_of_the_step_launched_ahead(seed) -> None:
    simulation = one_pair(seed, aggregated=True)
    (worker,) = simulation.workers
    mixed, ahead = 0, 0
    launch = worker.launch

    def watch(step) -> None:
        nonlocal mixed, ahead
        generating = [item for item in step.scheduled if item is item.request.every_step]
        mixed += 0 < len(generating) < len(step.scheduled)
        ahead += any(item.request.in_flight > 1 for item in generating)
        launch(step)

    worker.launch = watch  # type: ignore[method-assign]
    prompts = random_prompts(seed, 6, 40)
    # The stop token comes as a surprise: the step after it was launched already.
    outputs = [reference(prompt, 12) for prompt in prompts]
    requests = []
    for prompt, output in zip(prompts, outputs, strict=True):
        stop = frozenset({output[5]})
        requests += simulation.submit_choices(1, prompt, 12, stop_token_ids=stop)
        for _ in range(6):
            simulation.step()
    simulation.run()
    for request, output in zip(requests, outputs, strict=True):
        assert request.output == output[: output.index(output[5]) + 1]
    assert mixed
    assert ahead
    simulation.assert_at_baseline()


def test_scenario_7_a_chunked_request_keeps_its_table_while_rows_run_out() -> None:
    simulation = one_pair(7, rows=2, pages=40)
    (prefill,) = simulation.prefills
    tables: dict[RequestKey, list[int]] = {}
    launch = prefill.launch

    def watch(step) -> None:
        for item in step.scheduled:
            table = item.request.held.pages().tolist()
            before = tables.get(item.request.key, [])
            assert table[: len(before)] == before
            tables[item.request.key] = table
        launch(step)

    prefill.launch = watch  # type: ignore[method-assign]
    requests = [simulation.submit(prompt, 3) for prompt in random_prompts(7, 6, 50)]
    simulation.run()
    assert len(tables) == 6
    for request in requests:
        assert request.output == reference(request.prompt, 3)
    simulation.assert_at_baseline()


@pytest.mark.parametrize("aggregated", [False, True], ids=["pair", "aggregated"])
@pytest.mark.parametrize("seed", range(4))
def test_scenario_8_whoever_comes_in_gets_nothing_that_the_step_ahead_still_reads(
    seed, aggregated
) -> None:
    """The steps of a worker that generates end late: finishes are found with one in flight."""
    simulation = one_pair(seed, aggregated=aggregated, pages=36)
    simulation.slow_forwards = True
    (worker,) = simulation.decodes
    found = 0
    turn = worker.turn

    def watch() -> None:
        nonlocal found
        turn()
        reading = [set(table[table >= 0].tolist()) for s in worker.steps for table in s.page_tables]
        free = set(worker.kv_cache.allocator.accounts[0].free_pages.tolist())
        assert not any(pages & free for pages in reading)
        found += any(counts.quarantined for counts in worker.kv_cache.audit.page_counts())

    worker.turn = watch  # type: ignore[method-assign]
    for prompt in random_prompts(seed, 14, 20):
        output = reference(prompt, 12)
        stop = frozenset({output[5]})
        simulation.submit_choices(1, prompt, 12, stop_token_ids=stop)
        for _ in range(12):
            simulation.step()
    simulation.run()
    assert found
    for request in simulation.submitted:
        output = reference(request.prompt, 12)
        assert request.output == output[: output.index(output[5]) + 1]
    simulation.assert_at_baseline()


@pytest.mark.parametrize("overlap", [False, True], ids=["22 synchronous", "25 overlapped"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_scenario_22_to_25_drafts_that_are_rejected_cost_no_token_and_no_page(
    overlap, page_size
) -> None:
    """The allocated length covers all drafts of all steps in flight, and never shrinks below."""
    simulation = one_pair(
        page_size,
        page_size=page_size,
        pages=240 // page_size,
        overlap=overlap,
        speculation=Speculation.NGRAM,
        num_draft_tokens=5,
    )
    (worker,) = simulation.decodes
    reach: dict[RequestKey, int] = {}
    turn, end_step = worker.turn, worker.end_step

    def watch() -> None:
        turn()
        for step in worker.steps:
            for item in step.scheduled:
                if item.request.has_ended:
                    continue
                lease = item.request.held
                assert lease.kv_committed_len <= lease.kv_allocated_len
                assert lease.kv_allocated_len >= reach.get(item.request.key, 0)
                reach[item.request.key] = lease.kv_allocated_len

    def check_writes() -> None:
        step = worker.steps[0]
        end_step()
        for item in step.scheduled:
            if not item.request.has_ended:
                assert item.token_state.kv_len <= item.request.held.kv_allocated_len

    worker.turn = watch  # type: ignore[method-assign]
    worker.end_step = check_writes  # type: ignore[method-assign]
    requests = [simulation.submit(prompt, 30) for prompt in random_prompts(page_size, 5, 18)]
    simulation.run()
    for request in requests:
        assert request.output == reference(request.prompt, 30)
    accepted, drafted = (count(worker, name) for name in ("accepted_draft_tokens", "draft_tokens"))
    assert 0 < accepted < drafted
    simulation.assert_at_baseline()


@pytest.mark.parametrize("growth", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(4))
def test_scenario_31_pulls_hold_pages_while_the_batch_needs_one_each(seed, growth) -> None:
    simulation = one_pair(seed, pages=30, rows=8, growth_min=growth, growth_max=growth)
    requests = [simulation.submit(prompt, 24) for prompt in random_prompts(seed, 10, 22)]
    simulation.run()
    for request in requests:
        assert request.output == reference(request.prompt, 24)
    (decode,) = simulation.decodes
    if not growth:
        assert count(decode, "retractions"), "the pool is too large to show anything"
    assert count(decode, "retractions") < 60
    simulation.assert_at_baseline()


@pytest.mark.parametrize("aggregated", [False, True], ids=["pair", "aggregated"])
def test_scenario_47_forced_retractions_with_long_outputs(aggregated) -> None:
    simulation = one_pair(
        47,
        page_size=16,
        pages=60,
        rows=6,
        chunk=128,
        cached=False,
        debug_retract_every=10,
        aggregated=aggregated,
    )
    requests = [simulation.submit(prompt, 120) for prompt in random_prompts(47, 4, 70)]
    simulation.run()
    for request in requests:
        assert request.output == reference(request.prompt, 120)
    assert sum(count(worker, "retractions") for worker in simulation.decodes) > 10
    simulation.assert_at_baseline()


def test_scenario_48_room_for_one_and_a_half_prompts() -> None:
    simulation = one_pair(48, pages=24, rows=4)
    (decode,) = simulation.decodes
    held: list[int] = []
    turn = decode.turn

    def watch() -> None:
        turn()
        counts = decode.kv_cache.audit.page_counts()[0]
        held.append(counts.held + counts.cached_protected)

    decode.turn = watch  # type: ignore[method-assign]
    requests = [simulation.submit(prompt, 4) for prompt in random_prompts(48, 2, 60)]
    simulation.run()
    # A prompt is 15 pages and its output one more: never a part of the second beside the first.
    assert set(held) <= {0, 15, 16}
    for request in requests:
        assert request.output == reference(request.prompt, 4)
    simulation.assert_at_baseline()


def test_a_retracted_request_goes_before_those_that_came_later() -> None:
    """Two run, memory ends, one is retracted: it is back before a third, which waited less."""
    simulation = one_pair(1, pages=18, rows=4, growth_min=0.0, growth_max=0.0, cached=False)
    first, second = (simulation.submit(prompt, 24) for prompt in random_prompts(1, 2, 20))
    step_until(simulation, lambda: bool(first.retractions or second.retractions))
    retracted = first if first.retractions else second
    late = simulation.submit(random_prompts(2, 1, 40)[0], 24)
    step_until(simulation, lambda: bool(late.tokens))
    assert retracted.ends, "the later one overtook it"
    simulation.run()
    for request in (first, second, late):
        assert request.output == reference(request.prompt, 24)
    simulation.assert_at_baseline()
