"""What a router that watches is told of its requests' progress."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.engine.scheduler import progress_reports
from kvrelay.engine.scheduler.commands import FromRouter
from kvrelay.engine.scheduler.outbox import RouterLink
from kvrelay.engine.scheduler.progress_reports import MOST_REQUESTS, ProgressReports
from kvrelay.wire.output import EngineOutputs
from kvrelay.wire.request_progress import RequestPhase, RequestProgress
from kvrelay.wire.submit import WatchRequests
from tests.engine.simulation import Simulation
from tests.engine.simulation.worker import SimWorker
from tests.engine.test_scenarios import one_pair


class Watched:
    """The progress that one worker tells."""

    def __init__(self, worker: SimWorker) -> None:
        self.told: list[RequestProgress] = []
        self.reports: list[tuple[RequestProgress, ...]] = []
        self._deliver = worker.link.deliver
        worker.link.deliver = self._keep  # type: ignore[method-assign]
        worker.inbox.post(FromRouter(worker.link, WatchRequests(on=True)))

    def _keep(self, message: EngineOutputs) -> None:
        if message.progress is not None:
            self.told += message.progress.requests
            self.reports.append(message.progress.requests)
        self._deliver(message)


@pytest.fixture(autouse=True)
def at_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_reports, "INTERVAL_SECONDS", 0.0)


def watched(simulation: Simulation) -> tuple[Watched, ...]:
    return tuple(Watched(worker) for worker in simulation.workers)


def phases(told: list[RequestProgress]) -> list[RequestPhase]:
    """In order, each once."""
    return list(dict.fromkeys(one.phase for one in told))


@pytest.mark.parametrize("seed", range(6))
def test_pages_walk_from_prefill_to_decode(seed: int) -> None:
    simulation = one_pair(seed, cached=False)
    prefill, decode = watched(simulation)
    simulation.submit(list(range(40)), 6)
    simulation.run()
    order = [RequestPhase.QUEUED, RequestPhase.ASKED, RequestPhase.GRANTED]
    order += [RequestPhase.COMPUTING, RequestPhase.ANNOUNCED]
    seen = phases(prefill.told)
    assert seen == [phase for phase in order if phase in seen]
    assert {RequestPhase.ASKED, RequestPhase.COMPUTING} <= set(seen)
    order = [RequestPhase.QUEUED, RequestPhase.ASKED, RequestPhase.GRANTED]
    order += [RequestPhase.READING, RequestPhase.DECODING]
    seen = phases(decode.told)
    assert seen == [phase for phase in order if phase in seen]
    assert {RequestPhase.READING, RequestPhase.DECODING} <= set(seen)
    for told in (prefill.told, decode.told):
        assert {one.pages for one in told} == {10}
        for field in ("written_pages", "announced_pages", "pulled_pages", "output_tokens"):
            values = [getattr(one, field) for one in told]
            assert values == sorted(values), field
    assert all(one.announced_pages <= one.written_pages for one in prefill.told)
    for one in decode.told:
        activated = one.phase is RequestPhase.DECODING
        assert one.owned_pages == (10 if activated else 0)
        assert one.pulled_pages <= 10
        assert not activated or one.pulled_pages == 10
    assert 1 <= decode.told[-1].output_tokens <= 5  # the sixth ends it


def test_a_prompt_of_its_own_is_computed_there() -> None:
    simulation = one_pair(1, aggregated=True, cached=False)
    (worker,) = watched(simulation)
    simulation.submit(list(range(40)), 6)
    simulation.run()
    seen = phases(worker.told)
    assert seen[-2:] == [RequestPhase.COMPUTING, RequestPhase.DECODING]
    assert worker.told[-1].owned_pages == 10


def test_nobody_watches_any_more() -> None:
    simulation = one_pair(1)
    (prefill, decode) = watched(simulation)
    for worker in simulation.workers:
        worker.inbox.post(FromRouter(worker.link, WatchRequests(on=False)))
    simulation.submit(list(range(40)), 6)
    simulation.run()
    assert prefill.told == decode.told == []


def test_choices_are_one_entry() -> None:
    simulation = one_pair(1, cached=False)
    prefill, decode = watched(simulation)
    simulation.submit_choices(2, list(range(40)), 6)
    simulation.run()
    assert RequestPhase.DECODING in phases(decode.told)
    assert {len(report) for one in (prefill, decode) for report in one.reports} <= {0, 1}


class Ours:
    def __init__(self, link: RouterLink) -> None:
        self.link = link


def test_a_report_is_bounded_and_each_routers_own() -> None:
    mine, others, reports = RouterLink("mine"), RouterLink("others"), ProgressReports()
    reports.watch(mine, on=True)
    generating = [(mine, n, RequestPhase.DECODING) for n in range(40)]
    coming = [(mine, n, RequestPhase.QUEUED) for n in range(40, 50)]
    foreign = [(others, 60, RequestPhase.QUEUED)]
    made: list[Any] = [
        (Ours(link), RequestProgress(n, phase)) for link, n, phase in generating + coming + foreign
    ]
    reports.take(made)
    progress = reports.of(mine)
    assert progress is not None
    attempts = [one.attempt for one in progress.requests]
    assert attempts == [*range(40, 50), *range(39, 39 - MOST_REQUESTS + 10, -1)]
    assert reports.of(others) is None


def test_reports_have_pauses_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_reports, "INTERVAL_SECONDS", 1000.0)
    reports = ProgressReports()
    assert not reports.is_due()
    reports.watch(RouterLink("mine"), on=True)
    assert reports.is_due()
    reports.take(())
    assert not reports.is_due()
