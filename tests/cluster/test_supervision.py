"""Workers that fail when they are told to, under their real supervisors in a real Ray."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrelay.deploy.controller.changes.steps import DrainPhase
from kvrelay.deploy.controller.cluster import Cluster
from kvrelay.deploy.controller.cluster_thread import ClusterThread
from kvrelay.deploy.errors import ClusterError
from kvrelay.deploy.nodes.local_ray import ray as ray_module
from kvrelay.deploy.nodes.ray_places import PlacementPlan
from kvrelay.deploy.nodes.worker_actor import WorkerActor
from kvrelay.deploy.nodes.worker_end import WorkerEnd
from kvrelay.deploy.nodes.worker_host import WorkerHost
from kvrelay.router.errors import CannotDrain, UnknownWorker
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole
from tests.cluster.obedient_worker import ObedientHost, give_order
from tests.cluster.supervised import (
    SECONDS,
    TIMEOUT_SECONDS,
    heard,
    is_running,
    make_configs,
    next_life,
    runs,
    until,
    was_told,
)
from tests.pairwise import few

pytestmark = pytest.mark.usefixtures("obedient_workers")


def make_cluster(folder: Path) -> Cluster:
    return Cluster(make_configs(folder))


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("orders")


@pytest.fixture(scope="module")
async def cluster(obedient_workers, orders: Path) -> AsyncIterator[Cluster]:
    async with make_cluster(orders) as cluster:
        yield cluster


@pytest.fixture(scope="module")
async def on_thread(
    obedient_workers, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[ClusterThread, Path]]:
    """A cluster that is supervised on another thread, and where its orders lie."""
    folder = tmp_path_factory.mktemp("orders")
    async with ClusterThread(make_configs(folder)[:2]) as cluster:
        yield cluster, folder


@contextlib.contextmanager
def one_more_end(cluster: Cluster, worker: str, cause: WorkerEnd) -> Iterator[None]:
    """Fail unless the controller counts one end of the worker meanwhile, and by this cause."""

    def ends() -> Counter[str]:
        families = cluster.metrics.registry.collect()
        samples = [one for family in families for one in family.samples]
        of_worker = [
            one
            for one in samples
            if one.name == "kvrelay_worker_ends_total" and one.labels["worker"] == worker
        ]
        return Counter({one.labels["cause"]: int(one.value) for one in of_worker})

    before = ends()
    yield
    assert ends() - before == Counter({cause.value: 1})


class LostCalls:
    """Lets Ray say of a method's next calls that the actor cannot be reached, without telling it.

    Args:
        method: of the workers' host.
        times: after which its calls arrive again.
    """

    def __init__(self, method: Callable[..., Any], times: float) -> None:
        self._method, self.left = method, times
        self.answered = 0
        """Calls of the method that arrived, and have their answers."""
        self._call = WorkerActor.call

    def install(self, patch: pytest.MonkeyPatch) -> None:
        async def call(actor: WorkerActor, method: Callable[..., Any], *args: Any) -> Any:
            if method == self._method and self.left > 0:
                self.left -= 1
                raise ray_module.exceptions.ActorUnavailableError("the connection broke", None)
            answer = await self._call(actor, method, *args)
            self.answered += method == self._method
            return answer

        patch.setattr(WorkerActor, "call", call)


@few(2)
@pytest.mark.parametrize(
    ("order", "line"),
    [
        ("refuse", "decode-0 did not start: kv_memory: 1 byte does not hold one page"),
        ("miss", "decode-0 did not start: the package nixl is missing"),
        ("port", "decode-0 did not start: --metrics: port 9402 is in use"),
        ("crash", "decode-0 did not start: its process died"),
    ],
)
async def test_a_first_start_that_fails_is_one_line_and_not_repeated(
    tmp_path: Path, order: str, line: str
):
    give_order(tmp_path, "decode-0", "start", order)
    decode, aggregated = make_configs(tmp_path)[1:]
    cluster = Cluster([decode, aggregated] if order == "refuse" else [decode])
    with pytest.raises(ClusterError) as caught:
        await cluster.start()
    assert str(caught.value) == line
    assert cluster.workers == {}
    assert cluster.discovery.endpoints() == ()


async def test_a_first_start_that_hangs_is_bounded(tmp_path: Path):
    give_order(tmp_path, "decode-0", "start", "hang")
    [config] = [one for one in make_configs(tmp_path) if one.role is WorkerRole.DECODE]
    progress: list[Mapping[str, float]] = []
    for seconds in (8, 16, 32):
        cluster = Cluster([replace(config, start_timeout=seconds)], on_progress=progress.append)
        with pytest.raises(ClusterError) as caught:
            await cluster.start()
        assert str(caught.value) == (
            f"decode-0 did not start within {seconds} s: raise --start-timeout"
        )
        if progress:  # else its process was not born yet: the machine is busy
            break
        give_order(tmp_path, "decode-0", "start", "hang")
    assert progress[-1] == {"decode-0": 0.5}


async def test_live_workers_are_discovered(cluster: Cluster):
    endpoints = cluster.discovery.endpoints()
    assert [one.name for one in endpoints] == ["aggregated-0", "decode-0", "prefill-0"]
    for endpoint in endpoints:
        assert endpoint.incarnation == cluster.workers[endpoint.name].incarnation


async def test_a_killed_worker_comes_back_as_another_and_its_peer_is_told(
    cluster: Cluster, orders: Path
):
    first = cluster.workers["decode-0"]
    with one_more_end(cluster, "decode-0", WorkerEnd.LOST):
        os.kill(first.pid, signal.SIGKILL)
        second = await next_life(cluster, first)
    assert second.incarnation != first.incarnation
    assert second.pid != first.pid
    await until(lambda: was_told(orders, "prefill-0", first))
    ends = {worker.name: worker.last_end for worker in (await cluster.state()).workers}
    assert "died" in ends["decode-0"], "operators see why"


async def test_a_death_is_told_when_the_process_has_ended_not_when_the_next_answers(
    cluster: Cluster, orders: Path
):
    await dies_and_is_told_of_at_once(cluster, orders, cluster.workers["decode-0"])


async def dies_and_is_told_of_at_once(cluster: Cluster, orders: Path, first: WorkerInfo) -> None:
    """While none of the successor's processes can answer anybody."""
    begun, hold = orders / f"{first.name}.begun", orders / f"{first.name}.hold"
    begun.unlink()
    hold.touch()
    try:
        os.kill(first.pid, signal.SIGKILL)
        await until(lambda: was_told(orders, "prefill-0", first))
        assert not begun.exists()
        assert first.name not in cluster.workers
        assert not is_running(first)
    finally:
        hold.unlink()
    await next_life(cluster, first)


