"""An OTLP collector that keeps what it is sent: a real gRPC server of OTLP's own service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

ERROR = 2
"""OTLP's code of a span that has failed."""


@dataclass(frozen=True)
class Received:
    """A span, and whose it is."""

    span: Any
    resource: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.span.name)

    @property
    def service(self) -> str:
        return str(self.resource["service.name"])

    @property
    def attributes(self) -> dict[str, Any]:
        return _values(self.span.attributes)

    @property
    def seconds(self) -> float:
        return float(self.span.end_time_unix_nano - self.span.start_time_unix_nano) / 1e9

    def is_within(self, other: Received) -> bool:
        """Whether another span has all of its time."""
        mine, others = self.span, other.span
        return bool(
            others.start_time_unix_nano <= mine.start_time_unix_nano
            and mine.end_time_unix_nano <= others.end_time_unix_nano
        )


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    """What has come."""

    spans: list[Received] = field(default_factory=list)
    calls: int = 0
    address: str = ""
    status: grpc.StatusCode | None = None
    """What calls are answered with; None: they are taken."""
    rejects: int = 0
    """So many spans of each call are said to be refused."""

    @property
    def endpoint(self) -> str:
        return f"http://{self.address}"

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 (gRPC's name)
        self.calls += 1
        if self.status is not None:
            await context.abort(self.status, "as the test wants it")
        for group in request.resource_spans:
            resource = _values(group.resource.attributes)
            for scoped in group.scope_spans:
                self.spans += [Received(span, resource) for span in scoped.spans]
        answer = trace_service_pb2.ExportTraceServiceResponse()
        answer.partial_success.rejected_spans = self.rejects
        return answer

    def named(self, name: str, service: str = "") -> list[Received]:
        """The spans of this name, in the order in which they began."""
        found = [s for s in self.spans if s.name == name and service in ("", s.service)]
        return sorted(found, key=lambda one: one.span.start_time_unix_nano)

    def one(self, name: str, service: str = "") -> Received:
        """The only span of this name."""
        (found,) = self.named(name, service)
        return found

    async def until(self, holds: Callable[[Collector], object]) -> None:
        """Returns once that holds of what has come."""
        async with asyncio.timeout(60):
            while not holds(self):
                await asyncio.sleep(0.02)


def _values(attributes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        if kind == "array_value":
            value = [item.string_value for item in value.values]
        found[one.key] = value
    return found


@asynccontextmanager
async def collecting(port: int = 0) -> AsyncIterator[Collector]:
    """A collector that runs."""
    collector = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    collector.address = f"127.0.0.1:{bound}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(None)
