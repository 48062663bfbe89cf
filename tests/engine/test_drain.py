"""A worker that drains takes no request, loses no memory, and costs no request a token."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from kvrelay.engine.config import Speculation
from kvrelay.engine.scheduler.commands import Inspect, RetractForDrain, Wake
from kvrelay.engine.worker.worker import QuarantineLimit
from kvrelay.wire.output import EndReason
from kvrelay.wire.worker_info import WorkerRole
from tests.engine.simulation import SimRequest, Simulation, SimWorker, count, reference
from tests.engine.test_modes import SAMPLINGS, expected
from tests.pairwise import few

ROLES = pytest.mark.parametrize("role", list(WorkerRole))


def cluster(seed: int, role: WorkerRole, **options) -> Simulation:
    sizes = {"page_size": 4, "pages": 48, "rows": 6, "chunk": 8}
    return Simulation(seed, aggregated=role is WorkerRole.AGGREGATED, **{**sizes, **options})


def worker_of(request: SimRequest, role: WorkerRole) -> SimWorker:
    return request.prefill if role is WorkerRole.PREFILL else request.decode


@few(3)
@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("grace", [0, 7, None])
@ROLES
def test_drain_at_every_point_of_one_request(
    role: WorkerRole, grace: int | None, first: int
) -> None:
    """After every third number of events; what is left is given back at once, later, or never."""
    moved = stayed = 0
    for events in range(first, 70, 3):
        simulation = cluster(events, role)
        request = simulation.submit(list(range(30)), 6)
        for _ in range(events):
            simulation.step()
        worker = worker_of(request, role)
        worker.drain()
        for _ in range(grace or 0):
            simulation.step()
        if grace is not None:
            worker.inbox.post(RetractForDrain())
        simulation.run()
        assert worker.drained
        assert request.output == reference(request.prompt, 6), events
        assert EndReason.FAILED not in {end.reason for end in request.ends.values()}
        moved += worker_of(request, role) is not worker
        stayed += worker_of(request, role) is worker
        simulation.assert_at_baseline()
    assert stayed
    # Without an end to the grace, all that came before it finishes here.
    assert bool(moved) == (grace is not None)


@few(2)
@ROLES
@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize(
    "seeds", [range(8), pytest.param(range(8, 20), marks=pytest.mark.slow)], ids=str
)
def test_what_is_on_its_way_when_the_drain_begins_is_turned_away(
    role: WorkerRole, choices: int, seeds: range
) -> None:
    """And the other side's part of it ends, whichever side hears of the request first."""
    turned_away = 0
    for seed in seeds:
        simulation = cluster(seed, role)
        workers = simulation.prefills if role is WorkerRole.PREFILL else simulation.decodes
        workers[0].drain()
        for _ in range(6):
            simulation.submit_choices(choices, [seed, 2, 3], 4)
        simulation.run()
        assert workers[0].drained
        assert not workers[0].steps
        for request in simulation.submitted:
            assert worker_of(request, role) is workers[1]
            assert request.output == expected(request)
            turned_away += request.retractions
        simulation.assert_at_baseline()
    assert turned_away


def test_drain_of_a_worker_without_requests_ends_at_once() -> None:
    for role in WorkerRole:
        simulation = cluster(1, role)
        worker = simulation.workers[0]
        worker.drain()
        worker.turn()
        assert worker.drained


@few(1)
@pytest.mark.parametrize("speculation", [Speculation.NONE, Speculation.NGRAM])
@pytest.mark.parametrize("aggregated", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_a_rolling_restart_under_load_costs_no_token(seed, aggregated, speculation) -> None:
    """Every worker drains in turn and is replaced, choices and short memory included."""
    role = WorkerRole.AGGREGATED if aggregated else WorkerRole.DECODE
    simulation = cluster(
        seed,
        role,
        pages=30 if seed % 2 else 80,
        growth_min=0.0,
        growth_max=0.3,
        speculation=speculation,
    )
    rng = random.Random(seed)

    def load(events: int) -> None:
        for _ in range(events):
            simulation.step()
            if rng.random() < (0.25 if aggregated else 0.08):
                prompt = [rng.randrange(97) for _ in range(rng.randint(1, 40))]
                choices = rng.choice((1, 1, 3))
                sampling = rng.choice(SAMPLINGS)
                simulation.submit_choices(
                    choices, prompt, rng.randint(1, 16), rng.randint(0, 1), sampling
                )

    load(300)
    for worker in list(simulation.workers):
        worker.drain()
        load(rng.randint(0, 60))
        worker.inbox.post(RetractForDrain())
        while not worker.drained:
            load(1)
        load(rng.randint(0, 30))
        simulation.replace(worker)
        load(100)
    simulation.run()
    assert len(simulation.submitted) > 20
    assert any(request.retractions for request in simulation.submitted)
    for request in simulation.submitted:
        assert request.output == expected(request), request
        assert not request.disturbed
    simulation.assert_at_baseline()


def test_what_a_drained_worker_retracts_is_counted_by_its_outcome() -> None:
    simulation = cluster(3, WorkerRole.DECODE)
    request = simulation.submit(list(range(20)), 12)
    while len(request.tokens) < 4:
        assert simulation.step()
    worker = request.decode
    worker.drain()
    worker.inbox.post(RetractForDrain())
    simulation.run()
    labels = {"role": "decode", "worker": worker.name, "model": "sim", "outcome": "retracted"}
    name = "kvrelay_releases_total"
    assert worker.context.metrics.registry.get_sample_value(name, labels) == 1
    assert count(worker, "retractions") == 0, "that is for want of memory alone"
    assert request.output == reference(request.prompt, 12)


async def test_memory_in_quarantine_for_too_long_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not if its fences have passed and nobody has looked since."""
    simulation = cluster(1, WorkerRole.DECODE, quarantine_limit=0.2)
    sim = simulation.decodes[0]
    sim.turn()
    since: float | None = time.monotonic() - 1
    allocator = type(sim.kv_cache.allocator)
    monkeypatch.setattr(allocator, "quarantined_since", property(lambda _: since))
    sim.inbox.post(Wake())
    sim.turn()
    since = None  # its fences have passed
    limit = QuarantineLimit(sim.context.metrics, 0.2, lambda: _passed(sim))
    waiting = asyncio.create_task(limit.exceeded())
    turns = asyncio.create_task(_turn_for_ever(sim))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    since = time.monotonic() - 1
    sim.inbox.post(Wake())
    async with asyncio.timeout(60):
        await waiting
        assert await limit.is_exceeded()
        since = None
        assert not await limit.is_exceeded(), "the fences have passed before its turn came"
    turns.cancel()


async def test_quarantine_without_a_limit_is_never_too_old() -> None:
    sim = cluster(1, WorkerRole.DECODE).decodes[0]
    exceeded = asyncio.create_task(
        QuarantineLimit(sim.context.metrics, 0, lambda: _passed(sim)).exceeded()
    )
    await asyncio.wait({exceeded}, timeout=0.05)
    assert not exceeded.done()
    exceeded.cancel()


async def _passed(sim: SimWorker) -> None:
    """Returns when the engine has looked into its inbox."""
    passed = asyncio.Event()
    sim.inbox.post(Inspect(lambda _: passed.set()))
    await passed.wait()


async def _turn_for_ever(sim: SimWorker) -> None:
    while True:
        sim.turn()
        await asyncio.sleep(0.01)
