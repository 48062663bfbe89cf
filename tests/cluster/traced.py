"""A trace with the spans of the router and both workers, from processes of their own."""

from __future__ import annotations

import asyncio

from kvrelay.v1 import inference_pb2
from tests.cluster.running import RunningCluster
from tests.otlp_receiver import Collector

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PROMPT = tuple(range(1, 101))
CHUNK_TOKENS = 40
SECONDS = 60
ROUTER, PREFILL, DECODE = "kvrelay-router", "kvrelay-prefill", "kvrelay-decode"


async def ask_for_a_trace(cluster: RunningCluster, collector: Collector) -> None:
    """One request of several that is traced, and all of its spans arrive."""
    await cluster.generate(PROMPT, max_tokens=6)  # not traced
    call = cluster.stub.Generate(
        inference_pb2.GenerateRequest(
            request_id="traced",
            input_ids=inference_pb2.TokenIds(ids=[2, *PROMPT]),
            sampling_params=inference_pb2.SamplingParams(max_tokens=6, ignore_eos=True),
        ),
        metadata=[("traceparent", f"00-{TRACE}-{SPAN}-01")],
    )
    async for _ in call:
        pass
    await cluster.assert_at_baseline()
    await collector.until(_is_complete)
    async with asyncio.timeout(SECONDS):  # they are counted once the collector has answered
        while (exported := await exported_spans(cluster)) < len(collector.spans):
            await asyncio.sleep(0.05)
    dropped = await cluster.metric("kvrelay_spans_total") - exported
    assert (exported, dropped) == (len(collector.spans), 0)


def assert_one_trace(collector: Collector) -> None:
    """The spans are those of one hand-over."""
    assert {one.span.trace_id.hex() for one in collector.spans} == {TRACE}
    _check_tree(collector)
    chunks = [chunk.attributes["kvrelay.tokens"] for chunk in collector.named("prefill chunk")]
    assert (sum(chunks), max(chunks)) == (101, CHUNK_TOKENS)
    pulls = collector.named("hand-over pull")
    pages = sum(pull.attributes["kvrelay.pages"] for pull in pulls)
    assert pages == -(-101 // 16)
    assert all(pull.attributes["kvrelay.bytes"] > 0 for pull in pulls)
    assert collector.one("decode worker").attributes["kvrelay.output_tokens"] == 6
    assert not [one for one in collector.spans if one.span.status.code]


async def exported_spans(cluster: RunningCluster) -> float:
    return await cluster.metric("kvrelay_spans_total", fate="exported")


def _is_complete(collector: Collector) -> bool:
    names = {one.name for one in collector.spans}
    return {"prefill worker", "decode worker", "text_completion llama"} <= names


def _check_tree(collector: Collector) -> None:
    request = collector.one("text_completion llama", ROUTER)
    assert request.span.parent_span_id.hex() == SPAN
    attempt = collector.one("attempt", ROUTER)
    prefill, decode = (
        collector.one("prefill worker", PREFILL),
        collector.one("decode worker", DECODE),
    )
    above = {
        ("admission", ROUTER): request,
        ("placement", ROUTER): request,
        ("attempt", ROUTER): request,
        ("prefill worker", PREFILL): attempt,
        ("decode worker", DECODE): attempt,
        ("queue", PREFILL): prefill,
        ("hand-over ask", PREFILL): prefill,
        ("prefill chunk", PREFILL): prefill,
        ("hand-over", PREFILL): prefill,
        ("queue", DECODE): decode,
        ("hand-over grant", DECODE): decode,
        ("hand-over", DECODE): decode,
        ("hand-over pull", DECODE): decode,
        ("decode", DECODE): decode,
    }
    found = {(one.name, one.service) for one in collector.spans}
    assert found == {*above, ("text_completion llama", ROUTER)}
    for (name, service), parent in above.items():
        for one in collector.named(name, service):
            assert one.span.parent_span_id == parent.span.span_id, (name, service)
            if service == parent.service:  # clocks of processes are read at different moments
                assert one.is_within(parent), (name, service)
    names = {one.resource["service.instance.id"] for one in collector.spans}
    assert {
        attempt.attributes["kvrelay.prefill_worker"],
        attempt.attributes["kvrelay.decode_worker"],
    } < names
