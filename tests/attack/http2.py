"""A bare client of HTTP/2, which chooses its windows and says what gRPC's client would not."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM: Final = 1
ACK: Final = 1
END_HEADERS: Final = 4
_INITIAL_WINDOW: Final = 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def text(value: str) -> bytes:
    """A string of HPACK, without any compression."""
    size = len(value)
    if size < 127:
        return bytes([size]) + value.encode()
    rest, prefix = size - 127, b"\x7f"
    while rest >= 128:
        prefix, rest = prefix + bytes([rest % 128 | 128]), rest // 128
    return prefix + bytes([rest]) + value.encode()


def call_headers(path: str, more: Iterable[tuple[str, str]] = ()) -> bytes:
    """The header block of a gRPC call."""
    fields = b"\x83\x86"  # POST, http
    fields += b"\x04" + text(path) + b"\x01" + text("localhost")
    fields += b"\x0f\x10" + text("application/grpc")
    for name, value in (("te", "trailers"), *more):
        fields += b"\x00" + text(name) + text(value)
    return fields


def message(payload: bytes, announced: int | None = None) -> bytes:
    """A gRPC message; `announced`: the size that its head says."""
    size = len(payload) if announced is None else announced
    return b"\0" + size.to_bytes(4, "big") + payload


class Frame(NamedTuple):
    """A frame as it was received."""

    kind: int
    flags: int
    stream: int
    payload: bytes


class Http2:
    """One connection to a gRPC server.

    It answers pings and settings, and gives the server no more window than it is told to.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._stream = -1

    def begin(self, window: int = 65535) -> None:
        """Greet the server, with the window that each answer has."""
        settings = struct.pack(">HI", _INITIAL_WINDOW, window)
        self.writer.write(PREFACE + frame(SETTINGS, 0, 0, settings))

    def call(
        self,
        path: str,
        sent: bytes = b"",
        *,
        flags: int = END_STREAM,
        headers: Iterable[tuple[str, str]] = (),
    ) -> int:
        """Open a call with these bytes as its first data, by default complete."""
        self._stream += 2
        opened = frame(HEADERS, END_HEADERS, self._stream, call_headers(path, headers))
        self.writer.write(opened + frame(DATA, flags, self._stream, sent))
        return self._stream

    def reset(self, stream: int) -> None:
        """End a call as a client does that has lost interest."""
        self.writer.write(frame(RST_STREAM, 0, stream, struct.pack(">I", 8)))

    async def receive(self) -> Frame:
        """The next frame; raises IncompleteReadError or OSError when the server has hung up."""
        head = await self.reader.readexactly(9)
        kind, flags, stream = struct.unpack(">BBI", head[3:])
        payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
        if kind in (SETTINGS, PING) and not flags & ACK:
            self.writer.write(frame(kind, ACK, 0, payload if kind == PING else b""))
        return Frame(kind, flags, stream, payload)

    async def until_hung_up(self) -> list[Frame]:
        """All that comes until the server hangs up."""
        frames = []
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                frames.append(await self.receive())
        return frames


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Http2]:
    """A connection to ``host:port``, dropped at the end."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Http2(reader, writer)
    finally:
        writer.transport.abort()
