"""A call is held to its method's rule: its message, how many there are, and its answer."""

from __future__ import annotations

import asyncio
import gc
import struct
import sys
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from kvrelay.net import unread_answers
from kvrelay.net.channels import bind, front_server
from kvrelay.net.door_rules import GRPC, ListenerRule, MethodAccess, MethodRule
from kvrelay.net.health_service import HealthService
from tests.attack.http2 import DATA, HEADERS, SETTINGS, connected, message

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
GENERATE = "/kvrelay.v1.InferenceService/Generate"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
QUICK = 0.1
MAX_CONCURRENT_STREAMS = 3
"""The number of this setting of HTTP/2."""


def changed(method: str, **changes: Any) -> ListenerRule:
    """The rules of the gRPC listener, with another one for this method."""
    rule = replace(GRPC.methods[method], **changes)
    return replace(GRPC, methods={**GRPC.methods, method: rule})


@asynccontextmanager
async def serving(rule: ListenerRule = GRPC) -> AsyncIterator[tuple[str, HealthService]]:
    server = front_server(rule, 1 << 20)
    healthy = HealthService(["one"])
    healthy.set(serving=True)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    reflection.enable_server_reflection([health.SERVICE_NAME], server)

    async def answer(message: bytes, context: Any) -> bytes:
        return bytes(len(message))

    handlers = {"Generate": grpc.unary_unary_rpc_method_handler(answer)}
    service = GENERATE.split("/")[1]
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = bind(server, "127.0.0.1:0", None)
    await server.start()
    try:
        yield f"127.0.0.1:{port}", healthy
    finally:
        async with asyncio.timeout(60):
            await server.stop(0.1)


def connect(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    async with serving() as (address, _), connect(address) as channel:
        yield channel


def open_call(channel: grpc.aio.Channel, method: str) -> Any:
    """One that sends what it is told to, byte by byte if need be."""
    return channel.stream_stream(method)()


async def check(channel: grpc.aio.Channel, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=service)
    status: int = (await stub.Check(request, timeout=60)).status
    return status


async def test_calls_of_each_kind_are_served(channel: grpc.aio.Channel) -> None:
    assert await check(channel) == SERVING
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
    assert (await watch.read()).status == SERVING
    watch.cancel()
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    answered = [one async for one in stub.ServerReflectionInfo(iter([asked]), timeout=60)]
    assert answered[0].list_services_response.service[0].name == health.SERVICE_NAME


@pytest.mark.parametrize("method", [CHECK, WATCH])
async def test_a_call_without_a_message_ends_in_time(method: str) -> None:
    rule = changed(method, receive_seconds=QUICK)
    async with serving(rule) as (address, _), connect(address) as channel:
        silent = open_call(channel, method)
        async with asyncio.timeout(60):
            assert await silent.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await check(channel) == SERVING


async def test_strangers_end_each_others_receipts_and_no_callers() -> None:
    """Who may be asked without a token has a pool of his own: half a message of a caller waits."""
    async with serving() as (address, _), connect(address) as channel:
        caller = open_call(channel, GENERATE)
        await caller.wait_for_connection()
        most = GRPC.most_receiving_of_strangers
        async with connected(address) as one, connected(address) as other:
            streams = []
            for connection in (one, other):
                connection.begin()
                streams += [connection.call(CHECK, flags=0) for _ in range(most)]
            async with asyncio.timeout(60):
                while await one.receive() != await other.receive():
                    pass
            assert await check(channel) == SERVING
            await caller.write(b"late")
            assert await caller.read() == bytes(4)


async def test_of_too_many_receipts_the_greediest_ends_its_oldest() -> None:
    rule = replace(changed(GENERATE), most_receiving=3)
    async with (
        serving(rule) as (address, _),
        connect(address) as greedy,
        connect(address) as modest,
    ):
        patient = open_call(modest, GENERATE)
        await patient.wait_for_connection()
        silent = []
        for _ in range(3):
            silent.append(open_call(greedy, GENERATE))
            await silent[-1].wait_for_connection()
        async with asyncio.timeout(60):
            assert await silent[0].code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert not any(one.done() for one in (patient, *silent[1:]))
        await patient.write(b"late")
        assert await patient.read() == bytes(4)
        for one in silent:
            one.cancel()


async def test_what_cannot_be_read_is_the_clients_fault(
    channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    broken = open_call(channel, CHECK)
    await broken.write(b"\x0a\xff")
    assert await broken.code() is grpc.StatusCode.INVALID_ARGUMENT
    empty = open_call(channel, CHECK)
    await empty.done_writing()
    assert await empty.code() is grpc.StatusCode.INVALID_ARGUMENT
    ours = [one for one in caplog.records if one.name.startswith(("kvrelay.net", "grpc"))]
    assert not ours, "it would fill the log"


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_a_long_name_is_refused_and_not_kept(channel: grpc.aio.Channel, method: str) -> None:
    request = health_pb2.HealthCheckRequest(service="x" * 100_000)
    call = getattr(health_pb2_grpc.HealthStub(channel), method)(request)
    async with asyncio.timeout(60):
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_each_message_of_a_stream_keeps_to_the_rule(channel: grpc.aio.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    short, long = (
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="x" * size)
        for size in (10, 2000)
    )
    call = stub.ServerReflectionInfo(iter([short, long]), timeout=60)
    assert (await call.read()).error_response.error_code
    with pytest.raises(grpc.aio.AioRpcError, match="this method takes 1024"):
        await call.read()


async def test_a_watch_of_an_unknown_service_ends(channel: grpc.aio.Channel) -> None:
    request = health_pb2.HealthCheckRequest(service="two")
    watch = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=60)
    assert [one.status async for one in watch] == [health_pb2.HealthCheckResponse.SERVICE_UNKNOWN]
    with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
        await check(channel, "two")
    assert await check(channel, "one") == SERVING


async def test_a_watcher_that_reads_nothing_keeps_nobody_from_the_truth() -> None:
    """It holds no lock; the server stops, too."""
    async with serving() as (address, healthy), connected(address) as silent:
        silent.begin(window=0)
        silent.call(WATCH, message(b""))
        async with connect(address) as channel:
            stub, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
            watches = [stub.Watch(request, timeout=60) for _ in range(2)]
            for watch in watches:
                assert (await watch.read()).status == SERVING
            watches.pop().cancel()
            healthy.set(serving=False)
            async with asyncio.timeout(60):
                assert await check(channel) == NOT_SERVING
                assert (await watches[0].read()).status == NOT_SERVING


async def test_many_unread_answers_hang_up_on_whoever_has_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rule = changed(CHECK, answer_seconds=QUICK)
    most = unread_answers.MOST_STUCK_OF_A_CONNECTION
    async with (
        serving(rule) as (address, _),
        connect(address) as channel,
        connected(address) as few,
        connected(address) as many,
    ):
        for connection, number in ((few, 1), (many, most)):
            connection.begin(window=0)
            for _ in range(number):
                connection.call(CHECK, message(b""))
        async with asyncio.timeout(60):
            frames = await many.until_hung_up()
        assert not [one for one in frames if one.kind == DATA and one.payload]
        assert await check(channel) == SERVING
        assert not few.reader.at_eof(), "a proxy may have a slow client"
    assert not [one for one in caplog.records if one.levelname == "ERROR"], "it would fill the log"


async def test_unread_answers_have_a_bound_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread_answers, "MOST_BYTES", 1 << 20)
    rule = changed(GENERATE, answer_seconds=3600.0)
    async with serving(rule) as (address, _), connected(address) as silent:
        silent.begin(window=0)
        for _ in range(6):
            silent.call(GENERATE, message(bytes(200_000)), flags=0)
        async with asyncio.timeout(60):
            await silent.until_hung_up()


