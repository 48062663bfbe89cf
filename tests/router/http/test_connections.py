"""Connections that begin and send slowly, too much or nothing, and how many there may be."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import cast

import httpx
import pytest

from kvrelay.net.door_rules import HTTP, MethodRule
from kvrelay.net.tls import TlsFiles
from kvrelay.router.config import RouterConfig
from kvrelay.router.doors.http import bodies, http_listener
from tests.certificates import Authority

from ..cluster import Cluster
from .client import (
    HEAD,
    STREAM,
    connection,
    counting,
    is_served,
    trusting,
    until_closed,
)


async def until_connections(cluster: Cluster, number: int) -> None:
    """Returns once so many are open at the door."""
    async with asyncio.timeout(60):
        while await cluster.metric("kvrelay_http_connections") != number:
            await asyncio.sleep(0.02)


def with_tls(config: RouterConfig, authority: Authority) -> RouterConfig:
    files = authority.issue()
    return replace(config, front_tls=TlsFiles(files.cert, files.key))


async def test_a_stop_does_not_wait_for_handshakes(
    http_config: RouterConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_listener, "HEAD_SECONDS", 3600.0)
    config = with_tls(http_config, Authority(tmp_path / "a"))
    async with asyncio.timeout(30), contextlib.AsyncExitStack() as stack:
        async with counting(config) as (cluster, _):
            reader, writer = await stack.enter_async_context(connection(cluster))
            writer.write(b"\x16\x03\x01\x02\x00\x01\x00")
            await until_connections(cluster, 1)
        assert await until_closed(reader) == b""


async def test_handshakes_without_end_make_room_for_others(
    http_config: RouterConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_listener, "HEAD_SECONDS", 3600.0)
    monkeypatch.setattr(http_listener, "MOST_CONNECTIONS", 3)
    authority = Authority(tmp_path / "a")
    async with contextlib.AsyncExitStack() as stack:
        cluster, _ = await stack.enter_async_context(counting(with_tls(http_config, authority)))
        url = f"https://{cluster.router.http_address}"
        client = httpx.AsyncClient(base_url=url, verify=trusting(authority))
        http = await stack.enter_async_context(client)
        await is_served(http)
        silent = [(await stack.enter_async_context(connection(cluster)))[0] for _ in range(6)]
        for reader in silent[:4]:
            assert await until_closed(reader) == b""
        assert not any(reader.at_eof() for reader in silent[4:])
        assert await cluster.metric("kvrelay_http_connections") == 3
        await is_served(http)
        async with httpx.AsyncClient(base_url=url, verify=trusting(authority)) as another:
            await is_served(another)
        assert await until_closed(silent[4]) == b""


async def test_handshakes_at_the_same_time_make_room_among_the_idle(
    http_config: RouterConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_listener, "MOST_CONNECTIONS", 12)
    authority = Authority(tmp_path / "a")
    async with contextlib.AsyncExitStack() as stack:
        cluster, _ = await stack.enter_async_context(counting(with_tls(http_config, authority)))
        url = f"https://{cluster.router.http_address}"

        async def newcomer() -> None:
            client = httpx.AsyncClient(base_url=url, verify=trusting(authority))
            await is_served(await stack.enter_async_context(client))

        for _ in range(12):
            await newcomer()
        await asyncio.gather(*(newcomer() for _ in range(5)))


@pytest.mark.parametrize("sent", [b"", HEAD, b"POST /v1/comp"])
async def test_a_head_that_does_not_arrive(
    http_config: RouterConfig, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """chimera#1222: others are served meanwhile."""
    monkeypatch.setattr(http_listener, "HEAD_SECONDS", 0.2)
    async with counting(http_config) as (cluster, http), connection(cluster) as (reader, writer):
        writer.write(sent)
        assert await until_closed(reader) == b""
        await is_served(http)


CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "again"),
    [
        (HEAD + b"x: ", b"y" * (1 << 16)),
        (HEAD, b"x: y\r\n" * (1 << 14)),
        (b"GET /", b"x" * (1 << 16)),
        (CHUNKED + b"0\r\n", b"a: b\r\n" * (1 << 14)),
        (b"", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 10_000),
        (b"", bytes(range(256)) * 256),
    ],
    ids=["header", "headers", "path", "trailers", "pipelined", "garbage"],
)
async def test_a_flood_is_hung_up_on(
    http_config: RouterConfig, begin: bytes, again: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "uvicorn.error")
    async with counting(http_config) as (cluster, http), connection(cluster) as (reader, writer):

        async def flood() -> None:
            with contextlib.suppress(ConnectionError):
                writer.write(begin)
                while True:
                    writer.write(again)
                    await writer.drain()

        flooding = asyncio.create_task(flood())
        answered = await until_closed(reader)
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)
        assert len(answered) < 64 << 10
        await is_served(http)


async def test_a_body_that_does_not_arrive(
    http_config: RouterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = replace(HTTP.methods["POST /v1/completions"], receive_seconds=0.2)
    monkeypatch.setitem(cast("dict[str, MethodRule]", HTTP.methods), "POST /v1/completions", rule)
    async with counting(http_config) as (cluster, http), connection(cluster) as (reader, writer):
        writer.write(HEAD + b"content-length: 100\r\n\r\n{")
        assert (await until_closed(reader)).startswith(b"HTTP/1.1 408")
        await is_served(http)
        status = 'kvrelay_http_responses_total{model="counter",path="/v1/completions",status="408"}'
        assert await cluster.metric(status) == 1


async def test_a_body_more_than_are_taken_ends_the_oldest(
    http_config: RouterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "HTTP", replace(HTTP, most_receiving=2))
    head = HEAD + b"content-length: 100\r\n\r\n{"
    async with contextlib.AsyncExitStack() as stack:
        cluster, http = await stack.enter_async_context(counting(http_config))
        readers = []
        for _ in range(3):
            reader, writer = await stack.enter_async_context(connection(cluster))
            writer.write(head)
            readers.append(reader)
            await asyncio.sleep(0.05)
        assert (await until_closed(readers[0])).startswith(b"HTTP/1.1 408")
        await is_served(http)


async def test_the_longest_idle_connection_ends_for_a_new_one(
    http_config: RouterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_listener, "MOST_CONNECTIONS", 3)
    async with contextlib.AsyncExitStack() as stack:
        cluster, http = await stack.enter_async_context(counting(http_config))
        cluster.decode.on_submit = None
        busy, writer = await stack.enter_async_context(connection(cluster))
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(STREAM) + STREAM)
        assert (await busy.readline()).startswith(b"HTTP/1.1 200")
        idle = [(await stack.enter_async_context(connection(cluster)))[0] for _ in range(2)]
        await http.get("/health")
        assert await until_closed(idle[0]) == b""
        assert not idle[1].at_eof()
        assert not busy.at_eof()
        assert await cluster.metric("kvrelay_http_connections") == 3


async def test_trailers_are_no_headers_and_have_a_bound(
    http_config: RouterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads: list[int] = []
    complete = http_listener._Connection.on_message_complete

    def counted(one: http_listener._Connection) -> None:
        heads.append(len(one.headers))
        complete(one)

    monkeypatch.setattr(http_listener._Connection, "on_message_complete", counted)
    body = CHUNKED + b"%x\r\n" % len(STREAM) + STREAM + b"\r\n0\r\n"
    async with counting(http_config) as (cluster, http):
        async with connection(cluster) as (reader, writer):
            writer.write(body + b"a: b\r\n" * 100 + b"\r\n")
            async with asyncio.timeout(60):
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert heads == [2], "the host and the encoding"
        async with connection(cluster) as (reader, writer):
            writer.write(body + b"a: b\r\n" * 5000 + b"\r\n")
            assert await until_closed(reader) == b""
        await is_served(http)


async def test_empty_lines_after_an_answer_are_no_call(http_config: RouterConfig) -> None:
    hasty = replace(http_config, http_keep_alive=1.0)
    async with counting(hasty) as (cluster, _), connection(cluster) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.write(b"\r\n" * 1000)
        async with asyncio.timeout(60):
            assert await reader.read() == b""
