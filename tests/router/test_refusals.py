"""What the router refuses, and how it says so."""

from __future__ import annotations

import asyncio
import dataclasses

import grpc
from grpc_health.v1 import health_pb2

from kvrelay.router.config import RouterConfig
from kvrelay.v1 import inference_pb2 as pb

from .cluster import Cluster, HeldEncoding, collect, running, status_of
from .scripted_worker import until


async def test_a_bad_field_is_named_before_any_worker_hears_of_it(cluster: Cluster) -> None:
    error = await status_of(cluster.generate(top_p=float("nan")))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert str(error.details()).startswith("top_p: ")
    assert cluster.prefill.submits == cluster.decode.submits == []
    refused = 'kvrelay_requests_total{model="counter",outcome="invalid"}'
    assert await cluster.metric(refused) == 1


async def test_an_oversized_message_is_refused(cluster: Cluster) -> None:
    error = await status_of(cluster.stub.Generate(pb.GenerateRequest(text="x" * (65 << 10))))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert str(error.details()).startswith("text: ")
    error = await status_of(cluster.stub.Generate(pb.GenerateRequest(text="x" * (200 << 10))))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_overload_says_when_to_come_again(cluster: Cluster) -> None:
    calls = [cluster.generate() for _ in range(8)]
    await cluster.decode.submitted(8)
    error = await status_of(cluster.generate())
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ("retry-after-ms", "500") in list(error.trailing_metadata())
    calls[0].cancel()
    await until(lambda: len(cluster.decode.cancels) == 1)
    calls[0] = cluster.generate()
    await cluster.decode.submitted(9)
    for call in calls:
        call.cancel()


async def test_requests_count_as_live_while_they_are_validated(
    config: RouterConfig, held_encoding: HeldEncoding
) -> None:
    """A long text costs nothing where there is no room, and nobody else waits for it."""
    config = dataclasses.replace(config, max_live_requests=2)
    async with running(config, "prefill-0", "decode-0") as cluster:
        cluster.count()
        calls = [cluster.stub.Generate(pb.GenerateRequest(text=f"no. {i}")) for i in range(2)]
        reads = [asyncio.create_task(collect(call)) for call in calls]
        await until(lambda: len(held_encoding.texts) == 2)
        error = await status_of(cluster.stub.Generate(pb.GenerateRequest(text="no. 3")))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "--max-live-requests" in str(error.details())
        held_encoding.let_go.set()
        assert all(len(streamed.token_ids) == 16 for streamed in await asyncio.gather(*reads))
        assert sorted(held_encoding.texts) == ["no. 0", "no. 1"]


async def test_without_a_ready_worker_it_is_unavailable(cluster: Cluster) -> None:
    await cluster.decode.stop()
    await cluster.until_status(health_pb2.HealthCheckResponse.NOT_SERVING)
    error = await status_of(cluster.generate())
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    cluster.discovery.replace([cluster.prefill.endpoint])
    error = await status_of(cluster.generate())
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert "decode" in str(error.details())
