"""Routers whose controller leads them to another cluster's workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import grpc
import pytest

from kvrelay.deploy.controller.operators.controller_service import ControllerService
from kvrelay.deploy.controller.operators.scrape_targets import ScrapeTargets
from kvrelay.net.channels import bind, front_server
from kvrelay.net.door_rules import OPERATORS
from kvrelay.router.discovery import StaticDiscovery
from kvrelay.router.remote_discovery import RemoteDiscovery
from kvrelay.router.shifting_discovery import ShiftingDiscovery
from kvrelay.v1 import controller_pb2, controller_pb2_grpc
from kvrelay.wire.cluster_state import ClusterState
from kvrelay.wire.messages import CLUSTER_STATE
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole
from tests.worker_infos import worker_info

from .test_remote_discovery import remote

P, D = WorkerRole.PREFILL, WorkerRole.DECODE
SECONDS = 30
METRICS = "10.0.0.9:9400"


def pair(cluster: str) -> list[WorkerInfo]:
    """A prefill and a decode worker, whose names are those of every cluster."""
    return [
        worker_info(f"{role}-0", role=role, incarnation=f"{role}-0-{cluster}") for role in (P, D)
    ]


@dataclass
class Listed:
    """A controller in this process, as routers and operators know it."""

    discovery: StaticDiscovery
    targets: ScrapeTargets
    address: str
    stop: AsyncExitStack

    async def state(self) -> ClusterState:
        async with grpc.aio.insecure_channel(self.address) as channel:
            stub = controller_pb2_grpc.ControllerServiceStub(channel)
            answer = await stub.GetCluster(controller_pb2.GetClusterRequest())
            return CLUSTER_STATE.from_message(answer)

    async def counts(self) -> tuple[int, int]:
        state = await self.state()
        return state.routers, state.routers_shifted


async def no_state() -> ClusterState:
    return ClusterState("", 1, True, False, 1, 1.0)


@dataclass
class World:
    """Clusters, and one router that was started with the first."""

    a: Listed
    b: Listed
    router: ShiftingDiscovery

    def listed(self) -> dict[str, bool]:
        """The workers' incarnations, and whether they get new requests."""
        return {one.incarnation: not one.draining for one in self.router.endpoints()}

    async def until(self, **gets: bool) -> None:
        """Wait until the clusters of these names are listed so, and no others."""
        wanted = {one.incarnation: new for name, new in gets.items() for one in pair(name)}
        async with asyncio.timeout(SECONDS):
            while self.listed() != wanted:
                await self.router.changed()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:

        async def start(name: str) -> Listed:
            discovery = StaticDiscovery(pair(name))
            targets = ScrapeTargets(name, discovery)
            server = front_server(OPERATORS, 64 << 10)
            controller_pb2_grpc.add_ControllerServiceServicer_to_server(
                ControllerService(discovery, targets, no_state), server
            )
            port = bind(server, "127.0.0.1:0", None)
            await server.start()
            stop = await stack.enter_async_context(AsyncExitStack())
            stop.push_async_callback(server.stop, None)
            return Listed(discovery, targets, f"127.0.0.1:{port}", stop)

        a, b = await start("a"), await start("b")
        router = ShiftingDiscovery(remote(a.address), remote)
        router.metrics_address = METRICS
        await stack.enter_async_context(router.following())
        yield World(a, b, router)


async def until_counted(one: Listed, routers: int, shifted: int) -> None:
    async with asyncio.timeout(SECONDS):
        while await one.counts() != (routers, shifted):
            await asyncio.sleep(0.01)


async def test_new_requests_go_to_the_successor_and_running_ones_stay(world: World):
    assert world.listed() == dict.fromkeys((one.incarnation for one in pair("a")), True)
    await until_counted(world.a, 1, 0)
    assert METRICS.encode() in world.a.targets.json("")
    world.a.discovery.shift_to(world.b.address)
    await world.until(b=True, a=False)
    await until_counted(world.a, 1, 1)
    await until_counted(world.b, 1, 0)
    assert METRICS.encode() not in world.a.targets.json("")
    assert METRICS.encode() in world.b.targets.json("")
    world.a.discovery.replace([], pair("a"))
    await world.until(b=True)
    assert not world.router.awaited(), "who is lost there has no successor of its own"


