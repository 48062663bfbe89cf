"""The attacks on a router, each of which goes on until it is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2

from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc
from tests.attack.http1 import HEAD, answer_to, call, talking
from tests.attack.http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    HEADERS,
    PING,
    SETTINGS,
    Http2,
    call_headers,
    connected,
    frame,
    message,
)

MIB: Final = 1 << 20
KIB: Final = 1 << 10
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
SERVICE: Final = "/kvrelay.v1.InferenceService/"
GENERATE, TOKENIZE = f"{SERVICE}Generate", f"{SERVICE}Tokenize"
TICK_SECONDS: Final = 0.02
"""The pause of an attacker that floods, so that the attacked process is busy and not this one."""

Case = Callable[[str, str], Awaitable[None]]
"""An attack on a gRPC and an HTTP address."""
CASES: Final[dict[str, Case]] = {}


def case(name: str) -> Callable[[Case], Case]:
    """Enter an attack by its name."""

    def enter(one: Case) -> Case:
        CASES[name] = one
        return one

    return enter


async def again(once: Callable[[], Awaitable[object]], pause: float = TICK_SECONDS) -> None:
    """Do it again and again, whatever comes of it."""
    while True:
        with contextlib.suppress(OSError, EOFError, grpc.aio.AioRpcError, TimeoutError):
            async with asyncio.timeout(60):
                await once()
        await asyncio.sleep(pause)


async def at_once(number: int, once: Callable[[], Awaitable[object]]) -> None:
    """Let so many attackers do it again and again."""
    async with asyncio.TaskGroup() as group:
        for _ in range(number):
            group.create_task(again(once))


@contextlib.asynccontextmanager
async def stub_of(address: str) -> AsyncIterator[inference_pb2_grpc.InferenceServiceStub]:
    """A client of its own connection."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(address, options) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


async def flood(connection: Http2, words: bytes) -> None:
    """Send it without end, as fast as it is taken."""
    hung_up = asyncio.create_task(connection.until_hung_up())
    try:
        while not hung_up.done():
            connection.writer.write(words)
            await connection.writer.drain()
            await asyncio.sleep(TICK_SECONDS)
    finally:
        hung_up.cancel()


@case("silent watchers")
async def silent_watchers(address: str, _http: str) -> None:
    async def once() -> None:
        async with connected(address) as silent:
            silent.begin(window=0)
            for method in (WATCH, CHECK):
                for _ in range(12):
                    silent.call(method, message(b""))
            await silent.until_hung_up()

    await at_once(8, once)


@case("long names")
async def long_names(address: str, _http: str) -> None:
    named = health_pb2.HealthCheckRequest(service="x" * (16 * MIB)).SerializeToString()

    async def once() -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(address, options) as channel:
            watch = channel.unary_stream(WATCH)(named)
            await watch.code()

    await at_once(4, once)


@case("half-open checks")
async def half_open_checks(address: str, _http: str) -> None:
    async def once() -> None:
        async with connected(address) as half:
            half.begin()
            hung_up = asyncio.create_task(half.until_hung_up())
            while not hung_up.done():
                for _ in range(6):
                    half.call(CHECK, flags=0)
                await asyncio.sleep(TICK_SECONDS)

    await again(once)


@case("unread answers")
async def unread_answers(address: str, _http: str) -> None:
    text = pb.TokenizeRequest(text="the quick brown fox " * (3 * KIB)).SerializeToString()

    async def once() -> None:
        async with connected(address) as silent:
            silent.begin(window=0)
            hung_up = asyncio.create_task(silent.until_hung_up())
            for _ in range(300):
                silent.call(TOKENIZE, message(text))
                await silent.writer.drain()
            await hung_up

    await at_once(2, once)


@case("half-open calls")
async def half_open_calls(address: str, _http: str) -> None:
    async def once() -> None:
        async with connected(address) as half:
            half.begin()
            for _ in range(100):
                half.call(GENERATE, message(b"x" * 100, 16 * MIB), flags=0)
            await half.until_hung_up()

    await at_once(4, once)


@case("tokenizing")
async def tokenizing(address: str, _http: str) -> None:
    text = pb.TokenizeRequest(text="the quick brown fox " * (3 * KIB))
    async with stub_of(address) as stub:
        await at_once(300, lambda: stub.Tokenize(text))


@case("joining")
async def joining(address: str, _http: str) -> None:
    params = pb.SamplingParams(max_tokens=1500, ignore_eos=True)
    same = pb.GenerateRequest(
        request_id="joined", input_ids=pb.TokenIds(ids=[1, 2, 3]), sampling_params=params
    )
    async with stub_of(address) as stub:

        async def once() -> None:
            async for _ in stub.Generate(same):
                pass

        await at_once(200, once)


