"""Forwards that fail or hang, on real workers in this process, which nobody replaces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from kvrelay.engine.faults import parse_faults
from kvrelay.engine.worker.worker import Worker
from kvrelay.v1 import inference_pb2 as pb
from tests.cluster.in_process import InProcess, in_process

STEP_SECONDS = 2.0
"""That a step may take, and its tokens beside; longer than other tests may keep one waiting."""
SECONDS = 60
"""Until what is awaited must have happened."""
WIDE = "start: /[ab]{150}/ x\nx: " + " | ".join(f'/b/ "c{number}"' for number in range(4300))
"""A late mask fails, behind what the door tries: the parser has more alternatives than it takes."""
SIDES = pytest.mark.parametrize("number", [0, 1], ids=["prefill", "decode"])


def start(tiny: Path) -> AbstractAsyncContextManager[InProcess]:
    options: dict[str, Any] = {"page_size": 4, "chunk_tokens": 16, "kv_memory": 2 << 20}
    options |= {"failed_forwards_limit": 4, "step_timeout": STEP_SECONDS}
    options |= {"step_timeout_per_token": 0.05}
    return in_process(tiny, faults=(), **options)


@pytest.fixture(scope="module")
async def workers(tiny) -> AsyncIterator[InProcess]:
    async with start(tiny) as workers:
        yield workers


@pytest.fixture
async def mortal(tiny) -> AsyncIterator[InProcess]:
    """Workers for one test, which may end them."""
    async with start(tiny) as workers:
        yield workers


async def ask(workers: InProcess, first: int = 0, request_id: str = "") -> list[int]:
    prompt = range(first, first + 40)
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    return (await workers.generate(prompt, request_id=request_id, **options)).tokens


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
    await asyncio.sleep(STEP_SECONDS + 0.2)
    for worker in workers.hosted:
        async with asyncio.timeout(SECONDS):
            await worker.heartbeat()


@SIDES
async def test_a_forward_that_fails_once_is_not_noticed(workers: InProcess, number: int):
    expected = [await ask(workers, first) for first in range(6)]
    resubmitted = await resubmissions(workers)
    worker = workers.hosted[number]
    worker.faults.arm(parse_faults("fail:forward:2"))
    assert await asyncio.gather(*(ask(workers, first) for first in range(6))) == expected
    assert worker.faults.fired == 1
    assert await resubmissions(workers) > resubmitted
    await workers.assert_at_baseline()


@SIDES
async def test_a_request_that_breaks_every_forward_ends_alone(workers: InProcess, number: int):
    expected = [await ask(workers, first) for first in range(6)]
    worker = workers.hosted[number]
    worker.faults.arm(parse_faults("fail:forward@bad:always"))
    bad = asyncio.create_task(ask(workers, 0, "bad"))
    assert await asyncio.gather(*(ask(workers, first) for first in range(6))) == expected
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bad
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "the forward failed: RuntimeError: injected (with this request alone" in str(
        caught.value.details()
    )
    assert worker.faults.fired <= 3
    worker.faults.arm(())
    await workers.assert_at_baseline()


async def test_a_grammar_that_fails_after_the_hand_over_is_the_clients_error(
    workers: InProcess,
):
    expected = await ask(workers)
    resubmitted = await workers.metric("kvrelay_resubmissions_total")
    for _ in range(5):  # more than the forwards in a row that a worker may fail
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await workers.generate(
                "x", max_tokens=300, structured_output=pb.StructuredOutput(grammar=WIDE)
            )
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        details = str(caught.value.details())
        assert details.startswith("structured_output: ")
        assert "too many alternatives" in details
    assert await workers.metric("kvrelay_resubmissions_total") == resubmitted
    assert await ask(workers) == expected
    await workers.assert_at_baseline()


async def resubmissions(workers: InProcess) -> float:
    reasons = ("forward_failed", "forward_failed_alone")
    counted = [await workers.metric("kvrelay_resubmissions_total", reason=one) for one in reasons]
    return sum(counted)


@SIDES
async def test_a_forward_that_hangs_is_no_sign_of_life(mortal: InProcess, number: int):
    worker = mortal.hosted[number]
    worker.faults.arm(parse_faults("hang:forward"))
    asking = asyncio.create_task(ask(mortal))
    await until(lambda: worker.faults.fired)
    async with asyncio.timeout(SECONDS):
        assert not await beats(worker)
    reason = await worker.failed()
    assert reason.startswith("WorkerBrokenError: the forward of ")
    assert reason.endswith(" s (--step-timeout)")
    worker.faults.arm(())
    await heard_and_waits(mortal, asking)


@pytest.mark.alone  # it must end between two looks
@pytest.mark.parametrize(
    # Older than a step of its tokens may become, but not at the second look, a second later.
    ("number", "late"),
    [(0, "3.1s"), (1, "2.4s")],
    ids=["prefill", "decode"],
)
async def test_a_forward_that_ends_late_is_none_that_hangs(
    workers: InProcess, number: int, late: str
):
    """As after a process was stopped: it is old by the clock, and ends soon."""
    expected = await ask(workers)
    worker = workers.hosted[number]
    worker.faults.arm(parse_faults(f"delay:forward:{late}"))
    asking = asyncio.create_task(ask(workers))
    await until(lambda: worker.faults.fired)
    async with asyncio.timeout(SECONDS):
        while not asking.done():
            await asyncio.gather(worker.heartbeat(), asyncio.sleep(0.02))
    assert await asking == expected


@SIDES
async def test_a_broken_device_ends_its_worker(mortal: InProcess, number: int):
    worker = mortal.hosted[number]
    worker.faults.arm(parse_faults("poison:forward"))
    asking = asyncio.create_task(ask(mortal))
    async with asyncio.timeout(SECONDS):
        reason = await worker.failed()
    error = "RuntimeError: CUDA error: injected"
    assert reason == f"WorkerBrokenError: the device is broken: {error}"
    await heard_and_waits(mortal, asking)


async def heard_and_waits(workers: InProcess, asking: asyncio.Task[list[int]]) -> None:
    """The router knows that a forward failed, and waits for a worker to go on with."""
    async with asyncio.timeout(SECONDS):
        while not await resubmissions(workers):
            await asyncio.sleep(0.01)
    assert not asking.done()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_a_grammar_that_fails_after_the_hand_over_over_http(workers: InProcess) -> None:
    expected = await ask(workers)
    resubmitted = await workers.metric("kvrelay_resubmissions_total")
    body = {"prompt": [5, 6, 7], "max_tokens": 300, "structured_outputs": {"grammar": WIDE}}
    url = f"http://{workers.router.http_address}/v1/completions"
    async with httpx.AsyncClient() as http:
        whole = await http.post(url, json=body)
        assert whole.status_code == 400
        assert whole.json()["error"]["param"] == "structured_outputs.grammar"
        stream = (await http.post(url, json={**body, "stream": True})).text
    assert stream.startswith("data: "), "the first token has come"
    *_, event, data, _, _ = stream.split("\n")
    assert event == "event: error"
    assert "too many alternatives" in data
    assert await workers.metric("kvrelay_resubmissions_total") == resubmitted
    assert await ask(workers) == expected
    await workers.assert_at_baseline()
