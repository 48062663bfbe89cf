"""A busy worker counts its load some times a second, and whatever cannot wait at once."""

from __future__ import annotations

import pytest

from kvrelay.decode_worker.hand_over_stream import PeerProbed
from kvrelay.engine.scheduler.commands import Drain, Inspect, Wake
from kvrelay.engine.scheduler.outbox import RouterLink
from kvrelay.wire.load import PeerTransport, WorkerLoad
from tests.engine.simulation import Simulation, SimWorker
from tests.engine.test_worker_speeds import watch

_LONG = 60.0


def loads(link: RouterLink) -> list[WorkerLoad]:
    """What a router was told since it was asked last."""
    return [one.load for one in link.take_all() if one and one.load]


def idle_worker(*, aggregated: bool = True) -> tuple[Simulation, SimWorker, RouterLink]:
    """A worker that has told its load to a router, and counts it again after a long time."""
    simulation = Simulation(
        0, page_size=4, pages=64, rows=8, chunk=16, workers=1, aggregated=aggregated
    )
    worker = simulation.decodes[0]
    worker.engine._load_seconds = _LONG
    worker.forward_seconds = 0.001
    link = watch(worker)
    worker.turn()
    assert loads(link)
    return simulation, worker, link


def busy_worker() -> tuple[Simulation, SimWorker, RouterLink]:
    """One with a request whose forward runs."""
    simulation, worker, link = idle_worker()
    simulation.submit(list(range(40)), 6)
    worker.turn()
    worker.end_step()
    worker.turn()
    assert worker.steps
    loads(link)
    return simulation, worker, link


def test_the_first_work_of_an_idle_worker_is_told_at_once() -> None:
    simulation, worker, link = idle_worker()
    simulation.submit(list(range(40)), 6)
    worker.turn()
    assert worker.steps
    assert [load.running_requests for load in loads(link)] == [1]


def test_what_comes_while_a_forward_runs_is_told_when_none_does() -> None:
    simulation, worker, link = busy_worker()
    simulation.submit(list(range(40)), 6)
    worker.turn()
    assert len(worker.context.requests) == 2
    assert not loads(link)
    simulation.run()
    told = loads(link)
    assert told[-1].is_idle
    assert told[-1].pools == worker.kv_cache.audit.counts()
    simulation.assert_at_baseline()


def test_a_load_that_was_counted_long_ago_is_counted_again() -> None:
    simulation, worker, link = busy_worker()
    simulation.submit(list(range(40)), 6)
    worker.engine._load_counted_at -= _LONG
    worker.turn()
    assert [load.running_requests + load.waiting_requests for load in loads(link)] == [2]


def test_behind_long_forwards_every_change_is_told() -> None:
    """The next pass may be as far away."""
    simulation, worker, link = busy_worker()
    worker.forward_seconds = 2 * _LONG
    worker.end_step()
    worker.turn()
    loads(link)
    for number in (2, 3):
        assert worker.steps
        simulation.submit(list(range(40)), 6)
        worker.turn()
        told = loads(link)
        assert [one.running_requests + one.waiting_requests for one in told] == [number]


def test_a_router_that_comes_is_told_at_once() -> None:
    _, worker, link = busy_worker()
    other = watch(worker)
    worker.turn()
    assert len(loads(other)) == 1
    worker.inbox.post(Wake())
    worker.turn()
    assert not loads(link)[1:]


def test_a_drain_is_told_at_once() -> None:
    _, worker, link = busy_worker()
    worker.inbox.post(Drain(lambda: None))
    worker.turn()
    assert [load.draining for load in loads(link)] == [True]


def test_who_inspects_a_busy_worker_reads_its_state_of_now() -> None:
    """The limit of the quarantine decides by it whether the worker must drain."""
    simulation, worker, link = busy_worker()
    simulation.submit(list(range(40)), 6)
    worker.inbox.post(Inspect(lambda kv_cache: None))
    worker.turn()
    assert [load.running_requests + load.waiting_requests for load in loads(link)] == [2]


@pytest.mark.parametrize("refusal", ["", "too slow"])
def test_a_refused_peer_is_told_at_once(refusal: str) -> None:
    simulation, worker, link = idle_worker(aggregated=False)
    simulation.submit(list(range(40)), 60)
    while not worker.scheduler._running:
        simulation.step()
    while not worker.steps:
        simulation.step()
    worker.engine._load_counted_at += _LONG
    loads(link)
    worker.inbox.post(PeerProbed(PeerTransport("p9-1", refusal=refusal)))
    worker.turn()
    assert [load.refused_peers for load in loads(link)] == ([{"p9-1": refusal}] if refusal else [])
