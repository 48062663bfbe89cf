"""Spans reach a collector over OTLP, and nothing waits for one that is away."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import grpc
import pytest

from kvrelay.observe import otlp
from kvrelay.observe.otlp import Fate, OtlpExporter, SpanCollector
from kvrelay.observe.spans import Attributes, Span, SpanKind, SpanLink
from kvrelay.observe.trace_context import TraceContext, new_span_id, new_trace_id
from tests.otlp_receiver import ERROR, Collector, collecting


class Exporting:
    """An exporter, and what became of its spans."""

    def __init__(self, endpoint: str) -> None:
        self.fates: Counter[Fate] = Counter()
        self.threads: set[str] = set()
        resource: Attributes = {"service.name": "test", "process.pid": 7}
        self.exporter = OtlpExporter(SpanCollector.parse(endpoint), resource, self._count)

    def _count(self, fate: Fate, spans: int) -> None:
        self.fates[fate] += spans
        self.threads.add(threading.current_thread().name)


@contextmanager
def exporting(endpoint: str) -> Iterator[Exporting]:
    one = Exporting(endpoint)
    try:
        yield one
    finally:
        one.exporter.close()


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    async with collecting() as collector:
        yield collector


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "_INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(otlp, "_FIRST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(otlp, "_LAST_CALL_SECONDS", 0.2)


def span(name: str = "span", **fields: object) -> Span:
    context = TraceContext(new_trace_id(), new_span_id(), sampled=True)
    given = {"context": context, "parent_id": b"", "start_ns": 1, "end_ns": 2, **fields}
    return Span(name=name, **given)  # type: ignore[arg-type]


async def test_a_span_comes_as_it_was_given(collector: Collector) -> None:
    parent, cause = new_span_id(), span().context
    given = span(
        parent_id=parent,
        attributes={"words": ["a", "b"], "number": 3, "share": 0.5, "is": True, "text": "t"},
        links=(SpanLink(cause, {"why": "x"}),),
        kind=SpanKind.SERVER,
        error="it broke",
    )
    with exporting(collector.endpoint) as one:
        one.exporter.put(given)
        await collector.until(lambda c: c.spans)
    (received,) = collector.spans
    sent = received.span
    assert received.resource == {"service.name": "test", "process.pid": 7}
    assert received.attributes == dict(given.attributes)
    assert (sent.trace_id, sent.span_id) == (given.context.trace_id, given.context.span_id)
    assert (sent.parent_span_id, sent.kind) == (parent, SpanKind.SERVER)
    assert (sent.start_time_unix_nano, sent.end_time_unix_nano) == (1, 2)
    assert (sent.status.code, sent.status.message) == (ERROR, "it broke")
    assert sent.links[0].span_id == cause.span_id
    assert one.fates[Fate.EXPORTED] == 1


async def test_spans_wait_for_a_collector_that_is_away(collector: Collector) -> None:
    collector.status = grpc.StatusCode.UNAVAILABLE
    with exporting(collector.endpoint) as one:
        one.exporter.put(span("early"))
        await collector.until(lambda c: c.calls > 1)
        one.exporter.put(span("late"))
        collector.status = None
        await collector.until(lambda c: len(c.spans) == 2)
    assert [received.name for received in collector.spans] == ["early", "late"]
    assert one.fates == {Fate.EXPORTED: 2, Fate.REFUSED: 0}


async def test_too_many_that_wait_are_dropped_and_counted_and_nobody_is_blocked() -> None:
    with exporting("http://127.0.0.1:1") as one:
        begun = time.thread_time()
        for _ in range(2 * otlp.MOST_WAITING):
            one.exporter.put(span())
        assert time.thread_time() - begun < 5  # seconds; a call would have taken as long for each
        # A batch may have been taken up already.
        assert one.fates[Fate.FULL] >= otlp.MOST_WAITING - otlp._MOST_IN_A_CALL
        one.exporter.close()
        one.exporter.put(span())
    assert one.fates.total() == 2 * otlp.MOST_WAITING + 1
    assert one.fates[Fate.EXPORTED] == 0


async def test_what_a_collector_refuses_is_counted(collector: Collector) -> None:
    with exporting(collector.endpoint) as one:
        collector.rejects = 1
        one.exporter.put(span())
        await collector.until(lambda _: one.fates.total())
        collector.status = grpc.StatusCode.INVALID_ARGUMENT
        one.exporter.put(span())
        await collector.until(lambda _: one.fates.total() == 2)
        assert collector.calls == 2  # it is not tried again
    assert one.fates[Fate.REFUSED] == 2


@pytest.mark.parametrize(("rejects", "refused"), [(-1, 0), (1 << 40, 1)])
async def test_no_collector_refuses_more_spans_than_it_got(
    collector: Collector, rejects: int, refused: int
) -> None:
    with exporting(collector.endpoint) as one:
        collector.rejects = rejects
        one.exporter.put(span())
        await collector.until(lambda _: one.fates.total())
    assert one.fates == {Fate.REFUSED: refused, Fate.EXPORTED: 1 - refused}


async def test_a_collector_that_refuses_all_is_complained_of_once(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    with exporting(collector.endpoint) as one:
        for number, status in enumerate(("PERMISSION_DENIED",) * 3 + ("UNIMPLEMENTED",) * 2):
            collector.status = grpc.StatusCode[status]
            one.exporter.put(span())
            await collector.until(lambda _: one.fates.total() > number)  # noqa: B023
    ours = [record for record in caplog.records if record.name == otlp.__name__]
    told = [record.getMessage().rsplit(" ", 1)[1] for record in ours]
    assert told == ["PERMISSION_DENIED", "UNIMPLEMENTED"]


async def test_a_process_that_can_have_no_thread_goes_on(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with exporting(collector.endpoint) as one:
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", cannot)
            one.exporter.put(span("early"))
        one.exporter.put(span("late"))
        await collector.until(lambda c: len(c.spans) == 2)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", cannot)
        with exporting(collector.endpoint) as one:
            one.exporter.put(span())
    assert one.fates == {Fate.UNSENT: 1}


@pytest.mark.parametrize("value", [1 << 64, "\ud800", object()], ids=["int", "str", "object"])
async def test_a_span_that_cannot_be_sent_does_not_end_the_export(
    collector: Collector, value: object
) -> None:
    with exporting(collector.endpoint) as one:
        one.exporter.put(span("bad", attributes={"field": value}))
        async with asyncio.timeout(60):
            while not one.fates[Fate.REFUSED]:
                await asyncio.sleep(0.02)
        one.exporter.put(span("good"))
        await collector.until(lambda c: c.spans)
    assert [received.name for received in collector.spans] == ["good"]
    assert one.fates == {Fate.REFUSED: 1, Fate.EXPORTED: 1}


def test_the_end_counts_what_a_silent_collector_was_to_get(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(otlp, "_CALL_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        one = Exporting(f"http://127.0.0.1:{silent.getsockname()[1]}")
        for _ in range(4 * otlp._MOST_IN_A_CALL):
            one.exporter.put(span())
        one.exporter.close()
        assert one.exporter._thread is not None
        one.exporter._thread.join(60)  # on a busy machine the end goes on without it
    assert not one.exporter._thread.is_alive()
    assert one.fates == {Fate.UNSENT: 4 * otlp._MOST_IN_A_CALL}


async def test_the_end_sends_what_waits(collector: Collector) -> None:
    one = Exporting(collector.endpoint)
    for _ in range(1000):
        one.exporter.put(span())
    await asyncio.to_thread(one.exporter.close)
    assert len(collector.spans) == 1000
    assert one.fates == {Fate.EXPORTED: 1000, Fate.REFUSED: 0}
    assert one.threads == {"otlp"}


def test_no_thread_is_started_without_a_span() -> None:
    one = Exporting("http://127.0.0.1:1")
    assert one.exporter._thread is None
    one.exporter.close()


@pytest.mark.parametrize(
    ("endpoint", "target", "encrypted"),
    [
        ("http://localhost:4317", "localhost:4317", False),
        ("http://localhost", "localhost:4317", False),
        ("https://collector.example:443/", "collector.example:443", True),
        ("127.0.0.1:1", "127.0.0.1:1", False),
        ("http://[::1]", "[::1]:4317", False),
        ("http://[::1]:9", "[::1]:9", False),
    ],
)
def test_endpoints(endpoint: str, target: str, encrypted: bool) -> None:
    assert SpanCollector.parse(endpoint) == SpanCollector(target, encrypted)


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "http://",
        "ftp://a:1",
        "http://a:b",
        "http://:1",
        "http://a:0",
        "http://a/v1/traces",
        "http://user:word@a",
        "http://a:65536",
    ],
)
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="must"):
        SpanCollector.parse(endpoint)