@case("unknown histories")
async def unknown_histories(address: str, _http: str) -> None:
    request = pb.OpenSessionRequest(history_digest="9-" + "0" * 64)
    async with stub_of(address) as stub:
        await at_once(400, lambda: stub.OpenSession(request))


@case("many sessions")
async def many_sessions(address: str, _http: str) -> None:
    async with stub_of(address) as stub:
        for first in range(0, 2000, 50):
            opened = [
                stub.OpenSession(pb.OpenSessionRequest(session_id=f"attack-{number}"))
                for number in range(first, first + 50)
            ]
            with contextlib.suppress(grpc.aio.AioRpcError):
                for one in opened:
                    await one
        await at_once(30, lambda: stub.GetSessions(pb.GetSessionsRequest()))


def flooding(name: str, words: bytes, number: int = 2) -> None:
    """Enter a flood of these bytes, on so many connections."""

    async def run(address: str, _http: str) -> None:
        async def once() -> None:
            async with connected(address) as connection:
                connection.begin()
                await flood(connection, words)

        await at_once(number, once)

    CASES[name] = run


flooding("settings", 200 * frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 65535)))
flooding("pings", 200 * frame(PING, 0, 0, bytes(8)))


@case("resets")
async def resets(address: str, _http: str) -> None:
    async def once() -> None:
        async with connected(address) as connection:
            connection.begin()
            hung_up = asyncio.create_task(connection.until_hung_up())
            while not hung_up.done():
                for _ in range(50):
                    connection.reset(connection.call(GENERATE, flags=0))
                await connection.writer.drain()
                await asyncio.sleep(TICK_SECONDS)

    await at_once(2, once)


@case("continuations")
async def continuations(address: str, _http: str) -> None:
    more = frame(CONTINUATION, 0, 1, 200 * (b"\x00\x01a\x01b"))

    async def once() -> None:
        async with connected(address) as connection:
            connection.begin()
            connection.writer.write(frame(HEADERS, 0, 1, call_headers(GENERATE)))
            await flood(connection, 20 * more)

    await at_once(2, once)


@case("large heads")
async def large_heads(address: str, http: str) -> None:
    async def by_grpc() -> None:
        async with connected(address) as connection:
            connection.begin()
            block = call_headers(CHECK, [(f"x-{number}", "y" * 8000) for number in range(120)])
            pieces = [block[at : at + 16000] for at in range(0, len(block), 16000)]
            kinds = [HEADERS, *[CONTINUATION] * (len(pieces) - 1)]
            for kind, piece in zip(kinds, pieces, strict=True):
                last = END_HEADERS if piece is pieces[-1] else 0
                connection.writer.write(frame(kind, last, 1, piece))
            connection.writer.write(frame(DATA, 1, 1, message(b"")))
            async with asyncio.timeout(1):
                await connection.until_hung_up()

    async def by_http() -> None:
        async with talking(http) as (reader, writer):
            writer.write(HEAD + b"".join(b"x-%d: %s\r\n" % (n, b"y" * 8000) for n in range(130)))
            await reader.read()

    async with asyncio.TaskGroup() as group:
        group.create_task(at_once(2, by_grpc))
        group.create_task(at_once(2, by_http))


@case("compressed messages")
async def compressed_messages(address: str, _http: str) -> None:
    bomb = gzip.compress(pb.GenerateRequest(text="x" * (15 * MIB)).SerializeToString())
    sent = b"\x01" + len(bomb).to_bytes(4, "big") + bomb

    async def once() -> None:
        async with connected(address) as connection:
            connection.begin()
            for _ in range(4):
                connection.call(GENERATE, sent, headers=[("grpc-encoding", "gzip")])
            async with asyncio.timeout(2):
                await connection.until_hung_up()

    await at_once(2, once)


@case("many fields")
async def many_fields(address: str, _http: str) -> None:
    numbers = b"\x08\x01" * MIB  # not packed: each id has a tag
    head = bytes([pb.GenerateRequest.DESCRIPTOR.fields_by_name["input_ids"].number << 3 | 2])
    sent = head + _varint(len(numbers)) + numbers

    async def once() -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(address, options) as channel:
            await channel.unary_stream(GENERATE)(sent).code()

    await at_once(2, once)


def _varint(value: int) -> bytes:
    said = b""
    while value >= 128:
        said, value = said + bytes([value % 128 | 128]), value // 128
    return said + bytes([value])