async def test_a_stopped_worker_is_killed_before_its_death_is_told(cluster: Cluster, orders: Path):
    first = cluster.workers["prefill-0"]
    os.kill(first.pid, signal.SIGSTOP)
    await until(lambda: was_told(orders, "decode-0", first))
    assert not is_running(first)
    await next_life(cluster, first)


async def test_a_worker_whose_engine_died_ends_and_comes_back(cluster: Cluster, orders: Path):
    first = cluster.workers["prefill-0"]
    with one_more_end(cluster, "prefill-0", WorkerEnd.ENGINE_FAILED):
        give_order(orders, "prefill-0", "fail", "now")
        second = await next_life(cluster, first)
    assert second.pid != first.pid
    await until(lambda: was_told(orders, "decode-0", first))


async def test_a_restart_that_fails_is_counted_and_tried_again_in_a_fresh_process(
    cluster: Cluster,
    orders: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setattr("kvrelay.deploy.controller.supervision.supervisor._MOST_FAILED_STARTS", 1)
    first = cluster.workers["decode-0"]
    give_order(orders, "decode-0", "start", "crash")
    os.kill(first.pid, signal.SIGKILL)
    second = await next_life(cluster, first)
    assert second.incarnation != first.incarnation
    assert not (orders / "decode-0.start").exists()
    assert "decode-0 fails to start again and again" in caplog.text


async def test_a_worker_that_could_not_be_reached_is_told_what_it_missed(
    cluster: Cluster, orders: Path
):
    first = cluster.workers["decode-0"]
    deaf = cluster.workers["prefill-0"]
    cluster.worker_lost(deaf)  # as its supervisor does for one that Ray cannot reach
    os.kill(first.pid, signal.SIGKILL)
    second = await next_life(cluster, first)
    assert first.incarnation not in heard(orders, "prefill-0")
    cluster.worker_live(deaf)
    await until(lambda: first.incarnation in heard(orders, "prefill-0"))
    assert second.incarnation not in heard(orders, "prefill-0")
    assert not any(name.startswith("prefill-0") for name in heard(orders, "prefill-0"))


async def test_a_worker_that_fails_on_the_news_of_a_death_is_said(
    cluster: Cluster, orders: Path, caplog: pytest.LogCaptureFixture
):
    first = cluster.workers["decode-0"]
    give_order(orders, "prefill-0", "told", "badly")
    os.kill(first.pid, signal.SIGKILL)
    await next_life(cluster, first)
    await until(lambda: "prefill-0 failed on the death of" in caplog.text)
    assert "not in the mood" in caplog.text


async def test_a_watch_that_fails_at_once_is_repeated_ever_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def broken(self: ObedientHost, incarnation: str) -> None:
        raise RuntimeError("no watching today")

    monkeypatch.setattr(ObedientHost, "watch", broken)
    async with Cluster(make_configs(tmp_path)[:2]) as cluster:
        changes = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2):
                while True:
                    await cluster.discovery.changed()
                    changes += 1
    # Pauses of 0.1, 0.2, 0.4 and 0.8 s, two workers, lost and live.
    assert 2 <= changes <= 24


