"""What SUB sockets of libzmq hear, and what bounds those that behave badly."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import AsyncIterator, Iterator

import pytest
import zmq
import zmq.asyncio

from kvrelay.net import zmq_publisher
from kvrelay.net.zmq_publisher import ZmqPublisher
from tests.net.zmq_subscriber import subscriber, until

_READY = b"\x05READY\x0bSocket-Type\0\0\0\x03SUB"
_HELLO = b"\xff" + bytes(8) + b"\x7f\x03\0NULL" + bytes(48) + bytes([4, len(_READY)]) + _READY
_BEGIN, _END = b"\0\x02\x01x", b"\0\x01\0"
"""Frames of a SUB socket: it subscribes to ``x``, and ends a subscription to everything."""


@contextlib.asynccontextmanager
async def _stranger(port: int) -> AsyncIterator[asyncio.StreamWriter]:
    """A connection that has greeted as a SUB socket does."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_HELLO)
    await reader.readexactly(len(_HELLO))  # its own is as long
    yield writer
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@contextlib.asynccontextmanager
async def publishing(
    topic: bytes = b"kv-events", host: str = "127.0.0.1"
) -> AsyncIterator[tuple[ZmqPublisher, int]]:
    publisher = ZmqPublisher(topic)
    try:
        yield publisher, await publisher.start(host)
    finally:
        await publisher.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
async def test_messages_go_to_those_who_subscribed_to_their_topic(host: str) -> None:
    connected = f"[{host}]" if ":" in host else "127.0.0.1"
    async with (
        asyncio.timeout(60),
        publishing(host=host) as (publisher, port),
        subscriber(port, b"", host=connected) as everything,
    ):
        await until(lambda: publisher.had_subscribers)
        async with subscriber(port, b"kv", b"other", host=connected) as some:
            await until(lambda: len(publisher._topics) == 3)
            publisher.publish(bytes(70_000), b"last")
            for socket in (everything, some):
                assert await socket.recv_multipart() == [b"kv-events", bytes(70_000), b"last"]
            everything.setsockopt(zmq.UNSUBSCRIBE, b"")
            await until(lambda: publisher._topics == {b"kv", b"other"})
            some.setsockopt(zmq.UNSUBSCRIBE, b"kv")
            await until(lambda: publisher._topics == {b"other"})
        await until(lambda: not publisher._topics)


async def test_a_subscriber_that_does_not_read_misses_messages_and_keeps_nobody_waiting() -> None:
    async with (
        asyncio.timeout(30),
        publishing() as (publisher, port),
        subscriber(port, b"", most_unread=2) as lazy,
    ):
        await until(lambda: publisher.had_subscribers)
        for number in range(400):
            publisher.publish(number.to_bytes(2), bytes(1 << 18))
        heard = 0
        while (number := int.from_bytes((await lazy.recv_multipart())[1])) == heard:
            heard += 1
            if heard % 16 == 0:
                publisher.publish((1 << 15).to_bytes(2))
        assert 0 < heard < 400
        assert number == 1 << 15


async def test_whoever_speaks_something_else_disturbs_nobody() -> None:
    async with (
        asyncio.timeout(60),
        publishing() as (publisher, port),
        subscriber(port, b"") as good,
    ):
        await until(lambda: publisher.had_subscribers)
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"\xff" * 1000):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(garbage)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            publisher.publish(b"still")
            assert await good.recv_multipart() == [b"kv-events", b"still"]
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        assert publisher._topics == {b""}


async def test_a_stranger_that_ends_a_subscription_of_others_silences_nobody() -> None:
    async with (
        asyncio.timeout(60),
        publishing() as (publisher, port),
        subscriber(port, b"") as good,
        _stranger(port) as writer,
    ):
        await until(lambda: publisher._topics == {b""})
        writer.write(_END)
        await until(lambda: not publisher._topics)
        assert publisher.had_subscribers
        publisher.publish(b"still")
        assert await good.recv_multipart() == [b"kv-events", b"still"]


