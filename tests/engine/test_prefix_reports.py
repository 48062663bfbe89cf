"""What a worker tells routers of its prefixes is what its index has, whatever was missed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import numpy as np
import pytest

from kvrelay.engine.scheduler import prefix_reports
from kvrelay.engine.scheduler.commands import FromRouter
from kvrelay.engine.scheduler.outbox import RouterLink
from kvrelay.engine.scheduler.prefix_reports import PrefixReports
from kvrelay.mem_cache.prefix.no_prefix_index import NoPrefixIndex
from kvrelay.mem_cache.prefix.prefix_log import PrefixLog
from kvrelay.mem_cache.prefix.radix_tree import RadixTree
from kvrelay.wire.model_digest import NO_MODEL
from kvrelay.wire.output import EngineOutputs
from kvrelay.wire.page_hash import PageHashes
from kvrelay.wire.prefixes import PrefixUpdate
from kvrelay.wire.submit import TellPrefixesRequest
from tests.engine.simulation import Simulation, SimWorker
from tests.pairwise import few

PAGE_SIZE = 64
HASHES = PageHashes(NO_MODEL, PAGE_SIZE)


class Told:
    """Knows what it is told on one stream."""

    def __init__(self) -> None:
        self.marks: set[int] = set()
        self.next_number = 0
        self.begun = 0

    def take(self, update: PrefixUpdate) -> None:
        if update.begins:
            self.marks, self.next_number = set(), 0
            self.begun += 1
        assert update.number == self.next_number
        self.next_number += 1
        self.marks |= {*update.stored}
        self.marks -= {*update.removed}


class Index:
    """A worker's index, and its reports to routers."""

    def __init__(self, most_changes: int = 1 << 18) -> None:
        self.tree = RadixTree(PAGE_SIZE, (None,), log=PrefixLog(HASHES, most_changes))
        self.reports = PrefixReports(self.tree, PAGE_SIZE)

    def store(self, *pages: int) -> None:
        tokens = np.repeat(np.asarray(pages, np.int32), PAGE_SIZE)
        self.tree.unlock(self.tree.insert(tokens, [np.arange(len(pages), dtype=np.int32)]).lock)

    @property
    def marks(self) -> set[int]:
        return {*(self.tree.marks() or ())}

    def tell(self, **by: tuple[RouterLink, Told]) -> int:
        """Ends a pass; returns how many updates there were."""
        updates = self.reports.take()
        for link, told in by.values():
            for update in updates.get(link, ()):
                told.take(update)
        return sum(map(len, updates.values()))


def test_a_router_is_told_all_at_first_and_then_what_changes() -> None:
    index = Index()
    index.store(1, 2)
    early, late = (RouterLink("early"), Told()), (RouterLink("late"), Told())
    index.reports.attach(early[0])
    assert index.tell(early=early) == 1
    assert index.tell(early=early) == 0
    index.store(1, 3)
    index.reports.attach(late[0])
    assert index.tell(early=early, late=late) == 2
    index.tree.evict(0, 1)
    assert index.tell(early=early, late=late) == 2
    assert early[1].marks == late[1].marks == index.marks
    assert len(index.marks) == 2
    assert (early[1].begun, early[1].next_number) == (1, 3)
    index.reports.detach(early[0])
    index.store(4)
    assert index.tell(late=late) == 1
    assert late[1].marks == index.marks


def test_an_empty_index_is_told_too() -> None:
    index, router = Index(), (RouterLink("router"), Told())
    index.reports.attach(router[0])
    assert index.tell(router=router) == 1
    assert router[1].begun == 1


def test_a_router_that_missed_something_is_told_all_anew() -> None:
    index, router = Index(), (RouterLink("router"), Told())
    index.reports.attach(router[0])
    index.tell(router=router)
    index.store(1)
    index.tell()  # is lost
    index.reports.begin_anew(router[0])
    index.store(2)
    assert index.tell(router=router) == 1
    assert router[1].begun == 2
    assert router[1].marks == index.marks


