"""Requests while the controller is away, and the commands that start, change and end a cluster."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvrelay.deploy.commands.controller_status import ask
from kvrelay.deploy.commands.router import _discovery
from kvrelay.deploy.commands.up import make_spec
from kvrelay.deploy.controller.detached import end_cluster, start_controller, until_leading
from kvrelay.deploy.controller.records.ray_store import RayStore
from kvrelay.deploy.nodes.joined_ray import namespace_of
from kvrelay.deploy.nodes.local_ray import ray as ray_module
from kvrelay.deploy.nodes.models import ModelFolder
from kvrelay.deploy.options.listen_address import Address
from kvrelay.deploy.options.serve_options import RouterProcessOptions
from kvrelay.deploy.options.up_options import UpOptions
from kvrelay.deploy.reach.find_controller import Controller
from kvrelay.deploy.reach.grpc_target import OPEN
from kvrelay.deploy.router_config import router_config
from kvrelay.router.config import PlacementMode
from kvrelay.router.router import Router
from kvrelay.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from kvrelay.wire.cluster_state import ClusterState
from tests.cluster.running import Cluster
from tests.cluster.supervised import runs

pytestmark = pytest.mark.slow
SECONDS = 120
ANYWHERE = Address("127.0.0.1", 0)
TOKENS = 200


@dataclass
class Routed(Cluster):
    """A cluster with a detached controller, through a router that follows it."""

    router: Router
    controller: Controller

    @property
    def metrics_addresses(self) -> list[str]:
        return [self.router.metrics_address]

    async def state(self) -> ClusterState:
        return await asyncio.to_thread(ask, self.controller, OPEN)

    async def until_led_by(self, epoch: int) -> ClusterState:
        async with asyncio.timeout(SECONDS):
            while True:
                try:
                    state = await self.state()
                    if state.epoch >= epoch:
                        return state
                except Exception:
                    pass
                await asyncio.sleep(0.05)

    async def until_routed_to(self, *workers: str) -> None:
        async with asyncio.timeout(SECONDS):
            while sorted(one.worker for one in await self.status()) != sorted(workers):
                await asyncio.sleep(0.05)


@pytest.fixture
def name(ray) -> str:
    return f"t{uuid.uuid4().hex[:8]}"


@asynccontextmanager
async def routed(path: Path, name: str, **more: Any) -> AsyncIterator[Routed]:
    """Args: more: options of the workers."""
    head = ray_module.get_runtime_context().gcs_address
    namespace = namespace_of(name)
    model = ModelFolder("tiny", path)
    shared: dict[str, Any] = {"dtype": "float32", "placement": PlacementMode.DISAGGREGATED}
    options = UpOptions(
        ray_address=head,
        cluster_name=name,
        advertise="127.0.0.1",
        metrics=ANYWHERE,
        audit_pages=True,
        kv_memory=4 << 20,
        threads=1,
        worker_timeout=5.0,
        **shared,
        **more,
    )
    store = RayStore.of_this_process(namespace)
    controller = Controller(None, head, name)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(end_cluster, store, namespace)
        await start_controller(store, namespace, make_spec(options, model, namespace))
        await until_leading(namespace)
        router_options = RouterProcessOptions(
            grpc=ANYWHERE, http=ANYWHERE, metrics=ANYWHERE, **shared
        )
        discovery = _discovery(controller, OPEN)
        router = Router(router_config(router_options, model), discovery)
        await router.start()
        stack.push_async_callback(router.stop)
        await stack.enter_async_context(discovery.following())
        await router.wait_ready()
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(router.grpc_address))
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        yield Routed(stub, router, controller)


async def scale(address: str, **counts: int) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        async for step in stub.ScaleWorkers(admin_pb2.ScaleWorkersRequest(**counts)):
            assert step.phase != admin_pb2.ScaleWorkersResponse.PHASE_FAILED, step.reason


async def test_requests_go_on_while_the_controller_is_away(tiny: Path, name: str):
    async with routed(tiny, name) as cluster:
        before = await cluster.state()
        prompt = list(range(3, 60))
        sampling: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
        expected = (await cluster.generate(prompt, **sampling)).tokens
        assert len(expected) == TOKENS
        running = [asyncio.create_task(cluster.generate(prompt, **sampling)) for _ in range(4)]
        await asyncio.sleep(0)
        os.kill(before.pid, signal.SIGKILL)
        away = await cluster.generate(prompt, **sampling)  # begins while nobody leads
        answers = [away, *await asyncio.gather(*running)]
        assert [answer.tokens for answer in answers] == [expected] * 5
        assert await cluster.metric("kvrelay_resubmissions_total") == 0
        after = await cluster.until_led_by(2)
        assert [one.incarnation for one in after.workers] == [
            one.incarnation for one in before.workers
        ]
        # The router finds the controller again, whose port is another one.
        await scale(str(cluster.controller.find()), decode=2)
        await cluster.until_routed_to("prefill-0", "decode-0", "decode-1")
        grown = await cluster.state()
        answers = await asyncio.gather(*(cluster.generate(prompt, **sampling) for _ in range(4)))
        assert [answer.tokens for answer in answers] == [expected] * 4
        await scale(str(cluster.controller.find()), decode=1)
        await cluster.until_routed_to("prefill-0", "decode-0")
        await cluster.assert_at_baseline()
        pids = [grown.pid, *(one.pid for one in grown.workers)]
    assert not [pid for pid in pids if runs(pid)]


@pytest.fixture
def ended(name: str) -> Iterator[None]:
    yield
    head = ray_module.get_runtime_context().gcs_address
    command(["down", "--ray-address", head, "--cluster-name", name], check=False)


def command(words: list[str], *, check: bool = True) -> str:
    """What a command prints; it must succeed."""
    ran = subprocess.run(
        [sys.executable, "-m", "kvrelay.deploy", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert not check or ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


@pytest.mark.usefixtures("ended")
def test_a_cluster_that_commands_start_change_and_end(tiny: Path, name: str):
    head = ray_module.get_runtime_context().gcs_address
    where = ["--ray-address", head, "--cluster-name", name]
    options = ["--model", str(tiny), "--dtype", "float32", "--kv-memory", "4MiB", "--threads", "1"]
    options += ["--advertise", "127.0.0.1", "--metrics", "127.0.0.1:0"]
    up = ["up", *where, *options]
    said = command(up)
    assert "Ready" in said
    address = re.search(r"controller (\S+)", said)
    assert address
    assert "Ready" in command(up), "it runs already"
    other = command([*up, "--decode", "2"], check=False)
    assert "runs in this Ray already, with other options" in other
    assert "decode-1 is ready" in command(["scale", *where, "--decode", "2"])
    assert "decode-1 has left" in command(["drain", *where, "decode-1", "--remove"])
    state = json.loads(command(["status", "--json", "--controller", address[1]]))
    assert [one["name"] for one in state["workers"]] == ["decode-0", "prefill-0"]
    assert state["name"] == name
    text = command(["status", *where])
    assert re.search(rf"cluster {name}: epoch 1, controller {state['pid']}, up \d+ s\n", text)
    assert re.search(r"decode-0 +live +decode-0-\w+ ", text)
    pids = [state["pid"], *(one["pid"] for one in state["workers"])]
    assert all(map(runs, pids))
    assert command(["down", *where]) == f"{name} has ended.\n"
    assert not [pid for pid in pids if runs(pid)]
    assert "does not run in this Ray" in command(["down", *where], check=False)
    assert "has no controller" in command(["status", *where], check=False)
