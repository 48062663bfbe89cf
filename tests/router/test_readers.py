"""Clients that read slowly, and clients with deadlines, on a real router."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer

from kvrelay.router.config import RouterConfig
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc

from .cluster import Cluster, running, status_of
from .scripted_worker import LENGTH, SECONDS, until

TOP = [pb.TokenLogprob(token_id=token, logprob=-0.5) for token in range(20)]
TOKENS_A_STEP = 80  # with TOP, 20 KB: messages larger than a narrow client's window get stuck


@pytest.fixture
async def impatient(config: RouterConfig) -> AsyncIterator[Cluster]:
    """A cluster whose router keeps little for a client."""
    config = dataclasses.replace(config, max_unread_bytes=100_000)
    async with running(config, "prefill-0", "decode-0") as cluster:
        yield cluster


@asynccontextmanager
async def narrow(cluster: Cluster) -> AsyncIterator[inference_pb2_grpc.InferenceServiceStub]:
    """A client that takes 64 KiB from the network before it reads, not some MiB."""
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 64 << 10),
    ]
    async with grpc.aio.insecure_channel(cluster.router.grpc_address, options=options) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def generate(stub: inference_pb2_grpc.InferenceServiceStub, **options: Any) -> Any:
    params = pb.SamplingParams(max_tokens=500, logprobs=20)
    prompt = pb.TokenIds(ids=[1, 2, 3])
    return stub.Generate(
        pb.GenerateRequest(request_id="r", input_ids=prompt, sampling_params=params), **options
    )


def say(cluster: Cluster, submit: Any, index: int, tokens: int, **fields: Any) -> None:
    logprobs = [pb.TokenLogprobs(token_id=50, logprob=-0.5, top=TOP)] * tokens
    cluster.prefill.say(submit, index, (50,) * tokens, logprobs=logprobs, **fields)


async def ended(cluster: Cluster, outcome: str) -> float:
    return await cluster.metric(f'kvrelay_requests_total{{model="counter",outcome="{outcome}"}}')


def say_prompt(cluster: Cluster, submit: Any, step: int) -> None:
    """Sends 20 KB of a prompt's log-probabilities."""
    logprobs = [pb.TokenLogprobs(token_id=50, logprob=-0.5, top=TOP)] * TOKENS_A_STEP
    cluster.prefill.say(submit, prompt_logprobs=logprobs, prompt_index=1 + step * TOKENS_A_STEP)


async def test_a_client_that_does_not_read_loses_its_request(impatient: Cluster) -> None:
    async with narrow(impatient) as stub:
        call = generate(stub)
        submit = await impatient.prefill.submitted()
        for step in range(20):
            say_prompt(impatient, submit, step)
        await until(lambda: len(impatient.decode.cancels) == 1)
        assert await ended(impatient, "slow_reader") == 1
        assert await impatient.metric("kvrelay_slow_readers_total") == 1
        error = await status_of(call)  # it reads at last, what was sent and then the reason
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "--max-unread-bytes" in str(error.details())


async def test_a_client_that_stops_reading_is_given_up_in_time(config: RouterConfig) -> None:
    """Although its request is complete, and less waits than the router would keep."""
    config = dataclasses.replace(config, read_timeout=2.0)
    async with running(config, "prefill-0", "decode-0") as cluster, narrow(cluster) as stub:
        call = generate(stub)
        submit = await cluster.prefill.submitted()
        for step in range(8):
            say_prompt(cluster, submit, step)
        say(cluster, submit, 0, 1, end=LENGTH)
        async with asyncio.timeout(60):
            while not await cluster.metric("kvrelay_slow_readers_total"):
                await asyncio.sleep(0.02)
        assert await ended(cluster, "length") == 1
        error = await status_of(call)
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "--read-timeout" in str(error.details())


async def test_a_client_that_reads_keeps_the_request_that_another_shares(
    impatient: Cluster,
) -> None:
    async with narrow(impatient) as stub:
        reading, idle = generate(impatient.stub), generate(stub)
        submit = await impatient.prefill.submitted()
        for step in range(20):
            say_prompt(impatient, submit, step)
            got = 0
            while got < TOKENS_A_STEP:
                got += len((await reading.read()).delta.prompt_logprobs)
        say(impatient, submit, 0, 1, end=LENGTH)
        assert list((await reading.read()).delta.token_ids) == [50]
        assert (await reading.read()).HasField("complete")
        assert (await status_of(idle)).code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await impatient.metric("kvrelay_slow_readers_total") == 1
        assert await ended(impatient, "length") == 1


# Deadlines.


async def test_a_deadline_ends_queued_work_at_once_and_is_counted(cluster: Cluster) -> None:
    call = generate(cluster.stub, timeout=2.0)
    await asyncio.gather(cluster.decode.submitted(), cluster.prefill.submitted())
    assert (await status_of(call)).code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: len(cluster.decode.cancels) == len(cluster.prefill.cancels) == 1)
    assert await ended(cluster, "deadline") == 1
    assert await ended(cluster, "abort") == 0


async def test_a_client_that_leaves_long_before_its_deadline_has_aborted(cluster: Cluster) -> None:
    call = generate(cluster.stub, timeout=30)
    await cluster.decode.submitted()
    call.cancel()
    await until(lambda: len(cluster.decode.cancels) == 1)
    assert await ended(cluster, "abort") == 1


async def test_a_deadline_that_passes_before_the_text_is_tokenized(
    config: RouterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No worker hears of the request, though its text is tokenized in the end."""
    let_go, done = threading.Event(), threading.Event()

    def hold(tokenizer: Tokenizer, text: str, most_tokens: int) -> Sequence[int]:
        assert let_go.wait(60)
        done.set()
        return [1, 2, 3]

    monkeypatch.setattr("kvrelay.router.admission.served_tokenizer.encode", hold)
    async with running(config, "prefill-0", "decode-0") as cluster:
        call = cluster.stub.Generate(pb.GenerateRequest(text="Hello"), timeout=2.0)
        assert (await status_of(call)).code() == grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(SECONDS):
            while await ended(cluster, "deadline") != 1:
                await asyncio.sleep(0.01)
        let_go.set()
        await until(done.is_set)
        assert (await cluster.stub.GetServerInfo(pb.GetServerInfoRequest())).live_requests == 0
        assert cluster.prefill.submits == cluster.decode.submits == []


async def test_the_router_ends_a_request_whose_client_is_silent(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router's own clock does it where no cancellation comes: it is cut off, say."""
    monkeypatch.setattr(
        "kvrelay.router.doors.grpc_service._deadline",
        lambda _: asyncio.get_running_loop().time() + 0.3,
    )
    error = await status_of(generate(cluster.stub))
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert await ended(cluster, "deadline") == 1
    await until(lambda: len(cluster.decode.cancels) == 1)


async def test_a_call_that_comes_too_late_is_refused(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.router.doors.grpc_service._deadline", lambda _: 0.0)
    error = await status_of(generate(cluster.stub))
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert cluster.prefill.submits == []
    assert await ended(cluster, "deadline") == 1