async def test_a_caller_has_no_more_calls_than_the_rule_says() -> None:
    rule = changed(CHECK, most_of_a_caller=2)
    async with serving(rule) as (address, _), connected(address) as silent:
        silent.begin(window=0)
        streams = [silent.call(CHECK, message(b"")) for _ in range(3)]
        async with asyncio.timeout(60):
            while (told := await silent.receive()).stream != streams[2]:
                pass
        assert b"grpc-status" in told.payload
        async with connect(address) as channel:
            assert await check(channel) == SERVING


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers may be given up as soon as they wait."""
    monkeypatch.setattr(unread_answers, "_LEAST_WAIT_SECONDS", 0.0)


@pytest.mark.usefixtures("at_once")
async def test_for_one_call_too_many_the_oldest_unread_answer_is_given_up() -> None:
    rule = changed(CHECK, most=2)
    async with (
        serving(rule) as (address, _),
        connected(address) as one,
        connected(address) as other,
    ):
        for connection in (one, other):
            connection.begin(window=0)
            connection.call(CHECK, message(b""))
            while (await connection.receive()).kind != HEADERS:
                pass
        async with connect(address) as channel, asyncio.timeout(60):
            assert await check(channel) == SERVING
            await one.until_hung_up()
        assert not other.reader.at_eof()


async def test_who_reads_soon_is_not_hung_up_on_for_other_calls() -> None:
    ended = list[str]()
    answers = unread_answers.UnreadAnswers(ended.append)
    with answers.waiting("honest", CHECK, 1, 60):
        answers.end_oldest(CHECK)
    assert ended == []


async def test_idle_watches_of_a_stranger_give_way() -> None:
    rule = changed(WATCH, most=2, most_of_a_caller=4)
    async with serving(rule) as (address, _), connected(address) as stranger:
        stranger.begin()
        for _ in range(4):
            stranger.call(WATCH, message(b""))
        async with connect(address) as channel, asyncio.timeout(60):
            assert await check(channel) == SERVING  # all of it has come
            stub, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
            with pytest.raises(grpc.aio.AioRpcError, match="too many calls"):
                await stub.Watch(request).read()
            await stranger.until_hung_up()
            assert (await stub.Watch(request).read()).status == SERVING


async def test_of_many_modest_watchers_nobody_is_hung_up_on() -> None:
    """Two watches of one connection are no greed, however many others have one each."""
    rule = changed(WATCH, most=2, most_of_a_caller=8)
    async with serving(rule) as (address, healthy), connect(address) as modest:
        watched = health_pb2.HealthCheckRequest()
        both = [health_pb2_grpc.HealthStub(modest).Watch(watched, timeout=60) for _ in range(2)]
        assert [(await one.read()).status for one in both] == [SERVING, SERVING]
        async with connect(address) as other:
            third = health_pb2_grpc.HealthStub(other).Watch(watched, timeout=60)
            assert (await third.read()).status == SERVING
            healthy.set(serving=False)
            assert [(await one.read()).status for one in (*both, third)] == [NOT_SERVING] * 3
            third.cancel()
        for one in both:
            one.cancel()


async def test_a_hang_up_leaves_no_file_open() -> None:
    async with serving() as (address, _), connected(address) as silent, connect(address) as channel:
        peer = silent.writer.get_extra_info("sockname")
        assert await check(channel) == SERVING
        unread_answers._close_connections({("127.0.0.1", 1)})
        before = num_files()
        for _ in range(3):
            unread_answers._close_connections({("127.0.0.1", 1)})
        assert num_files() == before
        unread_answers._close_connections({peer[:2]})
        async with asyncio.timeout(60):
            await silent.until_hung_up()


def num_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_a_connection_has_no_more_calls_than_the_rule_says() -> None:
    rule = replace(GRPC, most_streams=7)
    async with serving(rule) as (address, _), connected(address) as eager:
        eager.begin()
        async with asyncio.timeout(60):
            while (told := await eager.receive()).kind != SETTINGS:
                pass
    settings = dict(struct.iter_unpack(">HI", told.payload))
    assert settings[MAX_CONCURRENT_STREAMS] == 7


@pytest.mark.usefixtures("at_once")
async def test_strangers_give_up_no_callers_answer() -> None:
    rule = changed(CHECK, most=1)
    async with serving(rule) as (address, _), connected(address) as caller:
        caller.begin(window=0)
        caller.call(GENERATE, message(bytes(1000)))
        while (await caller.receive()).kind != HEADERS:
            pass
        async with connected(address) as stranger, connect(address) as channel:
            stranger.begin(window=0)
            stranger.call(CHECK, message(b""))
            while (await stranger.receive()).kind != HEADERS:
                pass
            assert await check(channel) == SERVING
            async with asyncio.timeout(60):
                await stranger.until_hung_up()
        assert not caller.reader.at_eof(), "its answer had waited longer"


async def test_a_method_without_a_rule_is_not_served() -> None:
    others = {method: rule for method, rule in GRPC.methods.items() if method != CHECK}
    async with serving(replace(GRPC, methods=others)) as (address, _), connect(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
            await check(channel)


async def test_a_refused_message_is_let_go_of_at_once() -> None:
    """Without the garbage collector: a message may have many megabytes."""
    seen: list[weakref.ref[set[int]]] = []

    class Refusing(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it is untyped
        async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
            made_of_it = {1}  # a message itself takes no weak reference
            seen.append(weakref.ref(made_of_it))
            try:
                raise ValueError("it is not to be served")
            except ValueError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    server = front_server(GRPC, 1 << 20)
    health_pb2_grpc.add_HealthServicer_to_server(Refusing(), server)
    port = bind(server, "127.0.0.1:0", None)
    await server.start()
    gc.disable()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await check(channel)
            async with asyncio.timeout(60):
                while seen[0]() is not None:
                    await asyncio.sleep(0.01)
    finally:
        gc.enable()
        await server.stop(None)


async def test_the_handler_alone_has_the_message() -> None:
    """While it answers, too: it may let go of what it no longer needs."""
    references: list[int] = []

    async def answer(message: bytes, context: Any) -> None:
        references.append(sys.getrefcount(message))
        await context.write(b"")

    handler = grpc.unary_stream_rpc_method_handler(answer)
    rule = ListenerRule({"/one/Call": MethodRule(MethodAccess.ANYBODY)}, "")
    server = front_server(rule, 1 << 20)
    generic = grpc.method_handlers_generic_handler("one", {"Call": handler})
    server.add_generic_rpc_handlers((generic,))
    port = bind(server, "127.0.0.1:0", None)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_stream("/one/Call")(b"x" * 1000)
        assert [one async for one in call] == [b""]
    await server.stop(None)
    assert references == [2], "its own name, and the question itself"
