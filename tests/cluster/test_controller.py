"""A detached controller that dies, and what its next process makes of what it finds."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvrelay.deploy.controller.controller_host import ControllerReport, Stage
from kvrelay.deploy.controller.controller_spec import SPEC, ControllerSpec
from kvrelay.deploy.controller.detached import (
    CONTROLLER,
    bring_up,
    end_cluster,
    start_controller,
    until_leading,
)
from kvrelay.deploy.controller.records.ray_store import RayStore
from kvrelay.deploy.errors import ClusterError
from kvrelay.deploy.nodes.left_over import named_actor
from kvrelay.deploy.nodes.local_ray import ray as ray_module
from kvrelay.deploy.nodes.model_copy import ModelSource, offer_for_good
from kvrelay.deploy.nodes.named_groups import find_groups
from kvrelay.deploy.nodes.ray_places import PlacementPlan
from kvrelay.v1 import admin_pb2, admin_pb2_grpc, controller_pb2, controller_pb2_grpc
from tests.cluster import obedient_controller, obedient_worker
from tests.cluster.obedient_controller import DIED, DIES, ObedientController
from tests.cluster.obedient_worker import give_order, write_at_once
from tests.cluster.supervised import heard, make_configs, runs
from tests.pairwise import few

SECONDS = 60


@pytest.fixture(scope="module", autouse=True)
def by_value(ray) -> Iterator[None]:
    """The code of the tests travels: Ray's processes do not have it on their path."""
    modules = (obedient_worker, obedient_controller)
    for module in modules:
        ray_module.cloudpickle.register_pickle_by_value(module)
    yield
    for module in modules:
        ray_module.cloudpickle.unregister_pickle_by_value(module)


@dataclass
class Led:
    """A cluster with a controller, as commands see it."""

    namespace: str
    store: RayStore
    spec: ControllerSpec
    folder: Path

    @property
    def host(self) -> type[ObedientController]:
        return type("ObedientController", (ObedientController,), {"folder": self.folder})

    async def up(self) -> bool:
        return await start_controller(self.store, self.namespace, self.spec, self.host)

    async def leading(self) -> ControllerReport:
        async with asyncio.timeout(SECONDS):
            return await until_leading(self.namespace)

    def dies(self, point: str) -> None:
        write_at_once(self.folder / DIES, point)

    async def until_dead(self) -> None:
        """Wait until the controller has died where it was told to."""
        async with asyncio.timeout(SECONDS):
            while (self.folder / DIES).exists():
                await asyncio.sleep(0.02)
            while runs(int((self.folder / DIED).read_text())):
                await asyncio.sleep(0.02)

    async def state(self) -> Any:
        """What the controller says of itself, once it can be reached."""
        async with asyncio.timeout(SECONDS):
            while True:
                report = await self.leading()
                try:
                    async with grpc.aio.insecure_channel(report.address) as channel:
                        stub = controller_pb2_grpc.ControllerServiceStub(channel)
                        return await stub.GetCluster(controller_pb2.GetClusterRequest())
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.05)

    async def until_at_rest(self, *names: str) -> Any:
        """Wait until these workers are live, and no others are there."""
        live = controller_pb2.WorkerState.PHASE_LIVE
        async with asyncio.timeout(SECONDS):
            while True:
                state = await self.state()
                workers = [one.name for one in state.workers if one.phase == live]
                others = len(state.workers) - len(names)
                if workers == list(names) and not others and not state.changing:
                    return state
                await asyncio.sleep(0.05)

    async def call(self, method: str, request: Any) -> None:
        """Make an operator's call, which the death of the controller may cut off."""
        address = (await self.leading()).address
        async with grpc.aio.insecure_channel(address) as channel:
            try:
                async for _ in getattr(admin_pb2_grpc.AdminServiceStub(channel), method)(request):
                    pass
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise

    def starts(self, worker: str) -> int:
        """How many times it was started."""
        path = self.folder / f"{worker}.starts"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def pids(self) -> set[int]:
        """Of all processes in which a worker was started."""
        paths = self.folder.glob("*.starts")
        return {int(line) for path in paths for line in path.read_text().splitlines()}

    async def assert_gone(self) -> None:
        """End the cluster, and prove that nothing of it is left."""
        await end_cluster(self.store, self.namespace)
        await self.assert_gone_already()

    async def assert_gone_already(self) -> None:
        """Prove that nothing of the cluster is left."""
        left = [one for one in self.pids() if runs(one)]
        assert not left
        assert not find_groups(self.namespace)
        assert not await self.store.keys("")
        named = ray_module.util.list_named_actors(all_namespaces=True)
        assert not [one for one in named if one["namespace"] == self.namespace]