async def test_a_worker_whose_engine_is_silent_is_killed_and_replaced(
    cluster: Cluster, orders: Path, caplog: pytest.LogCaptureFixture
):
    first = cluster.workers["prefill-0"]
    with one_more_end(cluster, "prefill-0", WorkerEnd.SILENT):
        give_order(orders, "prefill-0", "heartbeat", "inf")
        second = await next_life(cluster, first)
    assert second.pid != first.pid
    assert not is_running(first)
    assert f"{first.incarnation} is lost: it has not answered for 3 s" in caplog.text
    await until(lambda: was_told(orders, "decode-0", first))


async def test_a_process_that_takes_long_to_begin_is_not_killed_for_ever(
    cluster: Cluster, orders: Path
):
    first = cluster.workers["decode-0"]
    slow = str(TIMEOUT_SECONDS * 1.5)
    give_order(orders, "decode-0", "born", *[slow] * 5)
    os.kill(first.pid, signal.SIGKILL)
    await next_life(cluster, first)
    assert (orders / "decode-0.born").exists(), "every slow life was cut short"
    (orders / "decode-0.born").unlink()


@pytest.mark.slow  # the next one stalls the loop, too
async def test_a_stall_of_the_routers_loop_costs_no_worker(
    on_thread: tuple[ClusterThread, Path], caplog: pytest.LogCaptureFixture
):
    cluster, folder = on_thread
    before = dict(cluster.workers)
    await heartbeat_begins(folder, "decode-0", seconds=TIMEOUT_SECONDS / 6)
    time.sleep(TIMEOUT_SECONDS + 1)  # noqa: ASYNC251 (the stall)
    await heartbeat_begins(folder, "decode-0", seconds=0)
    assert cluster.workers == before
    assert "is lost" not in caplog.text


async def heartbeat_begins(orders: Path, worker: str, *, seconds: float) -> None:
    """Wait until a heartbeat is on its way that takes so long."""
    give_order(orders, worker, "heartbeat", str(seconds))
    await until(lambda: not (orders / f"{worker}.heartbeat").exists())


async def test_a_dead_worker_is_replaced_while_the_routers_loop_stalls(
    on_thread: tuple[ClusterThread, Path],
):
    cluster, folder = on_thread
    first = cluster.workers["decode-0"]
    os.kill(first.pid, signal.SIGKILL)
    give_up_at = time.monotonic() + SECONDS
    while not was_told(folder, "prefill-0", first):
        assert time.monotonic() < give_up_at
        time.sleep(0.02)  # noqa: ASYNC251 (the stall)
    assert cluster.workers["decode-0"] == first, "this loop has not run since"
    await cluster.discovery.changed()
    await until(lambda: first in cluster.discovery.awaited() or "decode-0" in cluster.workers)
    second = await next_life(cluster, first)
    listed = {one.incarnation for one in cluster.discovery.endpoints()}
    assert second.incarnation in listed
    assert first.incarnation not in listed


