"""New requests while the workers that they need are being replaced."""

from __future__ import annotations

import asyncio
import dataclasses

import grpc
import pytest

from kvrelay.engine.config import WorkerConfig
from kvrelay.router.config import RouterConfig
from kvrelay.v1 import inference_pb2 as pb

from .cluster import Cluster, Streamed, collect, running, status_of
from .scripted_worker import COUNTED, SECONDS, ScriptedWorker, until


@pytest.fixture
def patient(config: RouterConfig) -> RouterConfig:
    return dataclasses.replace(config, worker_wait=60.0)


def tell_lost(cluster: Cluster, *lost: ScriptedWorker) -> None:
    """Discovery has noticed, and successors are on their way."""
    left = [worker.endpoint for worker in cluster.workers if worker not in lost]
    cluster.discovery.replace(left, [worker.endpoint for worker in lost])


async def come_back(cluster: Cluster, worker: ScriptedWorker) -> None:
    worker.incarnation += "'"
    await worker.start()
    cluster.list_workers()


async def waits(cluster: Cluster, outcome: str) -> float:
    return await cluster.metric(
        f'kvrelay_worker_waits_total{{model="counter",outcome="{outcome}"}}'
    )


def start(cluster: Cluster, number: int) -> list[asyncio.Task[Streamed]]:
    return [asyncio.create_task(collect(cluster.generate())) for _ in range(number)]


async def test_new_requests_wait_for_the_successors_of_a_whole_role(patient: RouterConfig) -> None:
    """Two prefill workers are killed one after the other; clients come at every moment of it."""
    async with running(patient, "prefill-0", "prefill-1", "decode-0") as cluster:
        cluster.count()
        first, second = cluster.workers[:2]
        await first.stop()
        tell_lost(cluster, first)
        await second.stop()
        await cluster.until_lost("prefill-1")
        calls = start(cluster, 2)  # the second is listed still, but cannot be reached
        await cluster.until_waiting(2)
        tell_lost(cluster, first, second)
        calls += start(cluster, 2)
        await cluster.until_waiting(4)
        assert (await cluster.stub.GetModelInfo(pb.GetModelInfoRequest())).max_model_len == 512
        await come_back(cluster, second)
        assert [one.token_ids for one in await asyncio.gather(*calls)] == [COUNTED] * 4
        await cluster.until_waiting(0)
        assert await waits(cluster, "served") == 4
        assert await cluster.resubmitted() == 0


@pytest.mark.parametrize("lost", ["decode-0", "aggregated-0"])
async def test_new_requests_wait_for_the_only_worker(patient: RouterConfig, lost: str) -> None:
    names = ("prefill-0", "decode-0") if lost == "decode-0" else ("aggregated-0",)
    async with running(patient, *names) as cluster:
        cluster.count()
        worker = cluster.workers[-1]
        await worker.stop()
        tell_lost(cluster, worker)
        calls = start(cluster, 2)
        await cluster.until_waiting(2)
        await come_back(cluster, worker)
        assert [one.token_ids for one in await asyncio.gather(*calls)] == [COUNTED] * 2


async def test_a_request_of_a_live_id_joins_the_one_that_waits(patient: RouterConfig) -> None:
    async with running(patient, "prefill-0", "decode-0") as cluster:
        cluster.count()
        await cluster.decode.stop()
        tell_lost(cluster, cluster.decode)
        calls = [asyncio.create_task(collect(cluster.generate(request_id="a"))) for _ in range(2)]
        await cluster.until_waiting(1)
        await come_back(cluster, cluster.decode)
        assert [one.token_ids for one in await asyncio.gather(*calls)] == [COUNTED] * 2
        assert len(cluster.decode.submits) == 1


async def test_nobody_waits_for_a_role_that_was_removed(patient: RouterConfig) -> None:
    async with running(patient, "prefill-0", "decode-0") as cluster:
        await cluster.decode.stop()
        cluster.discovery.replace([cluster.prefill.endpoint])
        error = await status_of(cluster.generate())
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error.details() == "there is no decode worker"
        assert not dict(error.trailing_metadata() or ())


