"""Workers of a real cluster that are replaced by others with other options, under load."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvrelay.deploy.controller.changes.steps import RollOrder, ScalePhase
from kvrelay.deploy.controller.cluster import Cluster
from kvrelay.deploy.controller.records.ordered_changes import FIRST
from kvrelay.v1 import admin_pb2, admin_pb2_grpc
from kvrelay.wire.cluster_state import WorkerPhase
from tests.cluster.commands import kvrelay
from tests.cluster.obedient_worker import give_order
from tests.cluster.running import RunningCluster, running
from tests.cluster.supervised import SECONDS, heard, make_configs, until
from tests.cluster.test_controller_outage import Routed, routed
from tests.cluster.test_controller_outage import name as name  # a fixture
from tests.cluster.test_drain import under_load
from tests.known import known


async def pages(cluster: RunningCluster) -> int:
    """Pages of KV on all workers."""
    workers = await cluster.status()
    return sum(pool.total for one in workers for pool in one.load.pools if pool.page_size)


@pytest.mark.slow
async def test_a_roll_under_load_gives_all_workers_other_options_and_loses_no_request(ray, tiny):
    async with running(
        tiny, prefill=1, decode=1, dtype="float32", kv_memory=8 << 20, drain_grace=0.01
    ) as cluster:
        admin = ("--admin", known(cluster.deployment.router.admin_address))
        before = await pages(cluster)
        async with under_load(cluster, clients=4) as load:
            done = await kvrelay("roll", "--set", "kv-memory=16MiB", *admin)
            assert done.returncode == 0, done.stdout + done.stderr
            assert done.stdout.splitlines() == [
                *("prefill-1 starts", "prefill-1 is ready", "prefill-0 drains"),
                *("prefill-0 has left", "decode-1 starts", "decode-1 is ready"),
                *("decode-0 drains", "decode-0 has left"),
            ]
            await load.more(4)
        assert sorted(cluster.deployment.cluster.workers) == ["decode-1", "prefill-1"]
        assert await pages(cluster) >= 2 * before
        refused = await kvrelay("roll", "--set", "page-size=4", *admin)
        assert refused.returncode == 1
        assert "FAILED_PRECONDITION: page_size: workers of one cluster cannot" in refused.stderr


@pytest.mark.slow  # `tests/deploy` has rolls without processes
@pytest.mark.usefixtures("obedient_workers")
async def test_a_successor_that_does_not_start_stops_the_roll_and_undo_goes_back(tmp_path: Path):
    async with Cluster(make_configs(tmp_path)[:2]) as cluster:
        give_order(tmp_path, "decode-1", "start", "refuse")
        give_order(tmp_path, "prefill-0", "leave", "now")
        async with asyncio.timeout(SECONDS):
            steps = [step async for step in cluster.roll(RollOrder({"chunk_tokens": "7"}))]
        failure = "decode-1 did not start: kv_memory: 1 byte does not hold one page"
        assert [step.reason for step in steps if step.phase is ScalePhase.FAILED] == [failure]
        assert sorted(cluster.workers) == ["decode-0", "prefill-1"]
        decode = cluster.workers["decode-0"]
        dead = cluster.workers["prefill-1"]
        give_order(tmp_path, "prefill-1", "leave", "now")
        async with asyncio.timeout(SECONDS):
            _ = [step async for step in cluster.roll(RollOrder(undo=True))]
        assert cluster.workers["decode-0"] == decode
        assert sorted(cluster.workers) == ["decode-0", "prefill-2"]
        written = cluster._written.cluster
        assert (written.roll, written.revision) == (None, FIRST)
        await until(lambda: dead.incarnation in heard(tmp_path, "decode-0"))


async def begin_roll(cluster: Routed, begun: asyncio.Event, **options: str) -> None:
    """Order a roll; the death of the controller cuts the answer off.

    `begun` is set when the controller has written the roll down: who asks for its state may hear of
    one that it has not, and that its successor will not know.
    """
    order = admin_pb2.RollWorkersRequest(options=options, max_surge=1)
    address = str(await asyncio.to_thread(cluster.controller.find))
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            async for _ in admin_pb2_grpc.AdminServiceStub(channel).RollWorkers(order):
                begun.set()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise


@pytest.mark.slow
@pytest.mark.parametrize("replaced", [0, 1], ids=["at its start", "half way"])
async def test_a_controller_that_is_killed_in_a_roll_goes_on_and_no_request_is_lost(
    tiny: Path, name: str, replaced: int
):
    async with routed(tiny, name) as cluster:
        prompt = list(range(3, 60))
        sampling: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
        expected = (await cluster.generate(prompt, **sampling)).tokens
        before = await cluster.state()
        stopped = asyncio.Event()

        async def ask() -> int:
            asked = 0
            while not stopped.is_set():
                assert (await cluster.generate(prompt, **sampling)).tokens == expected
                asked += 1
            return asked

        async with asyncio.TaskGroup() as tasks:
            clients = [tasks.create_task(ask()) for _ in range(4)]
            begun = asyncio.Event()
            rolling = tasks.create_task(begin_roll(cluster, begun, chunk_tokens="16"))
            await begun.wait()
            while (state := await cluster.state()).roll is None or state.roll.replaced < replaced:
                await asyncio.sleep(0.02)
            os.kill(before.pid, signal.SIGKILL)
            await rolling
            async with asyncio.timeout(3 * SECONDS):  # real workers start, one after the other
                while state.epoch < 2 or state.roll is not None:
                    state = await cluster.until_led_by(2)
            await cluster.until_routed_to("decode-1", "prefill-1")
            stopped.set()
        assert all(client.result() for client in clients)
        assert {one.name: (one.revision, one.phase) for one in state.workers} == {
            "decode-1": (1, WorkerPhase.LIVE),
            "prefill-1": (1, WorkerPhase.LIVE),
        }
        assert await cluster.metric("kvrelay_requests_total", outcome="unavailable") == 0
        await cluster.assert_at_baseline()
