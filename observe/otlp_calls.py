"""The calls of an OTLP collector: spans as its messages, over gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Final, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from kvrelay.observe.spans import Attributes, AttributeValue, Span

if TYPE_CHECKING:
    from kvrelay.observe.otlp import SpanCollector

_MOST_ERROR_CHARACTERS: Final = 512


class CollectorCalls:
    """A channel to a collector.

    Args:
        collector: to call.
        resource: says which process the spans are of.
    """

    def __init__(self, collector: SpanCollector, resource: Attributes) -> None:
        options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        if collector.encrypted:
            credentials = grpc.ssl_channel_credentials()
            self._channel = grpc.secure_channel(collector.target, credentials, options)
        else:
            self._channel = grpc.insecure_channel(collector.target, options)
        self._stub = trace_service_pb2_grpc.TraceServiceStub(self._channel)
        self._resource = resource_pb2.Resource(attributes=_key_values(resource))
        self._scope = common_pb2.InstrumentationScope(name="kvrelay", version=version("kvrelay"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def export(self, spans: Sequence[Span], seconds: float) -> int | str:
        """Send spans; return how many the collector refused, or the failed call's status."""
        scoped = trace_pb2.ScopeSpans(scope=self._scope, spans=[_message(span) for span in spans])
        request = trace_service_pb2.ExportTraceServiceRequest(
            resource_spans=[trace_pb2.ResourceSpans(resource=self._resource, scope_spans=[scoped])]
        )
        try:
            answer = self._stub.Export(request, timeout=seconds)
        except grpc.RpcError as error:
            return str(error.code().name)
        # A collector may answer any number.
        return min(max(int(answer.partial_success.rejected_spans), 0), len(spans))


def _message(span: Span) -> trace_pb2.Span:
    context = span.context
    failed = span.error is not None
    return trace_pb2.Span(
        trace_id=context.trace_id,
        span_id=context.span_id,
        parent_span_id=span.parent_id,
        flags=int(context.sampled),
        name=span.name,
        kind=trace_pb2.Span.SpanKind.ValueType(int(span.kind)),
        start_time_unix_nano=span.start_ns,
        end_time_unix_nano=span.end_ns,
        attributes=_key_values(span.attributes),
        links=[
            trace_pb2.Span.Link(
                trace_id=link.context.trace_id,
                span_id=link.context.span_id,
                attributes=_key_values(link.attributes),
            )
            for link in span.links
        ],
        status=trace_pb2.Status(
            code=trace_pb2.Status.STATUS_CODE_ERROR,
            message=(span.error or "")[:_MOST_ERROR_CHARACTERS],
        )
        if failed
        else None,
    )


def _key_values(attributes: Attributes) -> list[common_pb2.KeyValue]:
    return [
        common_pb2.KeyValue(key=key, value=_any_value(value)) for key, value in attributes.items()
    ]


def _any_value(value: AttributeValue) -> common_pb2.AnyValue:
    match value:
        case bool():
            return common_pb2.AnyValue(bool_value=value)
        case int():
            return common_pb2.AnyValue(int_value=value)
        case float():
            return common_pb2.AnyValue(double_value=value)
        case str():
            return common_pb2.AnyValue(string_value=value)
    values = [common_pb2.AnyValue(string_value=one) for one in value]
    return common_pb2.AnyValue(array_value=common_pb2.ArrayValue(values=values))
