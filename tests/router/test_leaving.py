"""A router that leaves: who is told, what it still serves, and when it has drained."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2

from kvrelay.deploy.commands.serve import drain_at_sigterm
from kvrelay.deploy.start_progress import StartProgress
from kvrelay.deploy.stop_signals import StopSignals
from kvrelay.router.config import RouterConfig
from kvrelay.v1 import inference_pb2 as pb

from .cluster import Cluster, HeldEncoding, collect, read, running
from .scripted_worker import COUNTED, LENGTH, count_decode

PROMPT = {"prompt": [1, 2, 3], "max_tokens": 8}
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def leaving(config: RouterConfig) -> AsyncIterator[Cluster]:
    """A router with both doors, whose decode worker says what a test lets it."""
    config = replace(config, http_address="127.0.0.1:0", drain_seconds=60.0)
    async with running(config, "prefill-0", "decode-0") as cluster:
        cluster.count()
        cluster.decode.on_submit = None
        yield cluster


async def test_a_router_that_drains_is_not_ready_and_serves_until_no_request_lives(
    leaving: Cluster,
) -> None:
    streaming = leaving.generate()
    [first] = await read(streaming, 1)
    submit = await leaving.decode.submitted()
    url = f"http://{leaving.router.http_address}"
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        kept = await http.get("/ready")
        assert (kept.status_code, kept.headers.get("connection")) == (200, None)
        draining = asyncio.create_task(leaving.router.drain())
        await leaving.until_status(_NOT_SERVING)
        for path in ("/health", "/ready", "/ping"):
            told = await http.get(path)
            assert (told.status_code, told.headers["connection"]) == (503, "close")
        leaving.decode.on_submit = count_decode
        late = await http.post("/v1/completions", json=PROMPT)
        assert (late.status_code, late.headers["connection"]) == (200, "close")
        assert (await collect(leaving.generate())).token_ids == COUNTED
    assert not draining.done()
    leaving.decode.say(submit, 1, tuple(COUNTED[1:]), end=LENGTH)
    rest = await read(streaming)
    assert [token for _, token in (first, *rest)] == COUNTED
    async with asyncio.timeout(30):
        await draining


async def test_a_drain_waits_for_a_prompt_that_is_being_tokenized(
    leaving: Cluster, held_encoding: HeldEncoding
) -> None:
    leaving.decode.on_submit = count_decode
    params = pb.SamplingParams(max_tokens=8)
    call = leaving.stub.Generate(pb.GenerateRequest(text="a text", sampling_params=params))
    collecting = asyncio.create_task(collect(call))
    async with asyncio.timeout(30):
        while not held_encoding.texts:
            await asyncio.sleep(0.005)
        draining = asyncio.create_task(leaving.router.drain())
        await leaving.until_status(_NOT_SERVING)
        assert not draining.done()
        held_encoding.let_go.set()
        assert (await collecting).token_ids == COUNTED
        await draining


async def test_a_drain_ends_after_its_time_and_what_is_left_may_try_again(
    config: RouterConfig,
) -> None:
    async with running(replace(config, drain_seconds=0.05), "prefill-0", "decode-0") as cluster:
        cluster.count()
        cluster.decode.on_submit = None
        streaming = cluster.generate()
        await read(streaming, 1)
        async with asyncio.timeout(30):
            await cluster.router.drain()
            stopping = asyncio.create_task(cluster.router.stop())
            with pytest.raises(grpc.aio.AioRpcError, match="the router is stopping") as error:
                await read(streaming)
            await stopping
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_router_drains_at_sigterm_and_not_at_ctrl_c(cluster: Cluster) -> None:
    for number, status in ((signal.SIGINT, _SERVING), (signal.SIGTERM, _NOT_SERVING)):
        stopped, said = asyncio.Event(), io.StringIO()
        with StopSignals() as signals:
            signals.deliver_to_loop(stopped.set)
            os.kill(os.getpid(), number)
            async with asyncio.timeout(30):
                await stopped.wait()
                await drain_at_sigterm(cluster.router, StartProgress(said), signals)
        await cluster.until_status(status)
        assert ("Draining" in said.getvalue()) is (status is _NOT_SERVING)
