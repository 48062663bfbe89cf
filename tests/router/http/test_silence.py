"""Streams in which nothing comes for long, and clients that leave in each phase of a request."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kvrelay.net.door_rules import HTTP
from kvrelay.router.config import RouterConfig
from kvrelay.router.doors.http.exchange import Exchange, SilenceBreaker
from kvrelay.v1 import worker_pb2

from ..cluster import Cluster, running
from ..scripted_worker import HANDED_OVER, LENGTH, SECONDS, broken, until
from .client import CHAT, PROMPT, connection, counting

COMMENT = ": keep-alive"
PATHS: dict[str, dict[str, Any]] = {"/v1/completions": PROMPT, "/v1/chat/completions": CHAT}
Lines = AsyncIterator[str]


async def until_line(lines: Lines, is_wanted: Callable[[str], bool]) -> list[str]:
    """The lines up to the first that is wanted, without empty ones."""
    read: list[str] = []
    async with asyncio.timeout(SECONDS):
        async for line in lines:
            read += [line] if line else []
            if line and is_wanted(line):
                return read
    raise AssertionError(f"the stream ends: {read}")


def is_comment(line: str) -> bool:
    return line == COMMENT


def is_chunk(line: str) -> bool:
    return line.startswith("data: {")


@pytest.fixture
async def silent(http_config: RouterConfig) -> AsyncIterator[tuple[Cluster, httpx.AsyncClient]]:
    """A router that breaks silences soon, in front of workers that say what a test lets them."""
    config = replace(http_config, sse_keepalive=0.05, max_attempts=1)
    async with counting(config) as (cluster, http):
        cluster.prefill.on_submit = cluster.decode.on_submit = None
        yield cluster, http


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_is_told_to_live_before_its_first_token_and_between_tokens(
    silent: tuple[Cluster, httpx.AsyncClient], path: str
) -> None:
    cluster, http = silent
    body = {**PATHS[path], "stream": True}
    async with http.stream("POST", path, json=body, timeout=60) as answer:
        lines = answer.aiter_lines()
        assert await until_line(lines, is_comment) == [COMMENT], "the first thing that comes"
        assert (answer.status_code, answer.headers["content-type"]) == (
            200,
            "text/event-stream; charset=utf-8",
        )
        submit = await cluster.prefill.submitted()
        cluster.prefill.say(submit, 0, (65,), end=HANDED_OVER)
        await until_line(lines, is_chunk)
        await until_line(lines, is_comment)
        cluster.decode.say(await cluster.decode.submitted(), 1, (66, 67, 68), end=LENGTH)
        rest = await until_line(lines, lambda line: line == "data: [DONE]")
    chunks = [json.loads(one.removeprefix("data: ")) for one in rest[:-1] if one != COMMENT]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_an_error_has_its_status_where_no_silence_is_broken(
    http_config: RouterConfig,
) -> None:
    async with counting(replace(http_config, sse_keepalive=0.0, max_attempts=1)) as (cluster, http):
        cluster.prefill.on_submit = cluster.decode.on_submit = None
        body = {**PROMPT, "stream": True}
        call = asyncio.create_task(http.post("/v1/completions", json=body, timeout=60))
        submit = await cluster.prefill.submitted()
        cluster.prefill.say(submit, 0, (), end=broken())
        refused = await call
    assert refused.status_code == 503
    assert refused.json()["error"]["type"] == "service_unavailable_error"


async def test_an_error_after_a_broken_silence_is_an_event(
    silent: tuple[Cluster, httpx.AsyncClient],
) -> None:
    cluster, http = silent
    body = {**CHAT, "stream": True}
    async with http.stream("POST", "/v1/chat/completions", json=body, timeout=60) as answer:
        lines = answer.aiter_lines()
        await until_line(lines, is_comment)
        cluster.prefill.say(await cluster.prefill.submitted(), 0, (), end=broken())
        rest = await until_line(lines, is_chunk)
        assert [line async for line in lines if line] == []
    *comments, event, data = rest
    assert (event, set(comments)) == ("event: error", {COMMENT} if comments else set())
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "service_unavailable_error"


async def test_events_set_no_timer_and_those_that_come_in_time_leave_no_silence() -> None:
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    exchange = Exchange(
        {"headers": [], "path": "/v1/completions"},
        receive,
        send,
        HTTP.methods["POST /v1/completions"],
    )
    with SilenceBreaker(exchange, 3600.0, b": x") as breaker:
        timer = breaker._timer
        for _ in range(100):
            await exchange.write(b"data")
        assert breaker._timer is timer
        breaker._listen()
        await asyncio.sleep(0)
        assert sent.count(b": x") == 0
        exchange.wrote_at -= 3600.0
        breaker._listen()
        await asyncio.sleep(0)
        assert sent[-1] == b": x"
        breaker._listen()
        exchange.wrote_at -= 3600.0
        breaker._listen()
    await asyncio.sleep(0)
    assert sent.count(b": x") == 1, "the stream has ended before the second was written"


PHASES = ("queue", "prefill", "pull", "decode")


async def bring_to(cluster: Cluster, phase: str, number: int) -> None:
    """Return when the cluster's request of this number is in this phase, from 1."""
    submit = await cluster.prefill.submitted(number)
    submitted = await cluster.decode.submitted(number)
    if phase == "prefill":
        begun = worker_pb2.RequestOutput(request_id=submit.request_id, attempt=submit.attempt)
        cluster.prefill.send(worker_pb2.AttachResponse(outputs=[begun]))
    elif phase != "queue":
        cluster.prefill.say(submit, 0, (65,), end=HANDED_OVER)
    if phase == "decode":
        cluster.decode.say(submitted, 1, (66,))


async def test_a_chat_whose_client_leaves_ends_in_each_phase(http_config: RouterConfig) -> None:
    async with running(http_config, "prefill-0", "decode-0") as cluster:
        computing = 0
        for number, (phase, stream) in enumerate(itertools.product(PHASES, (False, True)), 1):
            body = json.dumps({**CHAT, "stream": stream}).encode()
            async with connection(cluster) as (_, writer):
                head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
                writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
                await bring_to(cluster, phase, number)
                assert len(cluster.decode.cancels) == number - 1
            await until(lambda wanted=number: len(cluster.decode.cancels) == wanted)  # type: ignore[misc]
            computing += phase in ("queue", "prefill")
            await until(lambda wanted=computing: len(cluster.prefill.cancels) >= wanted)  # type: ignore[misc]
            assert (await cluster.server_info()).live_requests == 0
