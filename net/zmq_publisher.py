"""A PUB socket of ZeroMQ on asyncio: ZMTP 3.0 with the mechanism NULL, https://rfc.zeromq.org/spec/23.

Small enough to have it here: the only package that could do it is a binding of libzmq, with
threads of its own.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Sequence
from typing import Final

_log = logging.getLogger(__name__)

_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_MORE, _LONG, _COMMAND = 1, 2, 4
_GREETING_SECONDS: Final = 10.0
_MOST_SUBSCRIBERS: Final = 64
_LONGEST_FRAME: Final = 1 << 16
"""Of a subscriber, in bytes."""


class ZmqPublisher:
    """Sends messages to all who have subscribed to how they begin; nobody is waited for.

    A subscriber that has more than `most_unread_bytes` to read misses messages. Use it on one
    event loop.

    Args:
        most_unread_bytes: that wait for one subscriber.
    """

    def __init__(self, most_unread_bytes: int = 16 << 20) -> None:
        self._most_unread_bytes = most_unread_bytes
        self._topics: dict[asyncio.StreamWriter, list[bytes]] = {}
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[None] | None] = {}
        self._server: asyncio.Server | None = None

    @property
    def num_subscribers(self) -> int:
        """Connections that have completed their greeting."""
        return len(self._topics)

    async def start(self, host: str, port: int = 0) -> int:
        """Listen; returns the port."""
        self._server = await asyncio.start_server(self._serve, host, port)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def publish(self, message: Sequence[bytes]) -> int:
        """Send a message of one or more frames; returns the subscribers that miss it."""
        data, missed = _frames(message), 0
        for writer, topics in self._topics.items():
            if not any(message[0].startswith(topic) for topic in topics):
                continue
            if writer.transport.get_write_buffer_size() > self._most_unread_bytes:
                missed += 1
            else:
                writer.write(data)
        return missed

    async def close(self) -> None:
        """Close the port and every connection."""
        if self._server is not None:
            self._server.close()
        for writer in self._connections:
            writer.transport.abort()
        tasks = [task for task in self._connections.values() if task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections[writer] = asyncio.current_task()
        try:
            if len(self._connections) <= _MOST_SUBSCRIBERS:
                async with asyncio.timeout(_GREETING_SECONDS):
                    await _greet(reader, writer)
                topics = self._topics[writer] = []
                while True:
                    flags, body = await _read_frame(reader)
                    _subscribe(topics, flags, body)
        except (EOFError, OSError, TimeoutError, ValueError) as error:
            _log.debug("a subscriber left: %s", error)
        finally:
            self._topics.pop(writer, None)
            del self._connections[writer]
            writer.transport.abort()


async def _greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Exchange greetings and READY.

    Raises:
        ValueError: the other side does not speak ZMTP 3 without security.
    """
    writer.write(_GREETING)
    greeting = await reader.readexactly(len(_GREETING))
    if greeting[0] != 0xFF or greeting[9] != 0x7F or greeting[10] < 3:
        raise ValueError("no ZMTP 3")
    if greeting[12:32].rstrip(b"\0") != b"NULL":
        raise ValueError("another mechanism than NULL")
    ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 3) + b"PUB"
    writer.write(_frame(ready, _COMMAND))
    flags, body = await _read_frame(reader)
    if not flags & _COMMAND or not body.startswith(b"\x05READY"):
        raise ValueError("no READY")


async def _read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The flags and the body of a frame."""
    flags = (await reader.readexactly(1))[0]
    if flags & _LONG:
        (size,) = struct.unpack(">Q", await reader.readexactly(8))
    else:
        size = (await reader.readexactly(1))[0]
    if size > _LONGEST_FRAME:
        raise ValueError(f"a frame of {size} bytes")
    return flags, await reader.readexactly(size)


def _subscribe(topics: list[bytes], flags: int, body: bytes) -> None:
    """A subscription, or its end; anything else is ignored."""
    if flags & _COMMAND or not body:
        return
    if body[0] == 1:
        topics.append(body[1:])
    elif body[0] == 0 and body[1:] in topics:
        topics.remove(body[1:])


def _frames(message: Sequence[bytes]) -> bytes:
    parts = [_frame(body, _MORE) for body in message[:-1]]
    return b"".join([*parts, _frame(message[-1], 0)])


def _frame(body: bytes, flags: int) -> bytes:
    if len(body) > 255:
        return struct.pack(">BQ", flags | _LONG, len(body)) + body
    return struct.pack(">BB", flags, len(body)) + body
