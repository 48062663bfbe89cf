"""In which order workers are replaced, and what stops it; tests/cluster replaces real ones."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import cast

import pytest

from kvrelay.deploy.controller.changes.replacing import Rolling
from kvrelay.deploy.controller.changes.role_configs import WorkerConfigs
from kvrelay.deploy.controller.changes.steps import (
    DrainPhase,
    DrainStep,
    RollOrder,
    ScalePhase,
    ScaleStep,
)
from kvrelay.deploy.controller.changes.workforce import Workforce
from kvrelay.deploy.controller.records.journal import Journal
from kvrelay.deploy.controller.records.key_value_store import InProcessStore
from kvrelay.deploy.controller.records.leases import Leases, LeaseTimes
from kvrelay.deploy.controller.records.ordered_changes import FIRST, Revision, Roll
from kvrelay.deploy.controller.records.records import ClusterRecord, WorkerRecord
from kvrelay.deploy.controller.supervision.controller_metrics import ControllerMetrics
from kvrelay.deploy.errors import ClusterError
from kvrelay.engine.worker.worker_lease import boottime
from kvrelay.router.discovery import StaticDiscovery
from kvrelay.router.errors import CannotDrain, CannotRoll
from kvrelay.wire.worker_info import WorkerRole
from tests.deploy.test_placement import CONFIG

P, D = WorkerRole.PREFILL, WorkerRole.DECODE
SECONDS = 60
OPTIONS = {"chunk_tokens": "7"}


class HoldingStore(InProcessStore):
    """Writes when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = asyncio.Event()
        self.may_write.set()

    async def put(self, key: str, value: bytes) -> None:
        await asyncio.sleep(0)
        await self.may_write.wait()
        await super().put(key, value)


class ScriptedCluster:
    """A real journal, and a workforce that starts and drains as it is let.

    It keeps account of how many workers there are.
    """

    def __init__(self, **counts: int) -> None:
        names = [f"{role}-{n}" for role, count in counts.items() for n in range(count)]
        self.workers = {name: WorkerRole(name.partition("-")[0]) for name in names}
        self.configs = WorkerConfigs(
            [replace(CONFIG, name=n, role=r) for n, r in self.workers.items()]
        )
        self.store = HoldingStore()
        leases = Leases(1, LeaseTimes(1, math.inf), began=boottime())
        self.journal = Journal(self.store, leases)
        self.journal.cluster = ClusterRecord(names=frozenset(names))
        self.journal.workers = {n: WorkerRecord(n, r) for n, r in self.workers.items()}
        self.fails: dict[str, Exception] = {}
        self.hangs: set[str] = set()
        self.starting: set[str] = set()
        self.leaving: set[str] = set()
        self.away: dict[str, int] = {}
        """How many times a worker cannot be told anything."""
        self.lost: set[str] = set()
        """Workers that have no next incarnation yet."""
        self.seen: list[tuple[int, int]] = []
        """Workers that have a place, and that take requests, after each change."""
        self.is_scaling = False

    @property
    def staying(self) -> Mapping[str, WorkerRole]:
        return self.workers

    @property
    def revisions_of(self) -> Mapping[str, Revision]:
        return {name: one.revision for name, one in self.journal.workers.items()}

    @property
    def revision(self) -> Revision:
        return self.journal.cluster.revision

    @property
    def previous(self) -> Revision | None:
        return self.journal.cluster.previous

    @property
    def open_roll(self) -> Roll | None:
        return self.journal.cluster.roll

    def make_rolling(self) -> Rolling:
        return Rolling(
            cast("Workforce", self),
            self.configs,
            lambda: self.journal,
            ControllerMetrics("m", StaticDiscovery(), lambda: ()),
            lambda: self.is_scaling,
        )

    async def until_up(self, name: str) -> None:
        await asyncio.sleep(0)
        while name in self.lost:
            await asyncio.sleep(0.001)

    async def until_removed(self, name: str) -> None:
        while name in self.leaving:
            await asyncio.sleep(0)

    async def add(self, name: str, role: WorkerRole, revision: Revision | None = None) -> None:
        assert revision is not None
        assert name not in self.workers
        await self.journal.write_cluster(names=self.journal.cluster.names | {name})
        self.starting.add(name)
        self._count()
        try:
            await asyncio.sleep(0.001)
            if name in self.hangs:
                await asyncio.Event().wait()
            if name in self.fails:
                raise self.fails[name]
            self.workers[name] = role
            await self.journal.add_worker(WorkerRecord(name, role, revision=revision))
        finally:
            self.starting.discard(name)
            self._count()

    async def drain(self, worker: str, *, remove: bool, for_roll: bool) -> AsyncIterator[DrainStep]:
        assert remove
        assert for_roll
        if self.away.get(worker):
            self.away[worker] -= 1
            raise CannotDrain("it is not up")
        self.leaving.add(worker)
        del self.workers[worker]
        self._count()
        yield DrainStep(DrainPhase.DRAINING, worker)
        await asyncio.sleep(0.001)
        yield DrainStep(DrainPhase.LEFT, worker)
        await self.journal.remove_worker(worker)
        asyncio.get_running_loop().call_later(0.001, self.leaving.discard, worker)

    def _count(self) -> None:
        there = len(self.workers.keys() | self.starting | self.leaving)
        self.seen.append((there, len(self.workers)))