async def test_a_wait_ends_when_the_role_is_removed(patient: RouterConfig) -> None:
    async with running(patient, "prefill-0", "decode-0") as cluster:
        await cluster.decode.stop()
        tell_lost(cluster, cluster.decode)
        call = cluster.generate()
        await cluster.until_waiting(1)
        cluster.discovery.replace([cluster.prefill.endpoint])
        error = await status_of(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert await waits(cluster, "given_up") == 1


def test_a_new_request_waits_for_as_long_as_a_start_may_take() -> None:
    assert RouterConfig.worker_wait >= WorkerConfig.start_timeout


async def test_a_wait_that_ends_says_when_to_try_again(config: RouterConfig) -> None:
    config = dataclasses.replace(config, worker_wait=0.2)
    async with running(config, "prefill-0", "decode-0") as cluster:
        await cluster.prefill.stop()
        tell_lost(cluster, cluster.prefill)
        error = await status_of(cluster.generate())
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error.details() == (
            "no prefill worker that could hold the request is ready, and none came within 0.2 s "
            "(--worker-wait); try again in 500 ms"
        )
        assert dict(error.trailing_metadata() or ())["retry-after-ms"] == "500"
        assert await waits(cluster, "expired") == 1


async def test_so_many_wait_and_no_more(patient: RouterConfig) -> None:
    config = dataclasses.replace(patient, max_waiting_for_workers=3)
    async with running(config, "prefill-0", "decode-0") as cluster:
        cluster.count()
        await cluster.prefill.stop()
        tell_lost(cluster, cluster.prefill)
        calls = start(cluster, 3)
        await cluster.until_waiting(3)
        error = await status_of(cluster.generate())
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "3 requests wait already (--max-waiting-for-workers)" in str(error.details())
        assert dict(error.trailing_metadata() or ())["retry-after-ms"] == "500"
        await come_back(cluster, cluster.prefill)
        assert [one.token_ids for one in await asyncio.gather(*calls)] == [COUNTED] * 3
        assert await waits(cluster, "full") == 1


@pytest.mark.parametrize("how", ["leaves", "deadline"])
async def test_who_leaves_is_not_served_later(patient: RouterConfig, how: str) -> None:
    async with running(patient, "prefill-0", "decode-0") as cluster:
        cluster.count()
        await cluster.prefill.stop()
        tell_lost(cluster, cluster.prefill)
        request = pb.GenerateRequest(input_ids=pb.TokenIds(ids=[1, 2, 3]))
        call = cluster.stub.Generate(request, timeout=1.5 if how == "deadline" else 30)
        await cluster.until_waiting(1)
        if how == "leaves":
            call.cancel()
        await cluster.until_waiting(0)
        await come_back(cluster, cluster.prefill)
        await asyncio.wait_for(cluster.router.wait_ready(), SECONDS)
        assert (await collect(cluster.generate())).token_ids == COUNTED
        assert len(cluster.prefill.submits) == 1
        assert await waits(cluster, "left") == 1
        assert call.done()


async def test_a_request_that_fails_again_and_again_is_before_those_that_came_later(
    config: RouterConfig,
) -> None:
    """It waits for the workers as they do, though each time it began to wait after them.

    Workers order requests by their age, which is counted from the arrival.
    """
    both = dataclasses.replace(config, worker_wait=60.0, failover_wait=60.0, max_attempts=9)
    async with running(both, "prefill-0", "decode-0") as cluster:
        calls = [cluster.generate(request_id="first")]

        def all_wait() -> bool:
            waiting = cluster.router._fleet.changes._waiting
            return sum(place > 0 and not one.done() for place, one in waiting) == len(calls)

        await cluster.decode.submitted()
        for fault in range(3):
            tell_lost(cluster, cluster.prefill)
            await cluster.prefill.stop()
            calls += [cluster.generate(request_id=f"{fault}-{number}") for number in range(2)]
            await cluster.until_waiting(2)
            cluster.decode.break_stream()
            await until(all_wait)
            before = len(cluster.decode.submits)
            await come_back(cluster, cluster.prefill)
            await cluster.decode.submitted(before + len(calls))
            again = cluster.decode.submits[before : before + len(calls)]
            arrived_with = [one.request_id.partition("-")[0] for one in again]
            assert arrived_with == ["first", *(str(number // 2) for number in range(2 + 2 * fault))]
            assert again[0].age_seconds == max(one.age_seconds for one in again)
        for call in calls:
            call.cancel()
