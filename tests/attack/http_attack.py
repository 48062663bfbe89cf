"""What a hostile network does to an HTTP port, one attacker at a time."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
DRIPPED_BYTES = 3
"""At a time, by one that is slow."""
DRIP_SECONDS = 0.2
LISTEN_SECONDS = 2.0
PROMPT = list(range(1, 200))
LONG: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True}
SLOW_READERS = 4
LEAVERS = 4


def call(body: dict[str, Any]) -> bytes:
    """A whole call for completions."""
    sent = json.dumps(body).encode()
    return HEAD + b"content-length: %d\r\n\r\n" % len(sent) + sent


SHORT = call({"prompt": [1, 2, 3], "max_tokens": 2})
STREAMED = call({**LONG, "stream": True})
CROWD = (b"", HEAD[:20], HEAD, HEAD + b"content-length: 1000\r\n\r\n{", HEALTH)
"""What one of many says: nothing, a part of a call, or one call and nothing more."""
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
MALFORMED = (
    CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n",
    CHUNKED + b"fffffffffffffffff\r\n{}",
    CHUNKED + b"7fffffff\r\n{}",
    CHUNKED + b"-1\r\n{}\r\n0\r\n\r\n",
    CHUNKED + b"2\r\n{}{}{}\r\n0\r\n\r\n",
    CHUNKED + b"1\r\n{\r\n" * 2000,
    CHUNKED + b"0\r\n" + b"a: b\r\n" * 10_000,
    HEAD + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n",
    HEAD + b"content-length: 3\r\ncontent-length: 9\r\n\r\n{}",
    HEAD + b"content-length: -3\r\n\r\n{}",
    HEAD + b"content-length: 99999999999999999999\r\n\r\n{}",
    HEAD + b"x: " + b"y" * 300_000 + b"\r\n\r\n",
    HEAD + b"x: y\r\n" * 50_000 + b"\r\n",
    b"GET /" + b"x" * 300_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/9.9\r\n\r\n",
    b"GET http://[ HTTP/1.1\r\nhost: [\r\n\r\n",
    HEAD + b"content-length: 2\r\nexpect: 100-continue\r\n\r\n",
    HEAD + b"upgrade: websocket\r\nconnection: upgrade\r\ncontent-length: 0\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100),
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600),
    HEALTH * 5000,
    SHORT * 200,
    HEAD + b"content-length: 40000000\r\n\r\n" + b" " * 1_000_000,
    call({"prompt": [1], "n": 1 << 60}),
    HEAD + b"content-length: 100000\r\n\r\n" + b"[" * 100_000,
)


def malformed(rng: random.Random) -> Iterator[bytes]:
    """All of them again and again, with random bytes in between."""
    for words in itertools.cycle(MALFORMED):
        yield words
        yield rng.randbytes(rng.randrange(1, 4096))


@dataclass
class HttpAttack:
    """The attackers of one port.

    Args:
        address: of the port.
        connections: that a crowd keeps open.
        counts: what was done, and how it was answered.
    """

    address: str
    connections: int
    counts: Counter[str]

    def attackers(self) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
        """The kind of each attacker, and what it does once; that is called again and again."""
        for number in range(self.connections):
            yield "http crowd", partial(self._say, "http crowd", CROWD[number % len(CROWD)], 3600)
        for number in range(4):
            bytes_of = malformed(random.Random(number))
            yield "http malformed", partial(self._say_next, bytes_of)
        for words in (HEAD + b"x: y\r\n" * 1000, SHORT[:-1] + b" " * 1000):
            yield "http slow", partial(self._drip, words)
        for number in range(LEAVERS):
            yield "http leaver", partial(self._leave, 1 << (3 * number))
        for _ in range(SLOW_READERS):
            yield "http slow reader", self._read_nothing

    async def _say_next(self, words: Iterator[bytes]) -> None:
        await self._say("http malformed", next(words), LISTEN_SECONDS)

    async def _say(self, what: str, words: bytes, seconds: float) -> None:
        """Say it at once, and listen until the other side hangs up, or so long."""
        async with _connection(self.address) as (reader, writer):
            self.counts[what] += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    writer.write(words)
                    self._count_status(await reader.read(12))
                    while await reader.read(1 << 16):
                        pass

    async def _drip(self, words: bytes) -> None:
        """Say it a few bytes at a time, until the other side hangs up."""
        async with _connection(self.address) as (reader, writer):
            self.counts["http slow"] += 1
            listening = asyncio.create_task(reader.read(12))
            for start in range(0, len(words), DRIPPED_BYTES):
                writer.write(words[start : start + DRIPPED_BYTES])
                await asyncio.wait([listening], timeout=DRIP_SECONDS)
                if listening.done():
                    break
            listening.cancel()

    async def _leave(self, num_bytes: int) -> None:
        """Leave in the middle of a stream."""
        async with _connection(self.address) as (reader, writer):
            self.counts["http leaver"] += 1
            writer.write(STREAMED)
            self._count_status(await reader.read(12))
            await reader.read(num_bytes)

    async def _read_nothing(self) -> None:
        """Ask for much, and never read it."""
        async with _connection(self.address, limit=1 << 10) as (_, writer):
            self.counts["http slow reader"] += 1
            writer.write(call({**LONG, "stream": True, "logprobs": 5, "n": 2}))
            await asyncio.sleep(3600)

    def _count_status(self, answered: bytes) -> None:
        status = answered[9:12].decode("latin-1")
        self.counts[f"http {status}" if status.isdecimal() else "http, hung up"] += 1


@asynccontextmanager
async def _connection(
    address: str, limit: int = 1 << 16
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection, which ends at once with the context."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=limit)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