@case("trailers")
async def trailers(_address: str, http: str) -> None:
    body = b'{"prompt": [1, 2, 3], "max_tokens": 1}'
    begin = HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n" % (len(body), body)

    async def once() -> None:
        async with talking(http) as (reader, writer):
            writer.write(begin + b"a:b\r\n" * (8 * MIB // 5))
            await reader.read()

    await at_once(4, once)


@case("empty lines")
async def empty_lines(_address: str, http: str) -> None:
    async def once() -> None:
        async with talking(http) as (reader, writer):
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await answer_to(reader)
            while not reader.at_eof():
                writer.write(b"\r\n" * 100)
                await writer.drain()
                await asyncio.sleep(TICK_SECONDS)

    await at_once(20, once)


@case("slow streams")
async def slow_streams(_address: str, http: str) -> None:
    ask = {"prompt": [1] * 100, "max_tokens": 1500, "ignore_eos": True, "stream": True}

    async def once() -> None:
        async with talking(http) as (_, writer):
            writer.write(call({**ask, "logprobs": 5}))
            await asyncio.sleep(3600)

    await at_once(8, once)


@case("trickled heads")
async def trickled_heads(_address: str, http: str) -> None:
    async def once() -> None:
        async with talking(http) as (reader, writer):
            while not (reader.at_eof() or writer.is_closing()):
                writer.write(b"xyz")
                await writer.drain()
                await asyncio.sleep(TICK_SECONDS)

    await at_once(50, once)


def bodies(*sent: Any, path: str = "/v1/completions") -> Callable[[str, str], Awaitable[None]]:
    """An attack with these bodies, one after the other."""

    async def run(_address: str, http: str) -> None:
        async def once() -> None:
            for body in sent:
                async with talking(http) as (reader, writer):
                    writer.write(call(body, path))
                    await answer_to(reader)

        await at_once(2, once)

    return run


CASES["nested bodies"] = bodies(
    b"[" * 200_000,
    b'{"prompt": [' + b"1," * (MIB // 2) + b"1]}",
    b'{"a":' * 900 + b"1" + b"}" * 900,
)


def _parameters() -> Iterator[dict[str, Any]]:
    ask: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 1}
    yield {**ask, "logit_bias": {str(number): 1 for number in range(100_000)}}
    yield {**ask, "stop": [f"stop {number}" for number in range(10_000)]}
    yield {**ask, "n": 1 << 60}
    names = {f"name-{number}": {"type": "string"} for number in range(30_000)}
    schema = {"type": "object", "properties": names}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    yield {**ask, "response_format": form}


CASES["large parameters"] = bodies(*_parameters())
CASES["largest parameters"] = bodies(
    {
        "prompt": [1, 2, 3],
        "max_tokens": 4,
        "ignore_eos": True,
        "n": 16,
        "logprobs": 20,
        "logit_bias": {str(number): 1 for number in range(200)},
        "stop": [f"{number:04}" * 256 for number in range(16)],
    }
)


def _tool_lists() -> Iterator[dict[str, Any]]:
    """Too many tools, and as many as are taken: with a call that must be, and without."""
    ask: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for number, most, choice in [(20_000, 0, "auto"), (128, 20, "auto"), (128, 4, "required")]:
        members = {f"m{one}": {"type": "number", "description": "d" * 500} for one in range(most)}
        schema = {"type": "object", "properties": members}
        tools = [
            {"type": "function", "function": {"name": f"f{one}", "parameters": schema}}
            for one in range(number)
        ]
        yield {**ask, "tools": tools, "tool_choice": choice}


CASES["tool lists"] = bodies(*_tool_lists(), path="/v1/chat/completions")


@case("handshakes")
async def handshakes(address: str, http: str) -> None:
    """Some begin and go no further, some end, and their connections with them."""
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE

    async def half() -> None:
        async with talking(http) as (reader, writer), talking(address) as (other, to_other):
            for one in (writer, to_other):
                one.write(b"\x16\x03\x01\x02\x00\x01\x00")
            await asyncio.gather(reader.read(), other.read())

    async def whole() -> None:
        for one in (http, address):
            host, _, port = one.rpartition(":")
            _, writer = await asyncio.open_connection(host, int(port), ssl=anybody)
            writer.transport.abort()

    async with asyncio.TaskGroup() as group:
        group.create_task(at_once(100, half))
        group.create_task(at_once(4, whole))


@case("log lines")
async def log_lines(address: str, http: str) -> None:
    async def once() -> None:
        async with stub_of(address) as stub:
            params = pb.SamplingParams(max_tokens=1)
            ids = pb.TokenIds(ids=[1, 2, 3])
            name = "x\nERROR kvrelay: \x1b[31mall is lost"
            async for _ in stub.Generate(
                pb.GenerateRequest(request_id=name, input_ids=ids, sampling_params=params)
            ):
                pass

    await at_once(2, once)
