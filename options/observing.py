"""Options for the traces and logs of routers and workers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvrelay.options.declaration import Section, option


class LogFormat(StrEnum):
    """The format of the processes' logs."""

    TEXT = "text"
    """For people."""
    JSON = "json"
    """One object a line."""


@dataclass(frozen=True, kw_only=True)
class ObservingOptions:
    """The options that every process of a cluster gets."""

    otlp: str | None = option(
        None,
        "Send the spans of traced requests to this OpenTelemetry collector, over OTLP/gRPC: "
        "http://HOST:PORT, or https:// for TLS. Serving goes on if it is away.",
        Section.OBSERVING,
        metavar="URL",
        shown_default="no tracing",
    )
    log_format: LogFormat = option(
        LogFormat.TEXT,
        "How router, workers and controller write their logs to standard error: text, or json, one "
        "object a line with the worker's, the request's and the trace's ids.",
        Section.OBSERVING,
    )
