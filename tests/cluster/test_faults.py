"""Clients that leave, requests that are aborted, workers that die."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from kvrelay.engine.config import PrefixIndexKind
from kvrelay.engine.faults import Fault, FaultAction, FaultEvent
from kvrelay.v1 import inference_pb2
from tests.cluster.in_process import InProcess, in_process
from tests.cluster.running import Cluster, RunningCluster, running
from tests.pairwise import few

PROMPT = [(13 * i) % 500 for i in range(300)]
FINISH = inference_pb2.FinishReason
RESTART_S = 60
PAGE_BYTES = 4 * 3 * 2 * 2 * 16 * 4
TIMEOUT_S = 5.0
"""Of a worker's heartbeat: far above what the noise of a busy machine delays it."""
OPTIONS: dict[str, Any] = {
    "prefill": 2,
    "decode": 2,
    "page_size": 4,
    "chunk_tokens": 16,
    "kv_memory": 2 << 20,
}


@pytest.fixture(scope="module")
async def workers(tiny: Path) -> AsyncIterator[InProcess]:
    """Where only clients and requests end."""
    async with in_process(tiny, **OPTIONS) as workers:
        yield workers


@pytest.fixture(scope="module")
async def cluster(ray, tiny) -> AsyncIterator[RunningCluster]:
    """Where workers die."""
    async with running(tiny, dtype="float32", worker_timeout=TIMEOUT_S, **OPTIONS) as cluster:
        yield cluster


def start(cluster: Cluster, name: str = ""):
    return cluster.stream(PROMPT, request_id=name, temperature=0, max_tokens=300, ignore_eos=True)


@few(4)
@pytest.mark.parametrize("delay_ms", [0, 1, 2, 5, 10, 20, 30, 50, 80, 120, 200])
async def test_abort_at_any_moment_gives_everything_back(workers, delay_ms):
    """From before its first chunk to well into its decoding."""
    name = f"abort-{delay_ms}"
    call = start(workers, name)
    reader = asyncio.create_task(_read(call))
    await asyncio.sleep(delay_ms / 1000)
    aborted = await workers.stub.Abort(inference_pb2.AbortRequest(request_id=name))
    events = await reader
    if aborted.aborted:
        assert events[-1].complete.finish_reason == FINISH.FINISH_REASON_ABORT
    await workers.assert_at_baseline()


@few(3)
@pytest.mark.parametrize("delay_ms", [0, 1, 3, 10, 30, 60, 120, 200])
async def test_disconnect_at_any_moment_gives_everything_back(workers, delay_ms):
    call = start(workers)
    reader = asyncio.create_task(_read(call))
    await asyncio.sleep(delay_ms / 1000)
    call.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    await workers.assert_at_baseline()


