"""The worker's listener."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any

import pytest

from kvrelay.engine.scheduler.commands import Attach, Detach, Inbox
from kvrelay.engine.worker.submit_rules import SubmitRules
from kvrelay.engine.worker.worker_service import WorkerService
from kvrelay.net import channel_options
from kvrelay.net.channels import bind, worker_server
from kvrelay.v1 import worker_pb2_grpc
from kvrelay.wire.worker_info import WorkerRole

ROUTER = """
import sys, time, grpc
from kvrelay.v1 import worker_pb2, worker_pb2_grpc
from kvrelay.wire.version import VERSION

def hello():
    hello = worker_pb2.AttachHello(router="r", incarnation="w-1", version=VERSION)
    yield worker_pb2.AttachRequest(hello=hello)
    time.sleep(600)

stub = worker_pb2_grpc.WorkerServiceStub(grpc.insecure_channel(sys.argv[1]))
for _ in stub.Attach(hello()):
    pass
"""


async def test_a_router_that_stands_still_is_let_go(monkeypatch: pytest.MonkeyPatch):
    """Its process lives, its connection is open, and it will never read what it is sent."""
    often = [
        (name, 500 if name.endswith("_ms") else value) for name, value in channel_options._KEEPALIVE
    ]
    monkeypatch.setattr(channel_options, "_KEEPALIVE", often)
    inbox, server = Inbox[Any](), worker_server()
    service = WorkerService("w-1", inbox, SubmitRules(WorkerRole.DECODE, 97, ()))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, server)
    port = bind(server, "127.0.0.1:0", None)
    await server.start()
    router = await asyncio.create_subprocess_exec(sys.executable, "-c", ROUTER, f"127.0.0.1:{port}")
    try:
        async with asyncio.timeout(60):
            assert isinstance(await _next(inbox), Attach)
            router.send_signal(signal.SIGSTOP)
            assert isinstance(await _next(inbox), Detach)
    finally:
        router.kill()
        await router.wait()
        await server.stop(0)


async def _next(inbox: Inbox[Any]) -> object:
    while not inbox:
        await asyncio.sleep(0.02)
    (message,) = inbox.take_all()
    return message
