"""All calls but Generate: load, model, tokens, health, reflection, metrics."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tokenizers import Tokenizer

from kvrelay.v1 import inference_pb2 as pb

from .cluster import Cluster, collect
from .scripted_worker import load, until


async def test_loads_are_the_workers_own(cluster: Cluster) -> None:
    reported = load(waiting_tokens=9, free=60)
    reported.growth_tokens, reported.speeds.seconds_per_step = 77, 0.25
    await cluster.report(cluster.decode, reported)
    await cluster.report(cluster.prefill, load(free=10))
    decode, prefill = (await cluster.stub.GetLoads(pb.GetLoadsRequest())).workers
    assert (decode.worker, decode.role) == ("decode-0", pb.WORKER_ROLE_DECODE)
    assert decode.load == reported
    assert decode.ready
    assert prefill.load.pools[0].free == 10
    assert (await cluster.server_info()).workers[0] == decode


async def test_server_info_counts_requests_and_tokens(cluster: Cluster) -> None:
    assert (await cluster.server_info()).requests == pb.RequestCounts()
    call = cluster.generate(request_id="a")
    await asyncio.gather(cluster.prefill.submitted(), cluster.decode.submitted())
    assert (await cluster.server_info()).requests == pb.RequestCounts(waiting=1, prompt_tokens=3)
    call.cancel()
    await until(lambda: len(cluster.prefill.cancels) == len(cluster.decode.cancels) == 1)
    cluster.count()
    await collect(cluster.generate(request_id="b"))
    assert (await cluster.server_info()).requests == pb.RequestCounts(
        ended={"abort": 1, "length": 1}, prompt_tokens=6, output_tokens=8
    )


async def test_model_info(cluster: Cluster) -> None:
    info = await cluster.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.model, info.architecture, info.dtype) == ("counter", "Counting", "float32")
    assert (info.vocab_size, info.max_model_len) == (402, 512)
    assert info.eos_token_ids == [400]


async def test_tokenize_and_back(
    cluster: Cluster, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for user in ("doors.incoming_messages", "admission.served_tokenizer"):
        monkeypatch.setattr(f"kvrelay.router.{user}.MAX_TEXT_TOKENS", 512)
    ids = (await cluster.stub.Tokenize(pb.TokenizeRequest(text="日本 😀"))).input_ids
    assert ids == tokenizer.encode("日本 😀").ids
    with pytest.raises(grpc.aio.AioRpcError, match=r"text: has 600 tokens; the router takes 512"):
        await cluster.stub.Tokenize(pb.TokenizeRequest(text="@" * 600))
    with pytest.raises(grpc.aio.AioRpcError, match=r"input_ids: has 513 tokens or more"):
        await cluster.stub.Detokenize(pb.DetokenizeRequest(input_ids=[1] * 513))
    back = await cluster.stub.Detokenize(pb.DetokenizeRequest(input_ids=ids))
    assert back.text == "日本 😀"
    with pytest.raises(grpc.aio.AioRpcError, match="input_ids: token id 402"):
        await cluster.stub.Detokenize(pb.DetokenizeRequest(input_ids=[402]))


async def test_health_follows_readiness(cluster: Cluster) -> None:
    statuses = health_pb2.HealthCheckResponse
    await cluster.until_status(statuses.SERVING)
    await cluster.prefill.stop()
    await cluster.until_status(statuses.NOT_SERVING)
    await cluster.prefill.start()
    await cluster.until_status(statuses.SERVING)


async def test_reflection_lists_the_service(cluster: Cluster) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(cluster.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = stub.ServerReflectionInfo(iter([request]))
    answer = await call.read()
    names = [service.name for service in answer.list_services_response.service]
    assert "kvrelay.v1.InferenceService" in names
    newer = cluster.channel.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    assert await newer(iter([request])).read() == answer
    assert "grpc.reflection.v1.ServerReflection" in names


async def test_metrics_tell_what_happened(cluster: Cluster) -> None:
    cluster.count()
    streamed = await collect(cluster.generate())
    model = '{model="counter"}'
    assert await cluster.metric(f"kvrelay_ttft_seconds_count{model}") == 1
    assert await cluster.metric(f"kvrelay_itl_seconds_count{model}") == len(streamed.deltas) - 1
    assert await cluster.metric(f"kvrelay_e2e_seconds_count{model}") == 1
    assert await cluster.metric(f"kvrelay_prompt_tokens_total{model}") == 3
    assert await cluster.metric(f"kvrelay_output_tokens_total{model}") == 8
    ended = 'kvrelay_requests_total{model="counter",outcome="length"}'
    assert await cluster.metric(ended) == 1
    waiting = 'kvrelay_requests_live{model="counter",state="waiting"}'
    assert await cluster.metric(waiting) == 0
    cluster.prefill.on_submit = None
    call = cluster.generate()
    await cluster.prefill.submitted(2)
    assert await cluster.metric(waiting) == 1
    call.cancel()