async def test_a_successor_that_is_named_while_the_router_looks_is_followed(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    router, followed = world.router, asyncio.Event()
    first, make, look = router._followed[0].discovery, router._make, router._follow_successors

    def note(address: str) -> RemoteDiscovery:
        followed.set()
        return make(address)

    def look_before_it_is_named() -> None:
        look()
        monkeypatch.setattr(router, "_follow_successors", look)
        asyncio.get_running_loop().call_soon(first.shift_to, world.b.address)

    monkeypatch.setattr(router, "_make", note)
    monkeypatch.setattr(router, "_follow_successors", look_before_it_is_named)
    first.replace(pair("a"), pair("a"))  # the router looks
    async with asyncio.timeout(SECONDS):
        await followed.wait()


async def test_the_controllers_word_takes_it_back(world: World):
    world.a.discovery.shift_to(world.b.address)
    await world.until(b=True, a=False)
    world.a.discovery.shift_to("")
    await world.until(a=True)
    await until_counted(world.a, 1, 0)
    await until_counted(world.b, 0, 0)
    world.a.discovery.shift_to(world.b.address)
    await world.until(b=True, a=False)


async def test_a_router_that_has_not_come_back_counts_as_away(world: World):
    async with grpc.aio.insecure_channel(world.a.address) as channel:
        stub = controller_pb2_grpc.ControllerServiceStub(channel)
        watching = stub.WatchWorkers(controller_pb2.WatchWorkersRequest(shifted_to=world.b.address))
        await until_counted(world.a, 2, 1)
        watching.cancel()
        await until_counted(world.a, 1, 0)


@pytest.mark.parametrize(
    "misfit",
    [
        lambda one: replace(one, version="0.0.9 (00c0ffee)"),
        lambda one: replace(one, model=replace(one.model, weights="other")),
        lambda one: replace(one, draining=True),
    ],
    ids=["version", "model", "drains"],
)
async def test_a_successor_that_cannot_serve_changes_nothing_until_it_can(world: World, misfit):
    prefill, decode = pair("b")
    world.b.discovery.replace([prefill, misfit(decode)])
    world.a.discovery.shift_to(world.b.address)
    await until_counted(world.b, 1, 0)
    await until_counted(world.a, 1, 0)
    assert world.listed() == dict.fromkeys((one.incarnation for one in pair("a")), True)
    world.b.discovery.replace([prefill, decode])
    await world.until(b=True, a=False)
    world.b.discovery.replace([prefill], [decode])
    async with asyncio.timeout(SECONDS):
        while world.router.awaited() != (decode,):
            await world.router.changed()
    assert not world.listed()[pair("a")[0].incarnation], "a lost worker does not lead back"


async def test_a_predecessor_that_has_ended_is_forgotten_and_the_next_shift_is_followed(
    world: World,
):
    world.a.discovery.shift_to(world.b.address)
    await world.until(b=True, a=False)
    world.a.discovery.replace([])
    await world.until(b=True)
    await world.a.stop.aclose()
    async with asyncio.timeout(SECONDS):
        while len(world.router._followed) > 1:
            await asyncio.sleep(0.01)
    world.b.discovery.replace(pair("b")[:1])
    async with asyncio.timeout(SECONDS):
        while len(world.listed()) > 1:
            await world.router.changed()


async def test_workers_of_a_controller_that_is_away_are_kept_for_as_long_as_they_may_serve(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    world.a.discovery.shift_to(world.b.address)
    await world.until(b=True, a=False)
    await until_counted(world.a, 1, 1)
    await world.a.stop.aclose()
    async with asyncio.timeout(SECONDS):
        while world.router._followed[0].discovery.silent_since is None:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0)
    await world.until(b=True, a=False)
    monkeypatch.setattr("kvrelay.router.shifting_discovery._FORGET_SECONDS", 0.0)
    world.b.discovery.replace(pair("b"), pair("b"))  # the router looks again
    await world.until(b=True)


async def test_controllers_that_name_each_other_are_no_endless_chain(world: World):
    world.b.discovery.shift_to(world.a.address)
    world.a.discovery.shift_to(world.b.address)
    await until_counted(world.b, 1, 1)
    await world.until(a=True, b=False)
    assert len(world.router._followed) == 3
