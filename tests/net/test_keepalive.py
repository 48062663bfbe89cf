"""Keepalive ends silent connections; its times are divided by forty here."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrelay.net.channel_options import (
    KEEPALIVE_MS,
    KEEPALIVE_TIMEOUT_MS,
    Options,
    channel_options,
    server_options,
)
from kvrelay.net.door_rules import MAX_MESSAGE_BYTES, WORKER
from kvrelay.net.health_service import HealthService

FASTER = 40
PING_S = KEEPALIVE_MS / FASTER / 1000
SILENT_S = 6 * PING_S
"""So long that a server which takes pings for too many would have hung up."""
LOST_S = (KEEPALIVE_MS + KEEPALIVE_TIMEOUT_MS) / FASTER / 1000


def faster(options: Options) -> Options:
    return [(name, value // FASTER if name.endswith("_ms") else value) for name, value in options]


class Wire:
    """Carries bytes between a client and a server, until it is cut without a word."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._cut = asyncio.Event()
        self._halves: set[asyncio.Task[None]] = set()
        self.connections = 0
        self.carried = 0

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._port)
        for one, other in ((reader, there_writer), (there_reader, writer)):
            half = asyncio.create_task(self._carry(one, other))
            self._halves.add(half)

    def cut(self) -> None:
        self._cut.set()

    async def close(self) -> None:
        for half in self._halves:
            half.cancel()
        await asyncio.gather(*self._halves, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            while piece := await reader.read(65536):
                if self._cut.is_set():
                    await asyncio.Event().wait()
                self.carried += 1
                writer.write(piece)
                await writer.drain()


@asynccontextmanager
async def wired() -> AsyncIterator[tuple[Wire, health_pb2_grpc.HealthStub]]:
    options = server_options(WORKER, MAX_MESSAGE_BYTES, internal=True)
    server = grpc.aio.server(options=faster(options))
    health_pb2_grpc.add_HealthServicer_to_server(HealthService(), server)
    wire = Wire(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    listener = await asyncio.start_server(wire.connect, "127.0.0.1", 0)
    address = "{}:{}".format(*listener.sockets[0].getsockname())
    try:
        async with grpc.aio.insecure_channel(address, faster(channel_options())) as channel:
            yield wire, health_pb2_grpc.HealthStub(channel)
    finally:
        listener.close()
        await wire.close()
        await listener.wait_closed()
        await server.stop(None)


async def test_a_silent_stream_and_a_silent_connection_live_on():
    async with wired() as (wire, stub):
        call = stub.Watch(health_pb2.HealthCheckRequest())
        await call.read()
        before = wire.carried
        await asyncio.sleep(SILENT_S)
        assert wire.carried > before, "there are pings, and their answers"
        assert not call.done()
        call.cancel()
        before = wire.carried
        await asyncio.sleep(SILENT_S)
        assert wire.carried > before, "also without a call"
        await stub.Watch(health_pb2.HealthCheckRequest()).read()
        assert wire.connections == 1


async def test_a_host_that_is_gone_without_a_word_is_found():
    async with wired() as (wire, stub):
        call = stub.Watch(health_pb2.HealthCheckRequest())
        await call.read()
        wire.cut()
        begun = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await asyncio.wait_for(call.read(), 60)
        assert time.monotonic() - begun > LOST_S / 2
