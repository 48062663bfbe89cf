from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from benchmarks.peers.measure import remote_prefill
from kvrelay.deploy.load_generator.load_client import OK, WRONG_OUTPUT, RunClock
from kvrelay.deploy.load_generator.openai_client import (
    CompletionsClient,
    served_model,
)
from kvrelay.deploy.load_generator.workload import Job, Prompts
from tests.benchmarks.completions_server import ScriptedServer

VOCAB_SIZE = 100


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
        session, server.base_url, "scripted", prompts, RunClock(), deadline_s, **more
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
