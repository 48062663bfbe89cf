from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from benchmarks.client import OK, WRONG_OUTPUT, Stopwatch
from benchmarks.openai_client import CompletionsClient, remote_prefill, served_model
from benchmarks.workload import Job, Prompts

VOCAB_SIZE = 100


class ScriptedServer:
    """Streams completions as vLLM does, one token a chunk, unless told to do something wrong."""

    def __init__(self) -> None:
        self.fault = ""
        self.bodies: list[dict[str, Any]] = []
        self.base_url = ""
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        self.runner = web.AppRunner(app, shutdown_timeout=1)

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.fault == "refuse":
            return web.json_response({"error": {"message": "busy"}}, status=429)
        if not body["stream"]:
            return web.json_response({"kv_transfer_params": {"remote_port": 7}})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in self._events(body):
            await response.write(event)
            if self.fault == "hang":
                await asyncio.sleep(60)
        return response

    def _events(self, body: dict[str, Any]) -> list[bytes]:
        wanted = body["max_tokens"] - (self.fault == "short")
        events = [self._chunk(count, wanted) for count in range(1, wanted + 1)]
        if self.fault == "error event":
            events[1:] = [b'event: error\ndata: {"error": {"message": "lost"}}\n\n']
        if self.fault == "error data":
            events[1:] = [_data({"error": {"message": "lost"}})]
        if self.fault == "pairs":
            events = events[1::2]
        usage = {"completion_tokens": wanted, "prompt_tokens_details": {"cached_tokens": 3}}
        end = (
            []
            if self.fault == "cut"
            else [_data({"choices": [], "usage": usage}), b"data: [DONE]\n\n"]
        )
        return [b": a comment\n\n", *events, *end]

    def _chunk(self, count: int, wanted: int) -> bytes:
        reason = "stop" if self.fault == "stop" else "length"
        choice = {"index": 0, "text": "", "finish_reason": reason if count == wanted else None}
        return _data({"choices": [choice], "usage": {"completion_tokens": count}})


def _data(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    made = ScriptedServer()
    await made.runner.setup()
    site = web.TCPSite(made.runner, "127.0.0.1", 0)
    await site.start()
    host, port = made.runner.addresses[0][:2]
    made.base_url = f"http://{host}:{port}"
    yield made
    await made.runner.cleanup()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def client(
    session: aiohttp.ClientSession, server: ScriptedServer, deadline_s: float = 10.0, **more: Any
) -> CompletionsClient:
    prompts = Prompts(VOCAB_SIZE, (0,))
    return CompletionsClient(
        session, server.base_url, "scripted", prompts, Stopwatch(), deadline_s, **more
    )


JOB = Job(index=4, input_len=6, output_len=8)


async def test_every_chunk_with_tokens_is_a_delta(session, server):
    record = await client(session, server).send(JOB)
    assert (record.status, record.index, record.cached_tokens) == (OK, 4, 3)
    assert record.token_counts == (1,) * 8
    assert record.sent < record.token_times[0] <= record.token_times[-1] <= record.ended
    assert list(record.token_times) == sorted(record.token_times)


async def test_the_request_is_greedy_and_of_exactly_that_length(session, server):
    await client(session, server).send(JOB)
    body = server.bodies[0]
    assert body["prompt"] == Prompts(VOCAB_SIZE, (0,)).token_ids(JOB)
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (8, 0, True)


async def test_a_chunk_may_hold_several_tokens(session, server):
    server.fault = "pairs"
    record = await client(session, server).send(JOB)
    assert (record.status, record.token_counts) == (OK, (2,) * 4)


@pytest.mark.parametrize(
    ("fault", "detail"),
    [
        ("short", "7 tokens instead of 8"),
        ("stop", "finished with stop"),
        ("cut", "without [DONE]"),
        ("error event", "lost"),
        ("error data", "lost"),
    ],
)
async def test_a_stream_that_is_not_what_was_asked_for_has_failed(session, server, fault, detail):
    server.fault = fault
    record = await client(session, server).send(JOB)
    assert record.status == WRONG_OUTPUT
    assert detail in record.detail


async def test_a_refusal_has_failed_with_its_status(session, server):
    server.fault = "refuse"
    record = await client(session, server).send(JOB)
    assert (record.status, record.token_times) == ("HTTP_429", ())
    assert "busy" in record.detail


async def test_a_request_that_outlives_its_deadline_has_failed(session, server):
    server.fault = "hang"
    record = await client(session, server, deadline_s=0.2).send(JOB)
    assert record.status == "TimeoutError"


async def test_a_server_that_is_not_there_is_a_failure(session, server):
    await server.runner.cleanup()
    record = await client(session, server).send(JOB)
    assert record.status == "ClientConnectorError"


async def test_the_prefill_instance_is_asked_first_and_its_answer_passed_on(session, server):
    prepare = remote_prefill(session, server.base_url)
    record = await client(session, server, prepare=prepare).send(JOB)
    first, second = server.bodies
    assert record.status == OK
    assert (first["max_tokens"], first["stream"]) == (1, False)
    assert first["kv_transfer_params"]["do_remote_decode"]
    assert second["kv_transfer_params"] == {"remote_port": 7}
    assert (second["max_tokens"], second["prompt"]) == (8, first["prompt"])


async def test_a_refusal_of_the_prefill_instance_is_a_failure(session, server):
    server.fault = "refuse"
    prepare = remote_prefill(session, server.base_url)
    record = await client(session, server, prepare=prepare).send(JOB)
    assert record.status == "HTTP_429"
    assert len(server.bodies) == 1


async def test_the_models_name_is_asked_for(session, server):
    assert await served_model(session, server.base_url) == "scripted"
