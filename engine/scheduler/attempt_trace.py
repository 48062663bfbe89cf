"""The spans of one traced attempt on a worker."""

from __future__ import annotations

import time
from typing import Final

from kvrelay.observe.spans import Attributes, AttributeValue, SpanRecorder, SpanSink
from kvrelay.observe.trace_context import TraceContext
from kvrelay.wire.submit import RequestKey
from kvrelay.wire.worker_info import WorkerRole

QUEUE: Final = "queue"
"""From its arrival until it has memory."""
CHUNK: Final = "prefill chunk"
"""A forward that computes a part of the prompt."""
ASK: Final = "hand-over ask"
"""On the prefill side, until the decode side has granted memory."""
GRANT: Final = "hand-over grant"
"""On the decode side, from the ask until there is memory."""
HAND_OVER: Final = "hand-over"
"""On the prefill side from the first announcement, on the decode side from the grant, until the
decode side has all pages and the prefill side has confirmed them."""
PULL: Final = "hand-over pull"
"""One read of announced pages."""
DECODE: Final = "decode"
"""From the activation to the end of the last choice."""


class AttemptTrace:
    """Records what a worker does for one attempt, all of its choices.

    One span has the attempt's whole time on the worker; all others are below it. Instants are on
    the clock of `time.monotonic`. Only the engine thread uses it, once the request is there.

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

    def begin(self, name: str) -> None:
        """A span of this name begins now."""
        self._open[name] = time.monotonic()

    def end(
        self, name: str, attributes: Attributes | None = None, *, error: str | None = None
    ) -> None:
        """The span of this name ends now; nothing happens if it did not begin."""
        began = self._open.pop(name, None)
        if began is not None:
            self._recorder.record(name, began, time.monotonic(), attributes, error=error)

    def record(
        self,
        name: str,
        began: float,
        ended: float,
        attributes: Attributes | None = None,
        *,
        error: str | None = None,
    ) -> None:
        """Something was done between two instants."""
        self._recorder.record(name, began, ended, attributes, error=error)

    def share(self) -> AttemptTrace:
        """The same, for one more request that is to end: the last one's end is the attempt's."""
        self._requests += 1
        return self

    def end_request(self, outcome: str, output_tokens: int, error: str | None) -> None:
        """A request has ended; with the last one all spans that are open end.

        Args:
            outcome: of its memory.
            output_tokens: that this attempt has generated for it here.
            error: why it has failed; None: it has not.
        """
        self._requests -= 1
        self._output_tokens += output_tokens
        self._error = self._error or error
        if self._requests:
            return
        for name in list(self._open):
            self.end(name, error=self._error)
        attributes: Attributes = {
            **self._attributes,
            "kvrelay.outcome": outcome,
            "kvrelay.output_tokens": self._output_tokens,
        }
        now = time.monotonic()
        self._recorder.record_own(self._name, self._began, now, attributes, error=self._error)


def begin_trace(
    sink: SpanSink | None, traceparent: str, role: WorkerRole, key: RequestKey
) -> AttemptTrace | None:
    """The trace of an attempt that has just come; None if it is not traced."""
    if sink is None or not traceparent:
        return None
    attempt = TraceContext.parse(traceparent)
    if attempt is None or not attempt.sampled:
        return None
    return AttemptTrace(sink, attempt, role, key)
