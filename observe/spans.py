"""The spans of traces, as OpenTelemetry has them, and the recorder that requests give them to."""

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
    """Whose side of a call a span is; the numbers are OTLP's."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


@dataclass(frozen=True, slots=True)
class SpanLink:
    """Another span that caused this one, and is not its parent."""

    context: TraceContext
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that has ended."""

    name: str
    context: TraceContext
    """Its own."""
    parent_id: bytes
    """Empty: it is the first of its trace."""
    start_ns: int
    """Since 1970."""
    end_ns: int
    attributes: Attributes = field(default_factory=dict)
    links: Sequence[SpanLink] = ()
    kind: SpanKind = SpanKind.INTERNAL
    error: str | None = None
    """Why it has failed; None: it has not."""


class SpanSink(Protocol):
    """Takes spans that have ended."""

    def put(self, span: Span) -> None:
        """Take one, or drop and count it. Any thread; does not block, and does not raise."""
        ...


class SpanRecorder:
    """Makes spans of one trace from instants on the clock of `time.monotonic`.

    The offset to the time of day is taken once, so spans of one recorder fit together even if
    that is set meanwhile.

    Args:
        sink: takes the spans.
        context: the span that others are recorded below; it is recorded by `record_own`.
        parent_id: of that span; empty: it is the first of its trace.
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
            name: of what was done.
            start: in seconds, on the clock of `time.monotonic`.
            end: on the same clock.
            attributes: what else there is to say.
            span_id: that others were told before; empty: a new one.
            parent_id: of a span below the own one; empty: that one.
            links: spans that caused it.
            error: why it has failed.
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
