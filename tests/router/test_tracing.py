"""Spans of requests at a router, as a real collector receives them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import httpx
import pytest

from kvrelay.observe.trace_context import TraceContext
from kvrelay.router.config import RouterConfig
from kvrelay.router.requests.request_trace import Tracing
from kvrelay.v1 import inference_pb2 as pb
from tests.otlp_receiver import ERROR, Collector, collecting

from .cluster import Cluster, collect, read, running, status_of
from .http.client import CHAT, PROMPT, with_http
from .scripted_worker import RETRACTED, count_decode, tokens_then_silence

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"
REQUEST = "text_completion counter"


@asynccontextmanager
async def traced(
    config: RouterConfig, *names: str, share: float = 1.0
) -> AsyncIterator[tuple[Cluster, Collector]]:
    """A router that traces this share of requests, and where its spans go."""
    async with collecting() as collector:
        config = replace(config, otlp=collector.endpoint, trace_sample=share)
        async with running(config, *(names or ("prefill-0", "decode-0"))) as cluster:
            cluster.count()
            yield cluster, collector


def generate(cluster: Cluster, traceparent: str | None = None) -> Any:
    metadata = [] if traceparent is None else [("traceparent", traceparent)]
    request = pb.GenerateRequest(request_id="r-1", input_ids=pb.TokenIds(ids=[1, 2, 3]))
    request.sampling_params.max_tokens = 8
    return cluster.stub.Generate(request, metadata=metadata)


async def test_a_request_has_a_span_with_its_phases_below(config: RouterConfig) -> None:
    async with traced(config) as (cluster, collector):
        await collect(generate(cluster))
        workers = [TraceContext.parse(worker.submits[0].traceparent) for worker in cluster.workers]
    request = collector.one(REQUEST)
    assert request.span.parent_span_id == b""
    assert request.resource["service.name"] == "kvrelay-router"
    for name in ("admission", "placement", "attempt"):
        below = collector.one(name)
        assert below.span.parent_span_id == request.span.span_id
        assert below.span.trace_id == request.span.trace_id
        assert below.is_within(request)
    attempt = collector.one("attempt").span
    assert workers == [TraceContext(attempt.trace_id, attempt.span_id, sampled=True)] * 2
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "counter",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.response.id": "r-1",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 8,
    }
    assert expected.items() <= request.attributes.items()
    first = request.attributes["gen_ai.latency.time_to_first_token"]
    assert 0 < first <= request.attributes["gen_ai.latency.e2e"]
    assert not [one for one in collector.spans if one.span.status.code]


async def test_a_callers_trace_goes_on_whatever_the_share(config: RouterConfig) -> None:
    async with traced(config, share=0.0) as (cluster, collector):
        await collect(generate(cluster, SAMPLED))
    request = collector.one(REQUEST).span
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, SPAN)


@pytest.mark.parametrize(("share", "header"), [(1.0, UNSAMPLED), (0.0, None), (0.0, "nonsense")])
async def test_a_request_that_is_not_traced(
    config: RouterConfig, share: float, header: str | None
) -> None:
    async with traced(config, share=share) as (cluster, collector):
        await collect(generate(cluster, header))
        assert [worker.submits[0].traceparent for worker in cluster.workers] == ["", ""]
    assert not collector.spans


async def test_without_a_collector_nothing_is_traced(cluster: Cluster) -> None:
    cluster.count()
    await collect(generate(cluster, SAMPLED))
    assert [worker.submits[0].traceparent for worker in cluster.workers] == ["", ""]


async def test_a_failover_links_its_attempts(config: RouterConfig) -> None:
    async with traced(config, "prefill-0", "decode-0", "decode-1") as (cluster, collector):
        cluster.decode.on_submit = tokens_then_silence
        call = generate(cluster)
        streamed = await read(call, 3)
        await cluster.decode.stop()
        streamed += await read(call)
        assert [token for _, token in streamed] == list(range(4, 12))
    request, (lost, again) = collector.one(REQUEST), collector.named("attempt")
    assert lost.span.parent_span_id == again.span.parent_span_id == request.span.span_id
    assert lost.span.status.code == ERROR
    assert "decode-0 was lost" in lost.span.status.message
    assert not lost.span.links
    (link,) = again.span.links
    assert (link.trace_id, link.span_id) == (request.span.trace_id, lost.span.span_id)
    assert again.attributes["kvrelay.resubmission_reason"] == "worker_lost"
    assert again.attributes["kvrelay.emitted_tokens"] >= 3
    assert not request.span.status.code
    assert not again.span.status.code
    assert len(collector.named("placement")) == 2


async def test_a_retraction_is_no_error(config: RouterConfig) -> None:
    async with traced(config) as (cluster, collector):
        cluster.decode.on_submit = None
        call = generate(cluster)
        submit = await cluster.decode.submitted()
        cluster.decode.on_submit = count_decode
        cluster.decode.say(submit, end=RETRACTED)
        await collect(call)
    retracted, again = collector.named("attempt")
    assert not retracted.span.status.code
    assert again.span.links[0].span_id == retracted.span.span_id
    assert again.attributes["kvrelay.resubmission_reason"] == "retracted"


async def test_a_refused_request_has_failed_and_tells_no_text(config: RouterConfig) -> None:
    async with traced(config) as (cluster, collector):
        request = pb.GenerateRequest(text="secret", model="secret")
        error = await status_of(cluster.stub.Generate(request))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    refused = collector.one(REQUEST)
    assert (refused.span.status.code, refused.span.status.message) == (ERROR, "model")
    assert refused.attributes["error.type"] == "invalid"
    assert "secret" not in str(refused.span)


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/completions", PROMPT, REQUEST),
        ("/v1/chat/completions", CHAT, "chat counter"),
    ],
)
async def test_http_has_the_header_too(
    config: RouterConfig, tmp_path: Any, path: str, body: dict[str, Any], name: str
) -> None:
    async with traced(with_http(config, tmp_path), share=0.0) as (cluster, collector):
        url = f"http://{cluster.router.http_address}"
        async with httpx.AsyncClient(base_url=url, headers={"traceparent": SAMPLED}) as client:
            assert (await client.post(path, json=body)).status_code == 200
            two = [("traceparent", SAMPLED), ("traceparent", SAMPLED)]
            assert (await client.post(path, json=body, headers=two)).status_code == 200
    request = collector.one(name)
    assert (request.span.trace_id.hex(), request.span.parent_span_id.hex()) == (TRACE, SPAN)
    assert request.attributes["kvrelay.door"] == "http"


async def test_serving_goes_on_without_a_collector(config: RouterConfig) -> None:
    config = replace(config, otlp="http://127.0.0.1:1", trace_sample=1.0)
    async with running(config, "prefill-0", "decode-0") as cluster:
        cluster.count()
        for _ in range(3):
            streamed = await collect(generate(cluster))
            assert streamed.token_ids == list(range(4, 12))


def test_the_share_of_requests() -> None:
    class Sink:
        def put(self, span: object) -> None:
            raise AssertionError

    tracing = Tracing(Sink(), 0.25, "m")
    traces = [tracing.begin(None, "grpc", "chat") for _ in range(4000)]
    assert 800 < sum(trace is not None for trace in traces) < 1200
