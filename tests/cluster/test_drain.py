"""Workers of a real cluster that leave and are replaced while requests run."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from kvrelay.v1 import admin_pb2, admin_pb2_grpc
from tests.cluster.commands import kvrelay
from tests.cluster.running import RunningCluster, running
from tests.known import known

PROMPTS = [[(7 * k + 11 * place) % 500 for place in range(length)] for k, length in
           enumerate((3, 17, 40, 64, 90, 150))]  # fmt: skip
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 120},
    {"temperature": 1, "seed": 5, "max_tokens": 40},
]
CASES = [(prompt, sampling) for prompt in PROMPTS for sampling in SAMPLINGS]
Phase = admin_pb2.DrainWorkerResponse


async def tokens_of(cluster: RunningCluster, case: int) -> list[int]:
    prompt, sampling = CASES[case]
    return (await cluster.generate(prompt, ignore_eos=True, **sampling)).tokens


class Load:
    """Clients that ask, one request after the other, until they are told to stop."""

    def __init__(self, cluster: RunningCluster, plain: list[list[int]]) -> None:
        self.completed = 0
        self._cluster = cluster
        self._plain = plain
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True

    async def ask(self, first: int) -> None:
        case = first
        while not self._stopped:
            assert await tokens_of(self._cluster, case) == self._plain[case]
            self.completed += 1
            case = (case + 5) % len(CASES)

    async def more(self, requests: int) -> None:
        """Wait for so many more to complete."""
        goal = self.completed + requests
        while self.completed < goal:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def under_load(cluster: RunningCluster, clients: int) -> AsyncIterator[Load]:
    """Every stream must complete, with exactly its tokens, and leave no page behind."""
    plain = [await tokens_of(cluster, case) for case in range(len(CASES))]
    load = Load(cluster, plain)
    async with asyncio.TaskGroup() as tasks:
        for client in range(clients):
            tasks.create_task(load.ask(client))
        yield load
        load.stop()
    await cluster.assert_at_baseline()
    assert await cluster.metric("kvrelay_requests_total", outcome="unavailable") == 0
    again = await cluster.metric("kvrelay_resubmissions_total")
    assert again == await cluster.metric("kvrelay_resubmissions_total", reason="retracted")


async def drain(cluster: RunningCluster, worker: str, *, remove: bool = False) -> dict[int, float]:
    """The phases that the router tells of, each with the seconds until then."""
    address = known(cluster.deployment.router.admin_address)
    request = admin_pb2.DrainWorkerRequest(worker=worker, remove=remove)
    async with grpc.aio.insecure_channel(address) as channel:
        answers = admin_pb2_grpc.AdminServiceStub(channel).DrainWorker(request)
        begun = time.monotonic()
        phases: dict[int, float] = {}
        async for answer in answers:
            phases.setdefault(answer.phase, time.monotonic() - begun)
        return phases


@pytest.mark.slow  # `tests/engine/test_drain.py` has it in virtual time, `test_roll.py` drains
async def test_a_rolling_restart_of_every_worker_under_load_loses_no_request(ray, tiny):
    """Two workers take each other's load; requests wait for the successor of an only one."""
    async with running(
        tiny, prefill=1, decode=2, dtype="float32", kv_memory=8 << 20, drain_grace=0.01
    ) as cluster:
        before = {
            name: info.incarnation for name, info in cluster.deployment.cluster.workers.items()
        }
        async with under_load(cluster, clients=6) as load:
            for worker in sorted(before):
                phases = await drain(cluster, worker)
                assert list(phases) == [
                    Phase.PHASE_DRAINING,
                    Phase.PHASE_LEFT,
                    Phase.PHASE_READY,
                ]
                await load.more(3)
        after = {
            name: info.incarnation for name, info in cluster.deployment.cluster.workers.items()
        }
        assert after.keys() == before.keys()
        assert not set(after.values()) & set(before.values())
        assert await cluster.metric("kvrelay_resubmissions_total", reason="retracted") > 0


@pytest.mark.slow
async def test_workers_come_and_go_under_load_and_no_request_is_lost(ray, tiny):
    async with running(
        tiny, prefill=1, decode=1, dtype="float32", kv_memory=8 << 20, drain_grace=0.01
    ) as cluster:
        async with under_load(cluster, clients=6) as load:
            for count in (2, 1):
                await scale(cluster, "--prefill", count, "--decode", count)
                await load.more(6)
        assert sorted(cluster.deployment.cluster.workers) == ["decode-0", "prefill-0"]


async def scale(cluster: RunningCluster, *options: object) -> None:
    admin = known(cluster.deployment.router.admin_address)
    done = await kvrelay("scale", *map(str, options), "--admin", admin)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
async def test_aggregated_workers_drain_too_and_one_is_removed(ray, tiny):
    async with running(
        tiny, aggregated=2, dtype="float32", kv_memory=8 << 20, drain_grace=0.3
    ) as cluster:
        async with under_load(cluster, clients=4) as load:
            os.kill(cluster.deployment.cluster.workers["aggregated-0"].pid, signal.SIGTERM)
            await restarted(cluster, "aggregated-0")
            await load.more(3)
            phases = await drain(cluster, "aggregated-1", remove=True)
            assert list(phases) == [Phase.PHASE_DRAINING, Phase.PHASE_LEFT]
            await load.more(6)
        assert [worker.worker for worker in await cluster.status()] == ["aggregated-0"]


async def restarted(cluster: RunningCluster, worker: str) -> None:
    before = cluster.deployment.cluster.workers[worker].incarnation
    async with asyncio.timeout(60):
        while True:
            for status in await cluster.status():
                if status.worker == worker and status.ready and status.incarnation != before:
                    return
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_requests_wait_for_the_successor_of_an_only_worker(ray, tiny):
    """Those that run when it begins to drain, and those that come while there is none."""
    async with running(
        tiny, prefill=1, decode=1, dtype="float32", kv_memory=8 << 20, drain_grace=0.1
    ) as cluster:
        admin = ("--admin", known(cluster.deployment.router.admin_address))
        async with under_load(cluster, clients=3):
            for worker in ("decode-0", "prefill-0"):
                result = await kvrelay("drain", worker, *admin)
                assert result.returncode == 0, result.stderr
                lines = result.stdout.splitlines()
                assert lines[0].startswith(f"{worker} drains, ")
                assert lines[-2].startswith(f"{worker} has left; another one starts  ({worker}-")
                assert lines[-1].startswith(f"{worker} is ready again  ({worker}-")
        unknown = await kvrelay("drain", "decode-7", *admin)
        assert unknown.returncode == 1
        assert unknown.stderr.endswith(
            ": NOT_FOUND: worker: there is no 'decode-7'; the workers are: decode-0, prefill-0\n"
        )
        last = await kvrelay("drain", "decode-0", "--remove", *admin)
        assert last.returncode == 1
        assert "FAILED_PRECONDITION: remove: decode-0 is the last decode worker" in last.stderr