def test_too_many_changes_are_told_as_a_whole_in_several_updates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_reports, "_MARKS_AN_UPDATE", 4)
    index, router = Index(most_changes=5), (RouterLink("router"), Told())
    index.reports.attach(router[0])
    index.tell(router=router)
    index.store(*range(10))
    assert index.tell(router=router) == 3
    assert router[1].marks == index.marks
    assert len(index.marks) == 10
    assert router[1].begun == 2


def test_many_changes_are_told_in_several_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_reports, "_MARKS_AN_UPDATE", 4)
    index, router = Index(), (RouterLink("router"), Told())
    index.store(*range(10))
    index.reports.attach(router[0])
    assert index.tell(router=router) == 3
    index.tree.evict(0, 10)
    index.store(*range(20, 29))
    updates = index.reports.take()[router[0]]
    assert [(len(one.stored), len(one.removed)) for one in updates] == [
        *((4, 0), (4, 0), (1, 0), (0, 4), (0, 4), (0, 2))
    ]
    for update in updates:
        router[1].take(update)
    index.store(30)
    assert index.tell(router=router) == 1
    assert router[1].marks == index.marks
    assert len(index.marks) == 10
    assert router[1].begun == 1


async def test_a_router_that_does_not_read_is_told_all_once_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_reports, "_MOST_UNREAD", 2)
    index, link, told = Index(), RouterLink("router"), Told()
    index.reports.attach(link)
    index.tell(router=(link, told))
    for page in range(10):
        index.store(page)
        for update in index.reports.take().get(link, ()):
            link.deliver(EngineOutputs((), prefixes=update))
    assert link.num_unread == 3
    for message in link.take_all():
        assert message is not None
        assert message.prefixes is not None
        told.take(message.prefixes)
    assert len(told.marks) == 3
    await asyncio.sleep(0)
    assert index.tell(router=(link, told)) == 1
    assert told.marks == index.marks
    assert told.begun == 2


def test_an_index_that_keeps_nothing_is_not_told_of() -> None:
    reports = PrefixReports(NoPrefixIndex(PAGE_SIZE, (None,)), PAGE_SIZE)
    reports.attach(RouterLink("router"))
    assert reports.take() == {}


class Following(Simulation):
    """Follows what the workers tell, and misses some of it."""

    def __init__(self, seed: int, misses: float) -> None:
        super().__init__(seed, 16, pages=40, rows=6, chunk=64)
        self.told = {worker: Told() for worker in self.workers}
        self.misses = misses
        self.lacking: set[SimWorker] = set()

    def take_step(self, worker: SimWorker, step: EngineOutputs) -> None:
        if step.prefixes is not None:
            self.take_prefixes(worker, step.prefixes)

    def take_prefixes(self, worker: SimWorker, update: PrefixUpdate) -> None:
        told = self.told[worker]
        if update.begins:
            self.lacking.discard(worker)
        if worker in self.lacking:
            return
        if self.random.random() < self.misses:
            self.lacking.add(worker)
            worker.inbox.post(FromRouter(worker.link, TellPrefixesRequest()))
        else:
            told.take(update)


def follow(simulation: Following, prompts: Sequence[list[int]]) -> None:
    for prompt in prompts:
        request = simulation.submit(prompt, simulation.random.randint(1, 80))
        for _ in range(simulation.random.randint(0, 80)):
            simulation.step()
        if simulation.random.random() < 0.2:
            simulation.cancel(request, request.decode)
        if simulation.random.random() < 0.05:
            simulation.detach(simulation.random.choice(simulation.workers))
    simulation.run()


@few(2)
@pytest.mark.parametrize("misses", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(2))
def test_both_sides_tell_what_they_have(seed: int, misses: float) -> None:
    simulation = Following(seed, misses)
    rng = random.Random(seed)
    shared = [[rng.randrange(97) for _ in range(128)] for _ in range(3)]
    follow(simulation, [rng.choice(shared) + [rng.randrange(97)] * 70 for _ in range(40)])
    simulation.misses = 0.0
    simulation.run()
    evicted = 0
    for worker in simulation.workers:
        marks = worker.kv_cache.index.marks()
        assert marks
        assert simulation.told[worker].marks == {*marks}, worker.name
        evicted += worker.kv_cache.cache_counts.evicted_pages
    assert evicted
    assert misses == 0 or any(told.begun > 2 for told in simulation.told.values())
    simulation.assert_at_baseline()