@pytest.mark.slow  # tests/cluster/test_scale.py removes a worker through a thread, too
async def test_a_drain_on_another_thread_tells_of_its_phases(
    on_thread: tuple[ClusterThread, Path],
):
    cluster, folder = on_thread
    first = cluster.workers["prefill-0"]
    give_order(folder, "prefill-0", "leave", "now")
    steps = []
    async with asyncio.timeout(SECONDS):
        async for step in cluster.drain("prefill-0", remove=False):
            steps.append(step)
            if step.phase is not DrainPhase.DRAINING:
                assert cluster.workers.get("prefill-0") != first, "the list is no older"
    assert [step.phase for step in steps] == list(DrainPhase)
    assert cluster.workers["prefill-0"].incarnation == steps[-1].incarnation
    with pytest.raises(UnknownWorker):
        await anext(cluster.drain("decode-9", remove=False))


async def drained_by_signal(cluster: Cluster, worker: str) -> None:
    os.kill(cluster.workers[worker].pid, signal.SIGTERM)


async def drained_by_call(cluster: Cluster, worker: str) -> None:
    steps = aiter(cluster.drain(worker, remove=False))
    assert (await anext(steps)).phase is DrainPhase.DRAINING


@pytest.mark.parametrize(
    "drain", [drained_by_signal, pytest.param(drained_by_call, marks=pytest.mark.slow)]
)
async def test_a_worker_that_drains_is_listed_until_its_successor_is_live(
    cluster: Cluster, orders: Path, drain
):
    first = cluster.workers["decode-0"]
    await drain(cluster, "decode-0")
    await until(lambda: "decode-0" in draining(cluster))
    assert cluster.workers["decode-0"] == first
    listed = incarnations(cluster)
    give_order(orders, "decode-0", "leave", "now")
    while "decode-0" in cluster.workers:
        assert incarnations(cluster) == listed
        await cluster.discovery.changed()
    assert "decode-0" in draining(cluster)
    second = await next_life(cluster, first)
    assert not draining(cluster)
    assert incarnations(cluster) == listed - {first.incarnation} | {second.incarnation}
    assert not is_running(first)
    assert (orders / "decode-0.stopped").exists()
    await until(lambda: was_told(orders, "prefill-0", first))


async def test_a_drain_tells_of_its_phases(cluster: Cluster, orders: Path):
    first = cluster.workers["prefill-0"]
    give_order(orders, "prefill-0", "leave", "now")
    with one_more_end(cluster, "prefill-0", WorkerEnd.DRAINED):
        async with asyncio.timeout(SECONDS):
            steps = [step async for step in cluster.drain("prefill-0", remove=False)]
    assert [step.phase for step in steps] == list(DrainPhase)
    second = cluster.workers["prefill-0"]
    assert [step.incarnation for step in steps] == [first.incarnation] * 2 + [second.incarnation]


async def test_a_drain_that_is_lost_on_its_way_is_told_again(
    cluster: Cluster, orders: Path, monkeypatch: pytest.MonkeyPatch
):
    first = cluster.workers["prefill-0"]
    LostCalls(WorkerHost.begin_drain, 2).install(monkeypatch)
    give_order(orders, "prefill-0", "leave", "now")
    async with asyncio.timeout(SECONDS):
        steps = [step async for step in cluster.drain("prefill-0", remove=False)]
    assert [step.phase for step in steps] == list(DrainPhase)
    assert not is_running(first)


async def test_what_cannot_be_drained_is_said(cluster: Cluster):
    with pytest.raises(UnknownWorker) as unknown:
        await anext(cluster.drain("decode-9", remove=False))
    names = "aggregated-0, decode-0, prefill-0"
    assert str(unknown.value) == f"worker: there is no 'decode-9'; the workers are: {names}"
    with pytest.raises(CannotDrain, match=r"^remove: decode-0 is the last decode worker$"):
        await anext(cluster.drain("decode-0", remove=True))


async def test_a_second_sigterm_does_not_wait(cluster: Cluster):
    first = cluster.workers["prefill-0"]
    os.kill(first.pid, signal.SIGTERM)
    await until(lambda: "prefill-0" in draining(cluster))
    os.kill(first.pid, signal.SIGTERM)
    await next_life(cluster, first)