async def roll(cluster: ScriptedCluster, order: RollOrder) -> list[ScaleStep]:
    async with asyncio.timeout(SECONDS):
        return [step async for step in cluster.make_rolling().roll(order)]


def assert_all_have(cluster: ScriptedCluster, options: Mapping[str, str], **counts: int) -> None:
    assert Counter(cluster.workers.values()) == {WorkerRole(one): n for one, n in counts.items()}
    assert {name: cluster.revisions_of[name].options for name in cluster.workers} == dict.fromkeys(
        cluster.workers, options
    )


async def test_each_successor_is_ready_before_its_predecessor_drains():
    cluster = ScriptedCluster(prefill=1, decode=2)
    steps = await roll(cluster, RollOrder(OPTIONS))
    phases = [ScalePhase.STARTING, ScalePhase.READY, ScalePhase.DRAINING, ScalePhase.LEFT]
    pairs = [("prefill-1", "prefill-0"), ("decode-2", "decode-0"), ("decode-3", "decode-1")]
    names = [name for new, old in pairs for name in (new, new, old, old)]
    expected = list(zip(names, 3 * phases, strict=True))
    assert [(step.worker, step.phase) for step in steps] == expected
    assert_all_have(cluster, OPTIONS, prefill=1, decode=2)
    assert (cluster.revision.options, cluster.previous) == (
        OPTIONS,
        FIRST,
    )
    assert cluster.open_roll is None


@pytest.mark.parametrize(("surge", "unavailable"), [(1, 0), (3, 0), (0, 1), (0, 2), (2, 2)])
async def test_never_more_workers_nor_fewer_than_was_ordered(surge: int, unavailable: int):
    cluster = ScriptedCluster(prefill=4, decode=5)
    await roll(cluster, RollOrder(OPTIONS, surge, unavailable))
    assert_all_have(cluster, OPTIONS, prefill=4, decode=5)
    assert max(there for there, _ in cluster.seen) == 9 + surge
    assert min(serving for _, serving in cluster.seen) == 9 - unavailable


async def test_a_surge_of_any_size_starts_one_successor_for_each_worker():
    cluster = ScriptedCluster(prefill=1, decode=2)
    await roll(cluster, RollOrder(OPTIONS, max_surge=1 << 60))
    assert_all_have(cluster, OPTIONS, prefill=1, decode=2)
    assert max(there for there, _ in cluster.seen) == 6


