"""What a controller answers to operators, routers and Prometheus; Ray is scripted."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import cast

import grpc
import pytest

from kvrelay.deploy.controller.controller_host import _serve
from kvrelay.deploy.controller.controller_spec import ControllerSpec
from kvrelay.deploy.controller.records.key_value_store import InProcessStore
from kvrelay.deploy.nodes.ray_places import PlacementPlan
from kvrelay.net.door_rules import OPERATORS, MethodRule
from kvrelay.v1 import admin_pb2, admin_pb2_grpc, controller_pb2, controller_pb2_grpc
from tests.deploy import scripted_ray
from tests.deploy.scripted_ray import World, make_cluster

world, make_world = scripted_ray.world, scripted_ray.make_world
"""Fixtures, which script Ray."""


async def test_a_controller_serves_operators_routers_and_prometheus(
    make_world: Callable[[], World], tmp_path: Path
):
    make_world()
    plan = PlacementPlan(namespace="kvrelay/t")
    spec = ControllerSpec("t", (), plan, 30, advertised={"": "127.0.0.1"})
    async with AsyncExitStack() as undo:
        cluster = await undo.enter_async_context(make_cluster(tmp_path, InProcessStore()))
        address, metrics = await _serve(undo, spec, cluster)
        channel = await undo.enter_async_context(grpc.aio.insecure_channel(address))
        stub = controller_pb2_grpc.ControllerServiceStub(channel)
        state = await stub.GetCluster(controller_pb2.GetClusterRequest())
        assert (state.name, state.epoch, state.leads, state.changing) == ("t", 1, True, False)
        assert [one.name for one in state.workers] == ["decode-0", "prefill-0"]
        listed = await stub.WatchWorkers(controller_pb2.WatchWorkersRequest()).read()
        assert {one.name for one in listed.endpoints} == {"decode-0", "prefill-0"}
        drain = admin_pb2.DrainWorkerRequest(worker="decode-0")
        steps = [one async for one in admin_pb2_grpc.AdminServiceStub(channel).DrainWorker(drain)]
        assert all(step.requests_unknown for step in steps if step.phase == step.PHASE_DRAINING)
        assert steps[-1].phase == admin_pb2.DrainWorkerResponse.PHASE_READY
        page = await asyncio.to_thread(read, f"http://{metrics}/metrics")
        ends = r'kvrelay_worker_ends_total\{[^}]*worker="decode-0"[^}]*\} 1\.0'
        assert re.search(ends, page), page
        targets = json.loads(await asyncio.to_thread(read, f"http://{metrics}/sd"))
        named = {one["labels"]["instance"] for one in targets}
        assert named == {"controller", "prefill-0", "decode-0"}


@pytest.mark.parametrize(("failures", "is_awaited"), [(2, True), (3, False)])
async def test_nobody_waits_for_a_worker_that_fails_to_start_again_and_again(
    make_world: Callable[[], World], tmp_path: Path, failures: int, is_awaited: bool
):
    world = make_world()
    async with asyncio.timeout(60), make_cluster(tmp_path, InProcessStore()) as cluster:
        before, actor = cluster.workers["decode-0"], world.actors["decode-0"]
        actor.failing_starts = failures
        actor.kill()
        while "decode-0" in cluster.workers:
            await cluster.discovery.changed()
        assert list(cluster.discovery.awaited()) == [before]
        await actor.has_failed.wait()
        assert list(cluster.discovery.awaited()) == ([before] if is_awaited else [])
        actor.may_start.set()
        while "decode-0" not in cluster.workers:
            await cluster.discovery.changed()
        assert not cluster.discovery.awaited()


async def test_a_message_that_does_not_come_ends_the_call(
    make_world: Callable[[], World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    method = "/kvrelay.v1.ControllerService/GetCluster"
    hasty = replace(OPERATORS.methods[method], receive_seconds=0.1)
    monkeypatch.setitem(cast("dict[str, MethodRule]", OPERATORS.methods), method, hasty)
    make_world()
    plan = PlacementPlan(namespace="kvrelay/t")
    spec = ControllerSpec("t", (), plan, 30, advertised={"": "127.0.0.1"})
    async with asyncio.timeout(60), AsyncExitStack() as undo:
        cluster = await undo.enter_async_context(make_cluster(tmp_path, InProcessStore()))
        address, _ = await _serve(undo, spec, cluster)
        channel = await undo.enter_async_context(grpc.aio.insecure_channel(address))
        silent = channel.stream_stream(method)()
        assert await silent.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def read(url: str) -> str:
    with urllib.request.urlopen(url) as response:
        text: str = response.read().decode()
        return text