@pytest.fixture
async def led(ray, tmp_path: Path) -> AsyncIterator[Led]:
    """One whose cluster has a prefill worker and a decode worker, once it is up."""
    name = f"t{uuid.uuid4().hex[:8]}"
    namespace = f"kvrelay/{name}"
    configs = tuple(replace(one, metrics_port=0) for one in make_configs(tmp_path)[:2])
    plan = PlacementPlan(namespace=namespace)
    spec = ControllerSpec(name, configs, plan, 30, advertised={"": "127.0.0.1"})
    cluster = Led(namespace, RayStore.of_this_process(namespace), spec, tmp_path)
    try:
        yield cluster
    finally:
        await end_cluster(cluster.store, namespace)


STARTS = [
    f"{when} {what}"
    for what in (
        "cluster starting",
        "prefill-0 planned",
        "prefill-0 placed",
        "decode-0 placed",
        "decode-0 started",
        "cluster serving",
    )
    for when in ("before", "after")
]


async def test_a_killed_controller_takes_its_workers_over_as_they_are(led: Led):
    assert await led.up()
    before = await led.until_at_rest("decode-0", "prefill-0")
    assert not await led.up(), "it runs already"
    os.kill(before.pid, signal.SIGKILL)
    after = await led.until_at_rest("decode-0", "prefill-0")
    assert (before.epoch, after.epoch) == (1, 2)
    assert after.pid != before.pid
    assert after.workers == before.workers
    assert led.starts("decode-0") == led.starts("prefill-0") == 1
    other = replace(led.spec, port=1)
    with pytest.raises(ClusterError, match="runs in this Ray already, with other options"):
        await start_controller(led.store, led.namespace, other, led.host)
    await led.assert_gone()


@pytest.mark.slow
@pytest.mark.parametrize("point", STARTS)
async def test_killed_while_the_first_workers_start(led: Led, point: str):
    led.dies(point)
    await led.up()
    await led.until_dead()
    await led.until_at_rest("decode-0", "prefill-0")
    assert led.starts("decode-0") == led.starts("prefill-0") == 1
    await led.assert_gone()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ["death of decode-0", "decode-0 started", "no death of decode-0"])
async def test_killed_while_a_worker_is_replaced(led: Led, when: str, what: str):
    await led.up()
    state = await led.until_at_rest("decode-0", "prefill-0")
    dead = state.workers[0]
    led.dies(f"{when} {what}")
    os.kill(dead.pid, signal.SIGKILL)
    await led.until_dead()
    state = await led.until_at_rest("decode-0", "prefill-0")
    assert state.workers[0].incarnation != dead.incarnation
    assert (led.starts("decode-0"), led.starts("prefill-0")) == (2, 1)
    async with asyncio.timeout(SECONDS):
        while dead.incarnation not in heard(led.folder, "prefill-0"):
            await asyncio.sleep(0.02)
    await led.assert_gone()


@pytest.mark.slow
async def test_a_worker_that_dies_with_its_controller_is_replaced_and_told_of(led: Led):
    await led.up()
    state = await led.until_at_rest("decode-0", "prefill-0")
    dead = state.workers[0]
    os.kill(state.pid, signal.SIGKILL)
    os.kill(dead.pid, signal.SIGKILL)
    state = await led.until_at_rest("decode-0", "prefill-0")
    assert state.workers[0].incarnation != dead.incarnation
    assert (led.starts("decode-0"), led.starts("prefill-0")) == (2, 1)
    async with asyncio.timeout(SECONDS):
        while heard(led.folder, "prefill-0")[-1:] != [dead.incarnation]:
            await asyncio.sleep(0.02)
    await led.assert_gone()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ["decode-0 started draining", "death of decode-0"])
async def test_killed_while_a_worker_drains(led: Led, when: str, what: str):
    await led.up()
    before = await led.until_at_rest("decode-0", "prefill-0")
    led.dies(f"{when} {what}")
    give_order(led.folder, "decode-0", "leave", "now")
    await led.call("DrainWorker", admin_pb2.DrainWorkerRequest(worker="decode-0"))
    await led.until_dead()
    after = await led.until_at_rest("decode-0", "prefill-0")
    drained = f"{when} {what}" != "before decode-0 started draining"
    if drained:
        async with asyncio.timeout(SECONDS):
            while after.workers[0].incarnation == before.workers[0].incarnation:
                after = await led.until_at_rest("decode-0", "prefill-0")
    assert (led.starts("decode-0"), led.starts("prefill-0")) == (1 + drained, 1)
    await led.assert_gone()


