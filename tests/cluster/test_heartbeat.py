"""A worker's sign of life: it stays away when a forward, or hashing, hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kvrelay.engine.faults import parse_faults
from kvrelay.engine.worker.worker import Worker
from tests.cluster.in_process import InProcess, in_process

SECONDS = 10


@pytest.fixture(scope="module")
async def workers(tiny) -> AsyncIterator[InProcess]:
    options: dict[str, Any] = {"page_size": 4, "chunk_tokens": 16, "kv_memory": 2 << 20}
    options |= {"faults": (), "step_timeout": 0.3, "step_timeout_per_token": 0.05}
    async with in_process(tiny, **options) as workers:
        yield workers


async def ask(workers: InProcess) -> None:
    await workers.generate(range(40), temperature=0, max_tokens=8, ignore_eos=True)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


async def beats(worker: Worker) -> bool:
    """Whether the next heartbeats come, until the worker has failed."""
    while True:
        beat = asyncio.create_task(worker.heartbeat())
        failed = asyncio.create_task(worker.failed())
        await asyncio.wait({beat, failed}, return_when=asyncio.FIRST_COMPLETED)
        for task in (beat, failed):
            task.cancel()
        if failed.done() and not failed.cancelled():
            return beat.done() and not beat.cancelled()


async def test_a_worker_that_computes_nothing_is_alive(workers: InProcess):
    await ask(workers)
    await asyncio.sleep(0.5)  # longer than a step may take
    for worker in workers.hosted:
        async with asyncio.timeout(SECONDS):
            await worker.heartbeat()


@pytest.mark.parametrize("number", [0, 1], ids=["prefill", "decode"])
async def test_a_forward_that_hangs_is_no_sign_of_life(workers: InProcess, number: int):
    worker = workers.hosted[number]
    worker.faults.arm(parse_faults("hang:forward"))
    asking = asyncio.create_task(ask(workers))
    await until(lambda: worker.faults.fired)
    async with asyncio.timeout(SECONDS):
        assert not await beats(worker)
    reason = await worker.failed()
    assert reason.startswith("the forward of ")
    assert reason.endswith(" s (--step-timeout)")
    worker.faults.arm(())
    await asyncio.gather(asking, return_exceptions=True)
