"""What routers and workers are told of how they are to be observed."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.options.declaration import Section, option


@dataclass(frozen=True, kw_only=True)
class ObservingOptions:
    """The options that every process of a cluster is told."""

    otlp: str | None = option(
        None,
        "Send the spans of traced requests to this OpenTelemetry collector, over OTLP/gRPC: "
        "http://HOST:PORT, or https:// for TLS. Serving goes on if it is away.",
        Section.OBSERVING,
        metavar="URL",
        shown_default="no tracing",
    )