GROWS = ["cluster serving changing", "decode-1 planned", "decode-1 started"]
SHRINKS = [
    "cluster serving changing",
    "decode-1 started draining removing",
    "death of decode-1",
    "no worker decode-1",
]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", [*GROWS, "cluster serving"])
async def test_killed_while_the_cluster_grows(led: Led, when: str, what: str):
    await led.up()
    await led.until_at_rest("decode-0", "prefill-0")
    led.dies(f"{when} {what}")
    await led.call("ScaleWorkers", admin_pb2.ScaleWorkersRequest(decode=2))
    await led.until_dead()
    grown = (when, what) != ("before", "cluster serving changing")
    workers = ["decode-0", "decode-1", "prefill-0"] if grown else ["decode-0", "prefill-0"]
    await led.until_at_rest(*workers)
    assert [led.starts(name) for name in workers] == [1] * len(workers)
    await led.assert_gone()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", [*SHRINKS, "cluster serving"])
async def test_killed_while_the_cluster_shrinks(led: Led, when: str, what: str):
    await led.up()
    await led.call("ScaleWorkers", admin_pb2.ScaleWorkersRequest(decode=2))
    await led.until_at_rest("decode-0", "decode-1", "prefill-0")
    led.dies(f"{when} {what}")
    give_order(led.folder, "decode-1", "leave", "now")
    await led.call("ScaleWorkers", admin_pb2.ScaleWorkersRequest(decode=1))
    await led.until_dead()
    shrunk = (when, what) != ("before", "cluster serving changing")
    await led.until_at_rest("decode-0", *([] if shrunk else ["decode-1"]), "prefill-0")
    assert (led.starts("decode-0"), led.starts("decode-1"), led.starts("prefill-0")) == (1, 1, 1)
    await led.assert_gone()


@pytest.mark.slow
@pytest.mark.parametrize("point", ["before cluster stopping", "after cluster stopping"])
async def test_killed_while_it_ends_its_workers(led: Led, point: str):
    await led.up()
    await led.until_at_rest("decode-0", "prefill-0")
    led.dies(point)
    await led.assert_gone()


@pytest.mark.slow
async def test_workers_that_do_not_start_are_said_and_leave_nothing(led: Led):
    give_order(led.folder, "decode-0", "start", "refuse")
    await led.up()
    with pytest.raises(ClusterError, match=r"^decode-0 did not start: kv_memory"):
        await led.leading()
    controller: Any = named_actor(led.namespace, CONTROLLER)
    report = await controller.report.remote()
    assert report.stage is Stage.FAILED
    os.kill(report.pid, signal.SIGKILL)
    with pytest.raises(ClusterError, match=r"^decode-0 did not start: kv_memory"):
        await led.leading()
    await led.assert_gone()


def actors_of(namespace: str) -> set[str]:
    named = ray_module.util.list_named_actors(all_namespaces=True)
    return {one["name"] for one in named if one["namespace"] == namespace}


async def test_what_is_refused_offers_no_model_and_what_is_left_without_a_name_is_ended(led: Led):
    offered = ((led.folder, {"config.json": "0" * 64}),)
    await led.store.put(SPEC, replace(led.spec, port=1).to_bytes())
    with pytest.raises(ClusterError, match="with other options"):
        await bring_up(led.store, led.namespace, led.spec, host=led.host, checkpoints=offered)
    assert not actors_of(led.namespace)
    assert await led.store.keys("") == [SPEC], "the other cluster stays as it is"
    await led.store.delete(SPEC)
    assert not await end_cluster(led.store, led.namespace), "there is none"
    ours = ray_module.remote(ModelSource).options(
        name="decode-7", namespace=led.namespace, num_cpus=0
    )
    of_serve = ours.remote({})
    await asyncio.to_thread(offer_for_good, led.namespace, *offered)
    assert await end_cluster(led.store, led.namespace)
    assert actors_of(led.namespace) == {"decode-7"}, "a serve's workers end with it"
    ray_module.kill(of_serve)


@few(1)
@pytest.mark.parametrize("named", [True, False])
async def test_a_signal_while_the_controller_starts_leaves_nothing(led: Led, named: bool):
    offered = ((led.folder, {"config.json": "0" * 64}),)
    begun = asyncio.create_task(
        bring_up(led.store, led.namespace, led.spec, host=led.host, checkpoints=offered)
    )
    if named:
        async with asyncio.timeout(SECONDS):
            while not await led.store.keys(SPEC):
                await asyncio.sleep(0)
    else:
        await asyncio.sleep(0)
    begun.cancel()
    with pytest.raises(asyncio.CancelledError):
        await begun
    await led.assert_gone_already()