async def test_nobody_is_there_at_first_nor_for_other_topics() -> None:
    async with (
        asyncio.timeout(60),
        publishing() as (publisher, port),
        subscriber(port, b"other"),
    ):
        assert not publisher.had_subscribers
        await until(lambda: publisher._topics == {b"other"})
        assert not publisher.had_subscribers


async def test_long_topics_are_refused() -> None:
    async with (
        asyncio.timeout(60),
        publishing() as (publisher, port),
        subscriber(port, bytes(10_000)),
        subscriber(port, b"short"),
    ):
        await until(lambda: publisher._topics == {b"short"})


async def test_with_too_many_topics_it_listens_anew_and_subscribers_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zmq_publisher, "_MOST_TOPICS", 20)
    async with (
        asyncio.timeout(60),
        publishing() as (publisher, port),
        subscriber(port, b"") as good,
    ):
        await until(lambda: publisher.had_subscribers)
        first = publisher._socket
        async with subscriber(port, *(bytes([number]) for number in range(30))):
            await until(lambda: publisher._socket is not first)
        reading = asyncio.ensure_future(good.recv_multipart())  # libzmq then subscribes again
        await until(lambda: publisher._topics == {b""})
        publisher.publish(b"again")
        assert await reading == [b"kv-events", b"again"]


async def test_others_run_while_a_subscriber_sends_many_messages() -> None:
    async with asyncio.timeout(60), publishing() as (publisher, port), _stranger(port) as writer:
        writer.write(_END * 4000 + _BEGIN)
        turns = 0
        while publisher._topics != {b"x"}:
            await asyncio.sleep(0)
            turns += 1
        assert turns >= 4000 // zmq_publisher._MESSAGES_A_TURN


async def test_whoever_sends_faster_than_it_reads_is_hung_up_on() -> None:
    async with (
        asyncio.timeout(60),
        publishing() as (publisher, port),
        subscriber(port, b"") as good,
        _stranger(port) as writer,
    ):
        await until(lambda: publisher._topics == {b""})
        connection = writer.get_extra_info("socket").dup()
        assert await asyncio.to_thread(_is_hung_up_on, connection)
        reading = asyncio.ensure_future(good.recv_multipart())
        await until(lambda: publisher._topics == {b""})
        publisher.publish(b"again")
        assert await reading == [b"kv-events", b"again"]


def _is_hung_up_on(connection: socket.socket) -> bool:
    """Whether that happens before it has sent 16 million messages."""
    with connection:
        connection.settimeout(20)
        try:
            for _ in range(16_000):
                connection.sendall(_END * 1000)
        except ConnectionError:
            return True
        return False


async def test_without_files_it_tries_until_it_listens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(zmq_publisher, "_TRIES_BEFORE_WARNING", 2)
    async with (
        asyncio.timeout(60),
        publishing() as (publisher, port),
        subscriber(port, b"") as good,
    ):
        await until(lambda: publisher.had_subscribers)
        with _no_files():
            await _listens_anew(publisher, good, monkeypatch)
            await until(lambda: "still trying" in caplog.text)
            publisher.publish(b"nobody hears it")
        reading = asyncio.ensure_future(good.recv_multipart())
        await until(lambda: publisher._topics == {b"", b"more"})
        publisher.publish(b"again")
        assert await reading == [b"kv-events", b"again"]


async def test_it_can_be_closed_while_there_are_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = ZmqPublisher()
    async with asyncio.timeout(60), subscriber(await publisher.start("127.0.0.1"), b"") as good:
        await until(lambda: publisher.had_subscribers)
        with _no_files():
            await _listens_anew(publisher, good, monkeypatch)
            await publisher.close()
        assert publisher._context.closed


async def _listens_anew(
    publisher: ZmqPublisher, good: zmq.asyncio.Socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Return once it has hung up, for a topic too many."""
    with monkeypatch.context() as patch:
        patch.setattr(zmq_publisher, "_MOST_TOPICS", 1)
        good.setsockopt(zmq.SUBSCRIBE, b"more")
        await until(lambda: publisher._socket.closed)


@contextlib.contextmanager
def _no_files() -> Iterator[None]:
    """This process can open none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_host_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(OSError, match=r"192\.0\.2\.1"):
        async with publishing(host="192.0.2.1"):
            pass
