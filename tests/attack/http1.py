"""A bare client of HTTP/1.1, which says what no library would."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

HEAD: Final = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"


def call(body: dict[str, Any] | bytes, path: str = "/v1/completions", head: bytes = b"") -> bytes:
    """A whole call, with these further lines in its head."""
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    length = b"content-length: %d\r\n" % len(sent)
    return b"POST %s HTTP/1.1\r\nhost: localhost\r\n%s%s\r\n" % (path.encode(), head, length) + sent


@asynccontextmanager
async def talking(
    address: str,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to ``host:port``, dropped at the end."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def answer_to(reader: asyncio.StreamReader) -> int:
    """The status of an answer that has a length, which is read; raises if it was hung up."""
    head = await reader.readuntil(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            await reader.readexactly(int(line.partition(b":")[2]))
    return int(head.split()[1])