@pytest.mark.parametrize(("surge", "unavailable"), [(1, 0), (2, 0), (0, 1), (1, 1)])
async def test_a_successor_that_does_not_start_stops_it_and_undo_goes_back(
    surge: int, unavailable: int
):
    cluster = ScriptedCluster(prefill=3, decode=2)
    cluster.fails["prefill-4"] = ClusterError("prefill-4 did not start: no room")
    steps = await roll(cluster, RollOrder(OPTIONS, surge, unavailable))
    failed = [(one.worker, one.reason) for one in steps if one.phase is ScalePhase.FAILED]
    assert failed == [("prefill-4", "prefill-4 did not start: no room")]
    assert cluster.open_roll is not None
    assert cluster.open_roll.failed == "prefill-4 did not start: no room"
    assert cluster.revision is FIRST, "workers that are added get the options that work"
    assert set(cluster.workers.values()) == {P, D}
    first = {name for name, one in cluster.revisions_of.items() if one is FIRST}
    kept = first & cluster.workers.keys()
    assert len(kept) >= 5 - surge - unavailable - 1
    await roll(cluster, RollOrder(undo=True))
    assert_all_have(cluster, {}, prefill=3, decode=2)
    assert kept < cluster.workers.keys(), "who had never left is not replaced"
    assert cluster.open_roll is cluster.previous is None


async def test_a_stopped_roll_is_tried_again_with_other_options():
    cluster = ScriptedCluster(prefill=2, decode=1)
    cluster.fails["prefill-3"] = ClusterError("no room")
    await roll(cluster, RollOrder(OPTIONS))
    other = {"max_running": "3"}
    await roll(cluster, RollOrder(other))
    assert_all_have(cluster, other, prefill=2, decode=1)


async def test_a_roll_after_an_undo_that_has_stopped_replaces_what_the_first_one_left():
    cluster = ScriptedCluster(prefill=2, decode=1)
    cluster.fails["prefill-3"] = cluster.fails["prefill-4"] = ClusterError("no room")
    await roll(cluster, RollOrder(OPTIONS))
    await roll(cluster, RollOrder(undo=True))
    assert cluster.open_roll is not None
    assert cluster.open_roll.target is FIRST
    assert cluster.open_roll.failed
    assert cluster.revisions_of["prefill-2"].options == OPTIONS
    other = {"max_running": "3"}
    await roll(cluster, RollOrder(other))
    assert_all_have(cluster, other, prefill=2, decode=1)


async def test_undo_goes_back_and_forth_between_the_last_two():
    cluster = ScriptedCluster(decode=2)
    await roll(cluster, RollOrder(OPTIONS))
    await roll(cluster, RollOrder({"max-running": "3", "chunk-tokens": ""}))
    assert_all_have(cluster, {"max_running": "3"}, decode=2)
    for options in (OPTIONS, {"max_running": "3"}):
        await roll(cluster, RollOrder(undo=True))
        assert_all_have(cluster, options, decode=2)


async def test_options_that_workers_have_already_replace_nobody_and_none_replace_all():
    cluster = ScriptedCluster(decode=2)
    await roll(cluster, RollOrder(OPTIONS))
    before = set(cluster.workers)
    assert await roll(cluster, RollOrder(OPTIONS)) == []
    assert set(cluster.workers) == before
    await roll(cluster, RollOrder())
    assert not before & cluster.workers.keys()
    assert_all_have(cluster, OPTIONS, decode=2)


async def test_undo_ends_a_roll_whose_successor_hangs():
    cluster = ScriptedCluster(decode=2)
    cluster.hangs.add("decode-3")
    rolling = cluster.make_rolling()

    async def listen() -> None:
        async for _ in rolling.roll(RollOrder(OPTIONS)):
            pass

    first = asyncio.create_task(listen())
    while "decode-3" not in cluster.starting:
        await asyncio.sleep(0)
    with pytest.raises(CannotRoll, match="replaced already; --undo goes back"):
        await anext(rolling.roll(RollOrder(OPTIONS)))
    async with asyncio.timeout(SECONDS):
        _ = [step async for step in rolling.roll(RollOrder(undo=True))]
        with pytest.raises(CannotRoll, match="another order has ended this one"):
            await first
    assert not cluster.starting
    assert_all_have(cluster, {}, decode=2)
    assert "decode-1" in cluster.workers, "who had never left is not replaced"


