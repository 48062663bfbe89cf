"""Forwards that hang or fail: what becomes of their worker, and of everybody's requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvrelay.engine.faults import parse_faults
from kvrelay.wire.worker_info import WorkerInfo
from tests import arming
from tests.cluster.running import RunningCluster, running
from tests.cluster.supervised import is_running

PROMPT = [(13 * i) % 500 for i in range(60)]
NOTHING_YET = "prefill-0/drop:ended:999999"
"""Faults are possible, and armed later."""
STEP_TIMEOUT_S = 3.0
SECONDS = 60

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]


@pytest.fixture(scope="module")
async def cluster(ray, tiny) -> AsyncIterator[RunningCluster]:
    async with running(
        tiny,
        prefill=2,
        decode=2,
        dtype="float32",
        page_size=4,
        chunk_tokens=16,
        kv_memory=2 << 20,
        debug_faults=NOTHING_YET,
        worker_timeout=6.0,
        step_timeout=STEP_TIMEOUT_S,
        step_timeout_per_token=0,
    ) as cluster:
        yield cluster


async def arm(cluster: RunningCluster, name: str, faults: str) -> WorkerInfo:
    await cluster.deployment.cluster.call(arming.arm, name, parse_faults(faults))
    return cluster.deployment.cluster.workers[name]


async def ask(cluster: RunningCluster, start: int = 0, request_id: str = "") -> list[int]:
    prompt = PROMPT[start:]
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    return (await cluster.generate(prompt, request_id=request_id, **options)).tokens


async def next_life(cluster: RunningCluster, before: WorkerInfo) -> WorkerInfo:
    """The incarnation that follows, once the router can use it."""
    async with asyncio.timeout(SECONDS):
        while not any(
            one.worker == before.name and one.ready and one.incarnation != before.incarnation
            for one in await cluster.status()
        ):
            await asyncio.sleep(0.05)
    return cluster.deployment.cluster.workers[before.name]


@pytest.mark.parametrize("fault", ["hang:forward", "poison:forward:2", "fail:forward:always"])
@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
async def test_a_worker_that_cannot_compute_is_replaced(
    cluster: RunningCluster, worker: str, fault: str
):
    """All of its requests have their tokens, and none of them knows."""
    expected = [await ask(cluster, start) for start in range(8)]
    before = await arm(cluster, worker, fault)
    async with asyncio.timeout(SECONDS):
        answers = await asyncio.gather(*(ask(cluster, start) for start in range(8)))
    assert answers == expected
    replaced = asyncio.create_task(next_life(cluster, before))
    while not replaced.done():  # it takes three forwards to fail, and nobody asks it twice
        assert await ask(cluster) == expected[0]
    await replaced
    assert not is_running(before)
    await cluster.assert_at_baseline()


async def failed_steps(cluster: RunningCluster, worker: WorkerInfo) -> float:
    return await cluster.metric("kvrelay_failed_steps_total", worker=worker.name)


async def test_a_forward_that_crashes_its_process_is_found_out_and_a_kill_is_not(
    cluster: RunningCluster,
):
    expected = [await ask(cluster, start) for start in range(8)]
    for fault, found in (("kill:decoding:2", 0), ("crash:forward:2", 1)):
        before = await arm(cluster, "decode-1", fault)
        async with asyncio.timeout(SECONDS):
            answers = await asyncio.gather(*(ask(cluster, start) for start in range(8)))
        assert answers == expected
        after = await next_life(cluster, before)
        assert await failed_steps(cluster, after) == found
        await cluster.assert_at_baseline()
