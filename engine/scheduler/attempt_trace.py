"""The spans of one traced attempt on a worker."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvrelay.engine.phases import Phase
from kvrelay.observe.spans import Attributes, AttributeValue, SpanRecorder, SpanSink
from kvrelay.observe.trace_context import TraceContext
from kvrelay.wire.submit import RequestKey
from kvrelay.wire.worker_info import WorkerRole

QUEUE: Final = "queue"
"""The time from the attempt's arrival until it has memory."""
CHUNK: Final = "prefill chunk"
"""A forward that computes a part of the prompt."""
PULL: Final = "hand-over pull"
"""One read of announced pages."""


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """A span between two phases of a request."""

    name: str
    since: Phase
    until: Phase | None = None
    """The phase that ends it; None: it ends with the attempt."""


ASK: Final = PhaseSpan("hand-over ask", Phase.ASKED, Phase.GRANTED)
"""The time on the prefill side, until the decode side has granted memory."""
GRANT: Final = PhaseSpan("hand-over grant", Phase.ASKED, Phase.GRANTED)
"""The time on the decode side, from the ask until there is memory."""
HANDED_OVER: Final = PhaseSpan("hand-over", Phase.ANNOUNCED)
"""The time on the prefill side, from the first announcement until the decode side has all pages."""
TAKEN_OVER: Final = PhaseSpan("hand-over", Phase.GRANTED, Phase.DECODING)
"""The time on the decode side, until the prefill side has confirmed all pages."""
DECODE: Final = PhaseSpan("decode", Phase.DECODING)
"""The time from the activation to the end of the last choice."""


class AttemptTrace:
    """The spans of one attempt, with all of its choices, on a worker.

    One span has the attempt's whole time on the worker; all others are below it. Times are on the
    clock of `time.monotonic`. Only the engine thread uses it, once the request is there.

    Args:
        sink: takes the spans.
        attempt: the router's span of the attempt.
        role: the worker's.
        key: the attempt's.
    """

    def __init__(
        self, sink: SpanSink, attempt: TraceContext, role: WorkerRole, key: RequestKey
    ) -> None:
        self._recorder = SpanRecorder(sink, attempt.child(), attempt.span_id)
        self._began = time.monotonic()
        self._name = f"{role} worker"
        self._attributes: dict[str, AttributeValue] = {
            "kvrelay.request_id": key.request_id,
            "kvrelay.attempt": key.attempt,
        }
        self._requests = 1
        self._output_tokens = 0
        self._error: str | None = None
        self._open: dict[str, float] = {}

    def enter(self, phase: Phase, spans: Sequence[PhaseSpan]) -> None:
        """End those of the spans that a phase ends, and begin those that it begins."""
        now = time.monotonic()
        for span in spans:
            if span.until is phase and span.name in self._open:
                self._recorder.record(span.name, self._open.pop(span.name), now)
        for span in spans:
            if span.since is phase:
                self._open.setdefault(span.name, now)

    def record(
        self,
        name: str,
        began: float,
        ended: float,
        attributes: Attributes | None = None,
        *,
        error: str | None = None,
    ) -> None:
        """Record a span between two moments."""
        self._recorder.record(name, began, ended, attributes, error=error)

    def share(self) -> AttemptTrace:
        """Share the trace with one more request; the last request to end also ends the attempt."""
        self._requests += 1
        return self

    def end_request(self, outcome: str, output_tokens: int, error: str | None) -> None:
        """Note that a request has ended; the last one also ends all open spans.

        Args:
            outcome: of its memory.
            output_tokens: the tokens that this attempt has generated for it here.
            error: why it has failed; None: it has not.
        """
        self._requests -= 1
        self._output_tokens += output_tokens
        self._error = self._error or error
        if self._requests:
            return
        now = time.monotonic()
        for name, began in self._open.items():
            self._recorder.record(name, began, now, error=self._error)
        self._open.clear()
        attributes: Attributes = {
            **self._attributes,
            "kvrelay.outcome": outcome,
            "kvrelay.output_tokens": self._output_tokens,
        }
        self._recorder.record_own(self._name, self._began, now, attributes, error=self._error)


def begin_trace(
    sink: SpanSink | None, traceparent: str, role: WorkerRole, key: RequestKey
) -> AttemptTrace | None:
    """Begin the trace of an attempt that has just come. Returns None if it is not traced."""
    if sink is None or not traceparent:
        return None
    attempt = TraceContext.parse(traceparent)
    if attempt is None or not attempt.sampled:
        return None
    return AttemptTrace(sink, attempt, role, key)