async def order_and_leave(cluster: ScriptedCluster, rolling: Rolling, order: RollOrder) -> None:
    """Order a roll, and be cancelled while it is written down."""
    before = cluster.open_roll
    cluster.store.may_write.clear()
    listening = asyncio.ensure_future(anext(rolling.roll(order)))
    while cluster.open_roll is before:
        await asyncio.sleep(0)
    listening.cancel()
    await asyncio.sleep(0)
    cluster.store.may_write.set()
    with pytest.raises(asyncio.CancelledError):
        await listening


async def test_a_roll_whose_caller_leaves_at_its_beginning_is_made_all_the_same():
    cluster = ScriptedCluster(decode=2)
    rolling = cluster.make_rolling()
    for order, options in ((RollOrder(OPTIONS), OPTIONS), (RollOrder(undo=True), {})):
        async with asyncio.timeout(SECONDS):
            await order_and_leave(cluster, rolling, order)
            assert rolling.is_running
            while rolling.is_running:
                await asyncio.sleep(0)
        assert cluster.open_roll is None
        assert_all_have(cluster, options, decode=2)


async def test_a_cluster_that_stops_begins_no_roll_that_was_ordered_just_before():
    cluster = ScriptedCluster(decode=2)
    cluster.hangs.add("decode-2")
    rolling = cluster.make_rolling()
    first = asyncio.ensure_future(anext(rolling.roll(RollOrder(OPTIONS))))
    while "decode-2" not in cluster.starting:
        await asyncio.sleep(0)
    undo = asyncio.ensure_future(anext(rolling.roll(RollOrder(undo=True))))
    closing = asyncio.create_task(rolling.stop())
    async with asyncio.timeout(SECONDS):
        await closing
        with pytest.raises(CannotRoll, match="the cluster is being stopped"):
            await undo
        await first
    assert not rolling.is_running
    assert not cluster.starting


async def test_who_cannot_be_told_is_waited_for():
    cluster = ScriptedCluster(decode=1)
    cluster.away["decode-0"] = 2
    await roll(cluster, RollOrder(OPTIONS))
    assert_all_have(cluster, OPTIONS, decode=1)


async def test_who_cannot_be_told_is_not_waited_for_once_the_roll_has_stopped():
    cluster = ScriptedCluster(decode=3)
    cluster.away["decode-0"] = 1 << 30
    cluster.fails["decode-4"] = ClusterError("no room")
    steps = await roll(cluster, RollOrder(OPTIONS, max_surge=2))
    failed = {step.worker: step.reason for step in steps if step.phase is ScalePhase.FAILED}
    assert failed == {"decode-4": "no room", "decode-3": "decode-0 stays: it is not up"}
    assert cluster.open_roll is not None
    assert cluster.open_roll.failed == "no room"
    cluster.away.clear()
    await roll(cluster, RollOrder(undo=True))
    assert_all_have(cluster, {}, decode=3)
    assert {"decode-0", "decode-1", "decode-2"} == cluster.workers.keys()


@pytest.mark.parametrize("lost", ["decode-0", "decode-3"])
async def test_who_is_lost_is_not_waited_for_once_the_roll_has_stopped(lost: str):
    """Be it to leave, or to take the place of one that is to leave, which stays then."""
    cluster = ScriptedCluster(decode=3)
    cluster.lost.add(lost)
    cluster.fails["decode-4"] = ClusterError("no room")
    steps = await roll(cluster, RollOrder(OPTIONS, max_surge=2))
    failed = {step.worker: step.reason for step in steps if step.phase is ScalePhase.FAILED}
    assert failed == {"decode-4": "no room", "decode-3": f"{lost} is not up"}
    assert {"decode-0", "decode-1", "decode-2", "decode-3"} == cluster.workers.keys()
    cluster.lost.clear()
    cluster.fails.clear()
    await roll(cluster, RollOrder(OPTIONS))
    assert_all_have(cluster, OPTIONS, decode=3)


