"""What a hostile network does to a cluster, from a process of its own.

`python -m tests.attack.grpc_attack --router HOST:PORT --worker HOST:PORT --metrics HOST:PORT
--http HOST:PORT` attacks these ports until its input ends, then prints as JSON what it has done
and how it was answered. It speaks HTTP/2 by itself where gRPC's client would not do what it does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import struct
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import grpc

from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc
from tests.attack.http2 import PREFACE, call_headers, frame
from tests.attack.http_attack import HttpAttack

MIB = 1 << 20
GENERATE = "/kvrelay.v1.InferenceService/Generate"
ATTACH = "/kvrelay.v1.WorkerService/Attach"
HAND_OVER = "/kvrelay.v1.HandOverService/HandOver"
CROWD = (b"", PREFACE[:10], PREFACE + b"\0\0\0\4\0\0\0\0\0")
"""What one of many says: nothing, half of HTTP/2's preface, or the preface and nothing more."""
PAUSE_SECONDS = 0.5
"""Between two tries of one attacker."""
STREAMS = 50
"""Half-open ones on one connection."""
SLOW_READERS = 8


def half_open(path: str) -> bytes:
    """Calls that have announced a message of 16 MiB and sent its first bytes."""
    opened = [PREFACE, frame(4, 0, 0)]
    for stream in range(1, 2 * STREAMS, 2):
        opened.append(frame(1, 4, stream, call_headers(path)))
        opened.append(frame(0, 0, stream, b"\0" + (16 * MIB).to_bytes(4, "big") + b"x" * 100))
    return b"".join(opened)


def garbage(rng: random.Random) -> Iterator[bytes]:
    """Bytes that are not what a port expects, of one kind after the other, for ever."""
    while True:
        yield rng.randbytes(rng.randrange(1, 4096))
        yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(600)  # TLS's hello
        yield b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: " + b"a" * rng.randrange(40_000)
        yield PREFACE + rng.randbytes(4096)
        yield PREFACE + frame(4, 0, 0) + frame(1, 4, 1, rng.randbytes(200))
        yield PREFACE + frame(4, 0, 0) + b"\xff\xff\xff" + rng.randbytes(2000)  # a huge frame
        message = b"\0" + (300).to_bytes(4, "big") + rng.randbytes(300)
        for path in (GENERATE, ATTACH, HAND_OVER):
            call = frame(1, 4, 1, call_headers(path)) + frame(0, 1, 1, message)
            yield PREFACE + frame(4, 0, 0) + call
        # Streams that are reset as soon as they are open, and pings without end.
        resets = (
            frame(1, 4, n, call_headers(GENERATE)) + frame(3, 0, n, struct.pack(">I", 8))
            for n in range(1, 400, 2)
        )
        yield PREFACE + frame(4, 0, 0) + b"".join(resets)
        yield PREFACE + frame(4, 0, 0) + 1000 * frame(6, 0, 0, bytes(8))


@dataclass
class Attack:
    """All attackers.

    Args:
        router: the port that clients connect to.
        workers: their gRPC ports.
        metrics: everybody's metrics ports.
        http: the router's HTTP port.
        connections: that a crowd keeps open on the router's port; a tenth on each other one.
    """

    router: str
    workers: list[str]
    metrics: list[str]
    http: str
    connections: int
    only: list[str]
    """Kinds of attackers; empty: all."""

    def __post_init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """What was done, and how it was answered."""

    def attackers(self) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
        """The kind of each attacker, and what it does once; that is called again and again."""
        for address in (self.router, *self.workers, *self.metrics):
            tenth = max(1, self.connections // 10)
            for number in range(self.connections if address == self.router else tenth):
                yield "crowd", partial(self._talk, "crowd", address, CROWD[number % len(CROWD)])
            bytes_of = garbage(random.Random(address))
            for _ in range(2):
                yield "garbage", partial(self._send_garbage, address, bytes_of)
        for address, path in (
            *((worker, path) for worker in self.workers for path in (ATTACH, HAND_OVER)),
            *([(self.router, GENERATE)] * 4),
        ):
            yield "half-open", partial(self._talk, "half-open", address, half_open(path))
        for size in (8 * MIB, 16 * MIB - 1024, 24 * MIB, 40 * MIB):
            yield "huge", partial(self._send_huge_prompt, size)
        for _ in range(SLOW_READERS):
            yield "slow", self._read_slowly
        yield from HttpAttack(self.http, self.connections, self.counts).attackers()

    async def go_on(self) -> None:
        """Let every attacker try until cancelled."""
        async with asyncio.TaskGroup() as group:
            for kind, one in self.attackers():
                if not self.only or kind in self.only:
                    group.create_task(self._repeat(one))

    async def _repeat(self, one: Callable[[], Awaitable[None]]) -> None:
        await asyncio.sleep(random.random() * PAUSE_SECONDS)
        while True:
            try:
                await one()
            except grpc.aio.AioRpcError as error:
                self.counts[f"{error.code().name}"] += 1
            except OSError as error:
                self.counts[type(error).__name__] += 1
            await asyncio.sleep(PAUSE_SECONDS)

    async def _send_garbage(self, address: str, bytes_of: Iterator[bytes]) -> None:
        await self._talk("garbage", address, next(bytes_of), 1.0)

    async def _talk(self, what: str, address: str, words: bytes, seconds: float = 3600) -> None:
        """Connect, say it, and listen until the other side hangs up, or so long."""
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        self.counts[what] += 1
        try:
            writer.write(words)
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while await reader.read(1 << 16):
                        pass
            self.counts[f"{what}, ended"] += 1
        finally:
            writer.transport.abort()

    async def _send_huge_prompt(self, size: int) -> None:
        options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self.router, options) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            self.counts["huge prompts"] += 1
            text = pb.GenerateRequest(text="the quick brown fox " * (size // 20))
            async for _ in stub.Generate(text, timeout=60):
                pass

    async def _read_slowly(self) -> None:
        """A call that asks for much and never reads."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.lookahead_bytes", 1024)]
        async with grpc.aio.insecure_channel(self.router, options) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            params = pb.SamplingParams(max_tokens=1500, logprobs=5, ignore_eos=True)
            ids = pb.TokenIds(ids=range(1, 200))
            call = stub.Generate(pb.GenerateRequest(input_ids=ids, sampling_params=params))
            self.counts["slow readers"] += 1
            await call.code()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--router", required=True)
    parser.add_argument("--worker", action="append", default=[])
    parser.add_argument("--metrics", action="append", default=[])
    parser.add_argument("--http", required=True)
    parser.add_argument("--connections", type=int, default=2000)
    parser.add_argument("--only", action="append", default=[], help="a kind of attackers")
    told = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    attack = Attack(told.router, told.worker, told.metrics, told.http, told.connections, told.only)
    going_on = asyncio.create_task(attack.go_on())
    await asyncio.to_thread(sys.stdin.buffer.read)
    assert not going_on.done(), going_on.exception()
    sys.stdout.write(json.dumps(attack.counts))
    sys.stdout.flush()
    os._exit(0)  # thousands of connections end with the process


if __name__ == "__main__":
    asyncio.run(main())
