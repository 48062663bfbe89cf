"""The spans of traces, as OpenTelemetry defines them, and their recorder."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol, TypeAlias

from kvrelay.observe.trace_context import TraceContext, new_span_id

AttributeValue: TypeAlias = str | bool | int | float | Sequence[str]
Attributes: TypeAlias = Mapping[str, AttributeValue]


class SpanKind(IntEnum):
    """The side of a call that a span is on; the numbers are OTLP's."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


@dataclass(frozen=True, slots=True)
class SpanLink:
    """A span that caused another one without being its parent."""

    context: TraceContext
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A piece of work that has ended."""

    name: str
    context: TraceContext
    """The span's own ids."""
    parent_id: bytes
    """The parent span's id; empty: this is the first span of its trace."""
    start_ns: int
    """Nanoseconds since 1970."""
    end_ns: int
    attributes: Attributes = field(default_factory=dict)
    links: Sequence[SpanLink] = ()
    kind: SpanKind = SpanKind.INTERNAL
    error: str | None = None
    """Why the work failed; None: it did not."""


class SpanSink(Protocol):
    """A receiver of spans that have ended."""

    def put(self, span: Span) -> None:
        """Take a span, or drop and count it. For any thread; does not block and does not raise."""
        ...


class SpanRecorder:
    """A recorder of one trace's spans, from instants on the clock of `time.monotonic`.

    The offset to the time of day is read once, so the recorder's spans fit together even if the
    system's time is set meanwhile.

    Args:
        sink: takes the spans.
        context: the span that others are recorded below; it is recorded by `record_own`.
        parent_id: the parent of that span; empty: it is the first of its trace.
    """

    __slots__ = ("_offset_ns", "_parent_id", "_sink", "context")

    def __init__(self, sink: SpanSink, context: TraceContext, parent_id: bytes) -> None:
        self._sink = sink
        self.context = context
        self._parent_id = parent_id
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def record_own(
        self,
        name: str,
        start: float,
        end: float,
        attributes: Attributes,
        *,
        error: str | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> None:
        """Record the span that the others are below."""
        self._put(name, self.context, self._parent_id, start, end, attributes, (), kind, error)

    def record(
        self,
        name: str,
        start: float,
        end: float,
        attributes: Attributes | None = None,
        *,
        span_id: bytes = b"",
        parent_id: bytes = b"",
        links: Sequence[SpanLink] = (),
        error: str | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> None:
        """Record a span below the own one.

        Args:
            name: the name of the work.
            start: in seconds, on the clock of `time.monotonic`.
            end: on the same clock.
            attributes: further facts.
            span_id: an id that was told to others before; empty: a new one.
            parent_id: a span below the own one; empty: the own one.
            links: spans that caused it.
            error: why it failed.
            kind: whose side of a call it is.
        """
        own = self.context
        context = TraceContext(own.trace_id, span_id or new_span_id(), own.sampled)
        parent_id = parent_id or own.span_id
        self._put(name, context, parent_id, start, end, attributes or {}, links, kind, error)

    def _put(
        self,
        name: str,
        context: TraceContext,
        parent_id: bytes,
        start: float,
        end: float,
        attributes: Attributes,
        links: Sequence[SpanLink],
        kind: SpanKind,
        error: str | None,
    ) -> None:
        self._sink.put(
            Span(
                name=name,
                context=context,
                parent_id=parent_id,
                start_ns=int(start * 1e9) + self._offset_ns,
                end_ns=int(max(start, end) * 1e9) + self._offset_ns,
                attributes=attributes,
                links=links,
                kind=kind,
                error=error,
            )
        )