async def test_who_stays_though_its_place_was_taken_is_named():
    cluster = ScriptedCluster(decode=3)
    cluster.lost.add("decode-0")
    cluster.fails |= {name: ClusterError("no room") for name in ("decode-4", "decode-5")}
    await roll(cluster, RollOrder(OPTIONS, max_surge=2))
    assert "decode-3" in cluster.workers, "the place of decode-0"
    steps = await roll(cluster, RollOrder(OPTIONS, max_surge=2))
    failed = {step.worker: step.reason for step in steps if step.phase is ScalePhase.FAILED}
    assert failed == {"decode-5": "no room", "decode-0": "decode-0 is not up"}


async def test_another_controller_goes_on_but_not_with_what_has_stopped():
    cluster = ScriptedCluster(decode=3)
    cluster.fails["decode-4"] = ClusterError("no room")
    await roll(cluster, RollOrder(OPTIONS))
    assert cluster.open_roll is not None
    before = set(cluster.workers)
    cluster.make_rolling().resume(cluster.open_roll)
    await asyncio.sleep(0.02)
    assert set(cluster.workers) == before
    cluster.fails.clear()
    rolling = cluster.make_rolling()
    rolling.resume(replace(cluster.open_roll, failed=""))
    async with asyncio.timeout(SECONDS):
        while rolling.is_running:
            await asyncio.sleep(0)
    assert_all_have(cluster, OPTIONS, decode=3)


@pytest.mark.parametrize(
    ("order", "why"),
    [
        (RollOrder(OPTIONS, 0, 0), "max_surge and max_unavailable: one of them"),
        (RollOrder(OPTIONS, 0, 1), "max_unavailable: must be less than .* prefill .* is 1"),
        (RollOrder({"page-size": "4"}), "page_size: workers of one cluster cannot differ in it"),
        (RollOrder({"model": "x"}), "model: is no option of workers alone"),
        (RollOrder({"worker_lease": "7"}), "worker_lease: workers would have leases of 7 s"),
        (RollOrder({"nonsense": "4"}), "nonsense: there is no such option"),
        (RollOrder(undo=True), "undo: there was no roll"),
        (RollOrder(OPTIONS, undo=True), "undo: .* none can be given"),
    ],
)
async def test_what_cannot_be_is_refused_by_name_and_nothing_changes(order: RollOrder, why: str):
    cluster = ScriptedCluster(prefill=1, decode=2)
    with pytest.raises(CannotRoll, match=why):
        await roll(cluster, order)
    assert not cluster.seen
    assert cluster.open_roll is None


async def test_no_roll_begins_while_the_cluster_is_scaled():
    cluster = ScriptedCluster(prefill=1, decode=2)
    cluster.is_scaling = True
    with pytest.raises(CannotRoll, match="the cluster is being scaled"):
        await roll(cluster, RollOrder(OPTIONS))
    assert cluster.open_roll is None


async def test_an_error_that_nobody_expects_stops_it_and_leaves_no_start_behind():
    cluster = ScriptedCluster(decode=3)
    cluster.fails["decode-4"] = RuntimeError("a bug")
    with pytest.raises(ExceptionGroup) as caught:
        await roll(cluster, RollOrder(OPTIONS, max_surge=2))
    assert caught.group_contains(RuntimeError, match="a bug")
    assert not cluster.starting
    assert cluster.open_roll is not None
    assert cluster.open_roll.failed
    await roll(cluster, RollOrder(undo=True))
    assert_all_have(cluster, {}, decode=3)
