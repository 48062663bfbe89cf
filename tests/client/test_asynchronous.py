"""The client for asyncio, with routers that say what a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable

import grpc
import pytest

from kvrelay.client import AsyncClient, CallFailed
from kvrelay.v1 import inference_pb2 as pb

from .scripted import COMPLETE, WORDS, Script, ScriptedRouter, deltas, serving, unavailable

TEXT = "".join(WORDS)


async def in_time(event: threading.Event) -> bool:
    return await asyncio.to_thread(event.wait, 10)


async def test_a_broken_stream_goes_on_at_another_router_where_it_broke() -> None:
    first = ScriptedRouter([unavailable(*deltas(0, 3), retry_after_ms=60_000)])
    second = ScriptedRouter([Script([*deltas(size=2), COMPLETE])])
    with serving(first, second) as servers:
        async with AsyncClient(servers) as client:
            client._balancer.begin(second.address)  # so that the first one is called first
            events = [event async for event in client.generate([1, 2], request_id="mine")]
            assert (await client.answer("x")).text == TEXT
    assert [event.delta.index for event in events[:-1]] == [0, 1, 2, 3, 4, 6]
    assert "".join(event.delta.text for event in events) == TEXT
    assert events[-1].complete == COMPLETE
    assert first.requests == second.requests[:1]


async def test_a_cancelled_task_ends_its_call() -> None:
    router = ScriptedRouter([Script(deltas(0, 2), hangs=True)])
    with serving(router) as servers:
        async with AsyncClient(servers) as client:
            task = asyncio.create_task(client.answer("x"))
            while not router.requests:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await in_time(router.cancelled)


async def test_a_stream_that_is_left_ends_its_call() -> None:
    router = ScriptedRouter([Script(deltas(0, 2), hangs=True)])
    with serving(router) as servers:
        async with (
            AsyncClient(servers) as client,
            contextlib.aclosing(client.generate("x")) as stream,
        ):
            assert (await anext(stream)).delta.text == WORDS[0]
        assert await in_time(router.cancelled)
        assert client._balancer._routers[servers[0]].calls == 0


async def test_what_cannot_pass_is_raised_and_what_can_is_tried_again() -> None:
    bad = Script((), grpc.StatusCode.PERMISSION_DENIED, "no")
    full = Script((), grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after_ms=50)
    router = ScriptedRouter([full, bad])
    with serving(router) as servers:
        async with AsyncClient(servers) as client:
            with pytest.raises(CallFailed, match="PERMISSION_DENIED: no"):
                await client.answer("x")
            assert len(router.requests) == 2
            with pytest.raises(CallFailed, match="PERMISSION_DENIED: no"):
                await client.call("GetModelInfo", pb.GetModelInfoRequest())
            assert await client.abort(servers[0])
            assert not await client.abort("unknown")


@pytest.mark.parametrize("script", [unavailable(retry_after_ms=20_000), Script(hangs=True)])
@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.answer("x"),
        lambda client: client.call("GetModelInfo", pb.GetModelInfoRequest()),
    ],
)
async def test_closing_ends_calls_whatever_they_wait_for(
    call: Callable[[AsyncClient], Awaitable[object]], script: Script
) -> None:
    router = ScriptedRouter([script])
    with serving(router) as servers:
        client = AsyncClient(servers)
        ended = asyncio.ensure_future(call(client))
        assert await in_time(router.called)
        await asyncio.sleep(0.2)  # for the retry's wait to begin
        await client.close()
        for attempt in (ended, call(client), client.abort("x")):
            with pytest.raises(CallFailed) as caught:
                await asyncio.wait_for(attempt, 60)
            assert caught.value.status is grpc.StatusCode.CANCELLED
        assert client._balancer._routers[router.address].calls == 0


async def test_a_call_that_cannot_begin_is_not_counted() -> None:
    async with AsyncClient(["127.0.0.1:1"]) as client:
        with pytest.raises(TypeError):
            await client.answer("x", timeout_seconds="soon")  # type: ignore[arg-type]
        assert client._balancer._routers["127.0.0.1:1"].calls == 0


async def test_other_calls_tell_that_a_router_is_well() -> None:
    router = ScriptedRouter(
        [unavailable(retry_after_ms=1), unavailable(retry_after_ms=1), Script()]
    )
    with serving(router) as servers:
        async with AsyncClient(servers) as client:
            await client.call("GetModelInfo", pb.GetModelInfoRequest(), timeout_seconds=60)
            assert client._balancer._routers[router.address].failures == 0


async def test_a_deadline_is_the_calls_too() -> None:
    router = ScriptedRouter([Script(deltas(0, 1), hangs=True)])
    with serving(router) as servers:
        async with AsyncClient(servers) as client:
            with pytest.raises(CallFailed, match="DEADLINE_EXCEEDED"):
                await client.answer("x", timeout_seconds=1.5)
        assert await in_time(router.cancelled)