@pytest.mark.parametrize("number", [8, pytest.param(24, marks=pytest.mark.slow)])
async def test_aborts_among_others_leave_the_others_right(workers, number):
    expected = (await _read_tokens(start(workers))).copy()
    rng = random.Random(11)
    calls = [start(workers) for _ in range(number)]
    readers = [asyncio.create_task(_read_tokens(call)) for call in calls]
    victims = set(rng.sample(range(number), number // 2))
    for victim in victims:
        await asyncio.sleep(rng.random() * 0.05)
        calls[victim].cancel()
    for index, reader in enumerate(readers):
        if index in victims:
            await asyncio.gather(reader, return_exceptions=True)
        else:
            assert await reader == expected
    await workers.assert_at_baseline()


async def test_scenario_34_abort_while_a_slow_read_writes_its_pages(tiny: Path) -> None:
    """The read ends when its request has long gone, and others have come.

    sgl-project/sglang#33507, #30233.
    """
    pages: dict[str, Any] = {"page_size": 4, "chunk_tokens": 16, "kv_memory": 170 * PAGE_BYTES}
    index = PrefixIndexKind.NONE
    async with in_process(tiny, faults=(), prefix_index=index, **pages) as workers:

        def ask(number: int) -> Any:
            prompt = [(13 * i + 101 * number) % 500 for i in range(201)]
            return workers.stream(prompt, temperature=0, max_tokens=8, ignore_eos=True)

        expected = [await _read_tokens(ask(number)) for number in range(3)]
        reads = workers.hosted[1].faults
        late = [Fault(FaultAction.DELAY, FaultEvent.PULL, nth=n, seconds=0.5) for n in range(1, 4)]
        reads.arm(late)
        aborted = ask(9)
        await aborted.read()
        aborted.cancel()
        assert await asyncio.gather(*(_read_tokens(ask(number)) for number in range(3))) == expected
        assert reads.fired == len(late)
        await workers.assert_at_baseline()


LATE = {
    "queue": (1, FaultEvent.GRANT, False),
    "prefill": (0, FaultEvent.FORWARD, False),
    "pull": (1, FaultEvent.PULL, True),
    "decode": (1, FaultEvent.FORWARD, True),
}
"""The worker and the event that are late while a request is in a phase; whether it has a token."""


async def test_an_http_client_that_leaves_ends_its_request_in_each_phase(tiny: Path) -> None:
    async with in_process(tiny, faults=(), page_size=4, kv_memory=2 << 20) as workers:
        url = f"http://{workers.router.http_address}/v1/completions"
        for phase, (worker, event, has_token) in LATE.items():
            faults = workers.hosted[worker].faults
            faults.arm([Fault(FaultAction.DELAY, event, seconds=0.2)])
            prompt = [(13 * i + 101 * len(phase)) % 500 for i in range(300)]
            leaving = asyncio.Event()
            call = asyncio.create_task(_leave(url, prompt, leaving, has_token=has_token))
            async with asyncio.timeout(60):
                while not faults.fired:
                    await asyncio.sleep(0.005)
                leaving.set()
                await call
            await workers.assert_at_baseline()
            aborted = await workers.metric("kvrelay_requests_total", outcome="abort")
            assert aborted == list(LATE).index(phase) + 1


async def _leave(url: str, prompt: list[int], leaving: asyncio.Event, *, has_token: bool) -> None:
    """Ask for a stream, and leave it when told to, and when its first token has come or has not."""
    body = {"prompt": prompt, "max_tokens": 300, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(timeout=60) as http:
        if has_token:
            async with http.stream("POST", url, json=body) as answer:
                lines = answer.aiter_lines()
                assert (await anext(lines)).startswith("data: ")
                await leaving.wait()
                del lines  # the answer would be closed with it
            return
        call = asyncio.create_task(http.post(url, json=body))
        await leaving.wait()
        assert not call.done()
        call.cancel()


async def test_abort_of_an_unknown_id_says_so(workers):
    answer = await workers.stub.Abort(inference_pb2.AbortRequest(request_id="nobody"))
    assert not answer.aborted


@pytest.mark.slow  # test_locked_cluster.py kills one in `make test`
@pytest.mark.parametrize(
    "fault",
    [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="stopped")],
)
@pytest.mark.parametrize("worker", ["prefill-0", "decode-1"])
@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_worker_comes_back_as_another_incarnation(cluster, worker, fault):
    expected = (await _read_tokens(start(cluster))).copy()
    before = cluster.deployment.cluster.workers[worker]
    readers = [asyncio.create_task(_read_tokens(start(cluster))) for _ in range(8)]
    await asyncio.sleep(0.1)
    os.kill(before.pid, fault)
    async with asyncio.timeout(RESTART_S):
        ends = await asyncio.gather(*readers, return_exceptions=True)
    for end in ends:
        if isinstance(end, grpc.aio.AioRpcError):
            assert end.code() is grpc.StatusCode.UNAVAILABLE
        else:
            assert end == expected
    async with asyncio.timeout(RESTART_S):
        while not await _is_back(cluster, worker, before.incarnation):
            await asyncio.sleep(0.05)
    await cluster.assert_at_baseline()
    again = await asyncio.gather(*(_read_tokens(start(cluster)) for _ in range(8)))
    assert all(tokens == expected for tokens in again)
    await cluster.assert_at_baseline()


async def _is_back(cluster: RunningCluster, name: str, before: str) -> bool:
    return any(
        worker.worker == name and worker.ready and worker.incarnation != before
        for worker in await cluster.status()
    )


async def _read(call: Any) -> list[Any]:
    return [event async for event in call]


async def _read_tokens(call) -> list[int]:
    events = await _read(call)
    return [token for event in events for token in event.delta.token_ids]
