"""HTTP as clients and proxies speak it: offers, half-closed connections, bodies nobody reads."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from dataclasses import replace
from email.utils import parsedate_to_datetime

import httpx
import pytest

from kvrelay.router.config import RouterConfig

from ..cluster import Cluster
from ..scripted_worker import until
from .client import PROMPT, connection, counting, until_closed

BODY = json.dumps(PROMPT).encode()
JAVA = (
    b"POST /v1/completions HTTP/1.1\r\n"
    b"Connection: Upgrade, HTTP2-Settings\r\n"
    b"Content-Length: %d\r\n"
    b"Host: 127.0.0.1:8000\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
    b"Upgrade: h2c\r\n"
    b"User-Agent: Java-http-client/21.0.8\r\n"
    b"Content-Type: application/json\r\n"
    b"\r\n" % len(BODY)
)
"""The head that Java's HttpClient sends for each call over http."""
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: keep-alive, Upgrade\r\n"
    b"upgrade: websocket\r\ntransfer-encoding: chunked\r\n\r\n"
)
IN_CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """The next answer: its status, its headers and its body."""
    async with asyncio.timeout(60):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        status, *lines = head.split("\r\n")[:-2]
        headers = dict(line.lower().split(": ", 1) for line in lines)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return int(status.split()[1]), headers, body


@pytest.mark.parametrize(
    "pieces",
    [
        [JAVA + BODY],
        [JAVA, BODY[:5], BODY[5:]],
        [JAVA[:40], JAVA[40:], BODY],
        [CHUNKED + IN_CHUNKS],
        [CHUNKED, IN_CHUNKS],
    ],
    ids=["whole", "body later", "head in two", "chunked", "chunked later"],
)
async def test_an_offer_to_change_the_protocol_is_ignored(
    cluster: Cluster, pieces: list[bytes]
) -> None:
    async with connection(cluster) as (reader, writer):
        for _ in range(2):  # and the connection goes on
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.01)
            status, _, body = await answer(reader)
            assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 8)
        writer.write((JAVA + BODY) * 2)
        assert [(await answer(reader))[0] for _ in range(2)] == [200, 200]


async def test_a_call_without_a_body_that_offers_to_change_the_protocol(cluster: Cluster) -> None:
    async with connection(cluster) as (reader, writer):
        head = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"
        writer.write(head + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n")
        assert (await answer(reader))[0] == 200
        writer.write(b"CONNECT localhost:1 HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b" 200 " not in (await until_closed(reader)).partition(b"\r\n")[0]


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/nothing", 404), ("/v1/models", 405), ("/", 405), ("/live", 405)]
)
async def test_a_body_that_comes_behind_its_refusal_does_not_break_the_next_call(
    cluster: Cluster, path: str, status: int
) -> None:
    async with connection(cluster) as (reader, writer):
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n"
        writer.write(head.encode())
        await asyncio.sleep(0.02)
        writer.write(b"x" * 1000)
        refused, headers, _ = await answer(reader)
        assert (refused, headers.get("connection")) == (status, None)
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await answer(reader))[0] == 200


async def test_a_large_body_of_a_refused_call_closes_its_connection(cluster: Cluster) -> None:
    for head in (b"content-length: 10000000\r\n", b"content-length: 9\r\nexpect: 100-continue\r\n"):
        async with connection(cluster) as (reader, writer):
            writer.write(b"POST /v1/nothing HTTP/1.1\r\nhost: localhost\r\n" + head + b"\r\n")
            if b"expect" not in head:
                writer.write(b"x" * 100_000)
            status, headers, _ = await answer(reader)
            assert (status, headers["connection"]) == (404, "close")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_ends_its_side_has_left(cluster: Cluster, stream: bool) -> None:
    """A closed connection begins alike, and must not be computed for.

    ninfer#111, vllm-project/vllm#56089, sgl-project/sglang#29179.
    """
    cluster.decode.on_submit = None
    body = json.dumps({**PROMPT, "stream": stream}).encode()
    async with connection(cluster) as (reader, writer):
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
        writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        await cluster.decode.submitted()
        writer.write_eof()
        await until_closed(reader)
        await until(lambda: bool(cluster.decode.cancels))
        assert (await cluster.server_info()).live_requests == 0


async def test_an_idle_connection_is_closed_after_the_time_that_the_option_says(
    http_config: RouterConfig,
) -> None:
    assert http_config.http_keep_alive > 60, "proxies keep theirs for 60 s"
    hasty = replace(http_config, http_keep_alive=0.2)
    async with counting(hasty) as (cluster, _), connection(cluster) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await answer(reader)
        assert await until_closed(reader) == b""


async def test_paths_that_are_nearly_right(http: httpx.AsyncClient) -> None:
    models = (await http.get("/v1/models")).json()
    assert (await http.get("/v1/models/")).json() == models
    assert (await http.post("/v1/completions/", json=PROMPT)).status_code == 200
    for path, meant in (
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/completions", "/v1/completions"),
        ("/models", "/v1/models"),
    ):
        answer = await http.post(path, json=PROMPT)
        message = answer.json()["error"]["message"]
        assert (answer.status_code, f"{meant} is: a client's base URL ends in /v1" in message) == (
            404,
            True,
        )
    assert "/v1" not in (await http.get("/nothing")).json()["error"]["message"]


async def test_every_answer_says_when_it_was_made(http: httpx.AsyncClient) -> None:
    for answer in (await http.get("/health"), await http.get("/nothing")):
        parsedate_to_datetime(answer.headers["date"])


@pytest.mark.parametrize(
    ("encoding", "content"),
    [
        ("gzip", gzip.compress(BODY)),
        ("GZIP", gzip.compress(BODY)),
        ("deflate", zlib.compress(BODY)),
        ("identity", BODY),
        ("", b"\xef\xbb\xbf" + BODY),
    ],
    ids=["gzip", "upper case", "deflate", "identity", "byte order mark"],
)
async def test_a_body_in_another_encoding(
    http: httpx.AsyncClient, encoding: str, content: bytes
) -> None:
    headers = {"content-encoding": encoding} if encoding else {}
    answer = await http.post("/v1/completions", content=content, headers=headers)
    assert answer.raise_for_status().json()["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("encoding", "content", "status"),
    [
        ("gzip", BODY, 400),
        ("gzip", gzip.compress(BODY)[:-9], 400),
        ("gzip", gzip.compress(b" " * (64 << 20)), 413),
        ("br", b"x", 415),
        ("gzip, gzip", gzip.compress(gzip.compress(BODY)), 415),
    ],
    ids=["plain", "cut off", "bomb", "unknown", "twice"],
)
async def test_a_refused_encoding(
    http: httpx.AsyncClient, encoding: str, content: bytes, status: int
) -> None:
    answer = await http.post(
        "/v1/completions", content=content, headers={"content-encoding": encoding}
    )
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"
