"""A call whose message does not arrive ends, and keeps nobody else out."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from kvrelay.net.channels import bind, front_server
from kvrelay.net.receiving import MOST_RECEIVING, BoundedReceipt

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = front_server(1 << 20, [BoundedReceipt()])
    healthy = health.aio.HealthServicer()
    await healthy.set("", SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    reflection.enable_server_reflection([health.SERVICE_NAME], server)
    port = bind(server, "127.0.0.1:0", None)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


def open_call(channel: grpc.aio.Channel, method: str) -> Any:
    """One that sends what it is told to, byte by byte if need be."""
    return channel.stream_stream(method)()


async def check(channel: grpc.aio.Channel) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    status: int = (await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)).status
    return status


async def test_calls_of_each_kind_are_served(channel: grpc.aio.Channel) -> None:
    assert await check(channel) == SERVING
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=10)
    assert (await watch.read()).status == SERVING
    watch.cancel()
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    answered = [one async for one in stub.ServerReflectionInfo(iter([asked]), timeout=10)]
    assert answered[0].list_services_response.service[0].name == health.SERVICE_NAME


@pytest.mark.parametrize("method", [CHECK, WATCH])
async def test_a_call_without_a_message_ends_in_time(
    channel: grpc.aio.Channel, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.net.receiving.RECEIVE_SECONDS", 0.1)
    silent = open_call(channel, method)
    async with asyncio.timeout(10):
        assert await silent.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await check(channel) == SERVING


async def test_the_oldest_of_too_many_ends(channel: grpc.aio.Channel) -> None:
    silent = [open_call(channel, WATCH)]
    await silent[0].wait_for_connection()
    await check(channel)  # it is the oldest: a later call was served
    silent += [open_call(channel, WATCH) for _ in range(MOST_RECEIVING - 1)]
    for one in silent:
        await one.wait_for_connection()
    async with asyncio.timeout(10):
        while not any(one.done() for one in silent):
            assert await check(channel) == SERVING
    assert [one.done() for one in silent].index(True) == 0
    late = silent[-1]
    await late.write(health_pb2.HealthCheckRequest().SerializeToString())
    answer = health_pb2.HealthCheckResponse.FromString(await late.read())
    assert answer.status == SERVING, "one that speaks at last is served"
    for one in silent:
        one.cancel()


async def test_what_cannot_be_read_is_the_clients_fault(
    channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    broken = open_call(channel, CHECK)
    await broken.write(b"\x0a\xff")
    assert await broken.code() is grpc.StatusCode.INVALID_ARGUMENT
    empty = open_call(channel, CHECK)
    await empty.done_writing()
    assert await empty.code() is grpc.StatusCode.INVALID_ARGUMENT
    ours = [one for one in caplog.records if one.name.startswith(("kvrelay.net", "grpc"))]
    assert not ours, "it would fill the log"


async def test_a_refused_message_is_let_go_of_at_once() -> None:
    """Without the garbage collector: a message may have many megabytes."""
    seen: list[weakref.ref[set[int]]] = []

    class Refusing(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it is untyped
        async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
            made_of_it = {1}  # a message itself takes no weak reference
            seen.append(weakref.ref(made_of_it))
            try:
                raise ValueError("it is not to be served")
            except ValueError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    server = front_server(1 << 20, [BoundedReceipt()])
    health_pb2_grpc.add_HealthServicer_to_server(Refusing(), server)
    port = bind(server, "127.0.0.1:0", None)
    await server.start()
    gc.disable()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await check(channel)
            async with asyncio.timeout(10):
                while seen[0]() is not None:
                    await asyncio.sleep(0.01)
    finally:
        gc.enable()
        await server.stop(None)


async def test_the_handler_alone_has_the_message() -> None:
    """While it answers, too: it may let go of what it no longer needs."""
    references: list[int] = []

    async def answer(message: bytes, context: Any) -> None:
        references.append(sys.getrefcount(message))
        await context.write(b"")

    handler = grpc.unary_stream_rpc_method_handler(answer)
    server = front_server(1 << 20, [BoundedReceipt()])
    generic = grpc.method_handlers_generic_handler("one", {"Call": handler})
    server.add_generic_rpc_handlers((generic,))
    port = bind(server, "127.0.0.1:0", None)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_stream("/one/Call")(b"x" * 1000)
        assert [one async for one in call] == [b""]
    await server.stop(None)
    assert references == [2], "its own name, and the question itself"
