"""A subscriber of ZeroMQ, byte by byte, and libzmq's own where pyzmq is installed."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import struct
from collections.abc import AsyncIterator, Callable

import pytest

from kvrelay.net.zmq_publisher import ZmqPublisher

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + bytes(32)
READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 3) + b"SUB"


class Subscriber:
    """The other side of ZMTP 3."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, port: int, *topics: bytes) -> Subscriber:
        made = cls(*await asyncio.open_connection("127.0.0.1", port))
        made.writer.write(GREETING + bytes([4, len(READY)]) + READY)
        greeting = await made.reader.readexactly(64)
        assert greeting[:12] == b"\xff" + bytes(8) + b"\x7f\x03\x00"
        flags, ready = await made.frame()
        assert flags == 4
        assert ready.startswith(b"\x05READY")
        assert ready.endswith(b"PUB")
        for topic in topics:
            made.writer.write(bytes([0, 1 + len(topic), 1]) + topic)
        return made

    async def frame(self) -> tuple[int, bytes]:
        (flags,) = await self.reader.readexactly(1)
        size = struct.unpack(">Q", await self.reader.readexactly(8))[0] if flags & 2 else None
        size = (await self.reader.readexactly(1))[0] if size is None else size
        return flags, await self.reader.readexactly(size)

    async def message(self) -> list[bytes]:
        frames = []
        while True:
            flags, body = await self.frame()
            frames.append(body)
            if not flags & 1:
                return frames


@contextlib.asynccontextmanager
async def subscriber(port: int, *topics: bytes) -> AsyncIterator[Subscriber]:
    made = await Subscriber.connect(port, *topics)
    try:
        yield made
    finally:
        made.writer.close()
        with contextlib.suppress(ConnectionError):
            await made.writer.wait_closed()


@contextlib.asynccontextmanager
async def publishing(most_unread_bytes: int = 1 << 20) -> AsyncIterator[tuple[ZmqPublisher, int]]:
    publisher = ZmqPublisher(most_unread_bytes)
    try:
        yield publisher, await publisher.start("127.0.0.1")
    finally:
        await publisher.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def subscribed(publisher: ZmqPublisher) -> int:
    return sum(map(len, publisher._topics.values()))


async def test_messages_go_to_those_who_subscribed_to_their_beginning() -> None:
    async with (
        asyncio.timeout(20),
        publishing() as (publisher, port),
        subscriber(port, b"") as everything,
        subscriber(port, b"kv", b"other") as some,
    ):
        await until(lambda: subscribed(publisher) == 3)
        publisher.publish((b"no", b"1"))
        publisher.publish((b"kv-events", bytes(300), b"last"))
        assert await everything.message() == [b"no", b"1"]
        assert await everything.message() == [b"kv-events", bytes(300), b"last"]
        assert await some.message() == [b"kv-events", bytes(300), b"last"]
        some.writer.write(bytes([0, 3, 0]) + b"kv")
        await until(lambda: subscribed(publisher) == 2)
        publisher.publish((b"kv-events", b""))
        publisher.publish((b"others", b""))
        assert await some.message() == [b"others", b""]
        some.writer.close()
        await until(lambda: publisher.num_subscribers == 1)


async def test_a_subscriber_that_does_not_read_misses_messages_and_keeps_nobody_waiting() -> None:
    async with (
        asyncio.timeout(30),
        publishing() as (publisher, port),
        subscriber(port, b"") as lazy,
    ):
        await until(lambda: subscribed(publisher) == 1)
        missed = sum(publisher.publish((bytes(1 << 20),)) for _ in range(64))
        assert 0 < missed < 64
        for _ in range(64 - missed):
            await lazy.message()
        await until(lambda: publisher.publish((b"again",)) == 0)
        assert (await lazy.message())[-1] == b"again"


@pytest.mark.parametrize(
    "greeting",
    [
        b"GET / HTTP/1.1\r\n".ljust(64),
        GREETING.replace(b"NULL", b"CURV"),
        GREETING + b"\0\x09hello",
    ],
)
async def test_whoever_speaks_something_else_is_hung_up_on(greeting: bytes) -> None:
    async with asyncio.timeout(20), publishing() as (publisher, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(greeting.ljust(80, b"\0"))
        with contextlib.suppress(ConnectionError):
            while await reader.read(100):
                pass
        assert publisher.num_subscribers == 0
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.skipif(importlib.util.find_spec("zmq") is None, reason="pyzmq is not installed")
async def test_libzmq_subscribes() -> None:
    zmq = importlib.import_module("zmq")
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, 10_000)
    async with publishing() as (publisher, port):
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.setsockopt(zmq.SUBSCRIBE, b"kv")
        await until(lambda: subscribed(publisher) == 1)
        publisher.publish((b"kv-events", bytes(70_000), b"x"))
        received = await asyncio.to_thread(socket.recv_multipart)
        assert received == [b"kv-events", bytes(70_000), b"x"]
    socket.close()
    context.term()
