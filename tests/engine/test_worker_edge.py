"""Streams to a worker that do not begin as they must."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from kvrelay.engine.scheduler.commands import Inbox
from kvrelay.engine.worker.submit_rules import SubmitRules
from kvrelay.engine.worker.worker_service import WorkerService
from kvrelay.net.channels import bind, worker_channel, worker_server
from kvrelay.v1 import worker_pb2, worker_pb2_grpc
from kvrelay.wire.version import VERSION
from kvrelay.wire.worker_info import WorkerRole

ATTACH = "/kvrelay.v1.WorkerService/Attach"


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server, inbox = worker_server(), Inbox[Any]()
    service = WorkerService("decode-0-1", inbox, SubmitRules(WorkerRole.DECODE, 100, ()))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, server)
    port = bind(server, "127.0.0.1:0", None)
    await server.start()
    async with worker_channel(f"127.0.0.1:{port}", None) as channel:
        yield channel
    await server.stop(None)
    assert not inbox, "no router was attached"


@pytest.mark.parametrize("sent", [None, b"", b"\x0a\xff"], ids=["nothing", "another", "garbage"])
async def test_a_stream_that_does_not_say_hello_ends(
    channel: grpc.aio.Channel,
    sent: bytes | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("kvrelay.engine.worker.service_checks._FIRST_SECONDS", 0.2)
    call: Any = channel.stream_stream(ATTACH)()
    if sent is not None:
        await call.write(sent)
    async with asyncio.timeout(60):
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert await call.details() == "hello must come first"
    assert not said_by_the_edge(caplog)


@pytest.mark.parametrize("version", ["", "0.0.9 (0123abcd)"])
async def test_a_router_of_another_version_is_refused_and_both_are_named(
    channel: grpc.aio.Channel, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    call: Any = channel.stream_stream(ATTACH)()
    hello = worker_pb2.AttachHello(router="r", incarnation="decode-0-1", version=version)
    await call.write(worker_pb2.AttachRequest(hello=hello).SerializeToString())
    async with asyncio.timeout(60):
        assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
    theirs = version or "an earlier version"
    why = f"version: router r is of {theirs}, this worker of {VERSION}"
    assert await call.details() == why
    assert said_by_the_edge(caplog) == [f"{why}. It sends no requests here"]


def said_by_the_edge(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Other tests have tasks on this loop, too."""
    return [
        one.getMessage() for one in caplog.records if one.name.startswith("kvrelay.engine.worker")
    ]