@pytest.mark.slow  # `tests/deploy/test_drain_turns.py` has the turns without processes
async def test_workers_with_old_quarantine_drain_one_after_another(tmp_path: Path):
    """And one whose memory came back meanwhile does not."""
    config = make_configs(tmp_path)[0]
    names = [f"prefill-{number}" for number in range(3)]
    async with Cluster([replace(config, name=name, metrics_port=0) for name in names]) as cluster:
        for name in names:
            give_order(tmp_path, name, "old", "yes")
        for healed in (False, True):
            await until(lambda: bool(draining(cluster)))
            [name] = draining(cluster)
            first = cluster.workers[name]
            others = [one for one in names if (tmp_path / f"{one}.old").exists()]
            if healed:
                for other in others:
                    (tmp_path / f"{other}.old").unlink()
            give_order(tmp_path, name, "leave", "now")
            await next_life(cluster, first)
            assert set(cluster.workers) == set(names)
        await until(lambda: all((tmp_path / f"{name}.asked").exists() for name in names))
        assert not draining(cluster)


@pytest.mark.slow  # test_scale.py removes one in `make test`
async def test_a_removed_worker_does_not_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = make_configs(tmp_path)[0]
    configs = [config, replace(config, name="prefill-1")]
    async with Cluster(configs) as cluster:
        removed = cluster.workers["prefill-0"]
        with monkeypatch.context() as patch:
            LostCalls(WorkerHost.begin_drain, math.inf).install(patch)
            with pytest.raises(CannotDrain, match="could not be told: it cannot be reached"):
                await anext(cluster.drain("prefill-0", remove=True))
            assert not draining(cluster)
        give_order(tmp_path, "prefill-0", "leave", "now")
        async with asyncio.timeout(SECONDS):
            steps = [step async for step in cluster.drain("prefill-0", remove=True)]
        assert [step.phase for step in steps] == [DrainPhase.DRAINING, DrainPhase.LEFT]
        assert [one.name for one in cluster.discovery.endpoints()] == ["prefill-1"]
        await until(lambda: heard(tmp_path, "prefill-1") == [removed.incarnation])
        await asyncio.sleep(2)
        assert list(cluster.workers) == ["prefill-1"]
        with pytest.raises(UnknownWorker, match=r"the workers are: prefill-1$"):
            await anext(cluster.drain("prefill-0", remove=False))


def draining(cluster: Cluster) -> set[str]:
    return {one.name for one in cluster.discovery.endpoints() if one.draining}


def incarnations(cluster: Cluster) -> set[str]:
    return {one.incarnation for one in cluster.discovery.endpoints()}


async def test_stopping_is_in_good_order_and_ends_every_process(tmp_path: Path):
    async with make_cluster(tmp_path) as cluster:
        workers = list(cluster.workers.values())
    assert cluster.discovery.endpoints() == ()
    assert (tmp_path / "decode-0.stopped").exists()
    assert (tmp_path / "prefill-0.stopped").exists()
    assert not any(map(is_running, workers))


async def test_stopping_waits_for_a_worker_that_starts_again_however_often_it_is_cancelled(
    tmp_path: Path,
):
    [config] = [one for one in make_configs(tmp_path) if one.role is WorkerRole.DECODE]
    cluster = Cluster([config])
    await cluster.start()
    give_order(tmp_path, "decode-0", "start", "hang")
    os.kill(cluster.workers["decode-0"].pid, signal.SIGKILL)
    hangs = tmp_path / "decode-0.hangs"
    await until(lambda: hangs.exists() and bool(hangs.read_text()))
    stopping = asyncio.create_task(cluster.stop())
    for _ in range(3):
        await asyncio.sleep(0)
        stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert not runs(int(hangs.read_text()))


async def test_more_workers_than_ray_has_room_for_is_said(tmp_path: Path):
    config = make_configs(tmp_path)[0]
    plan = PlacementPlan(wait_seconds=0.5)
    with pytest.raises(ClusterError, match="Ray has no room for 1000 prefill workers"):
        await Cluster([config] * 1000, plan=plan).start()
