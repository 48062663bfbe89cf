"""The spans of traced requests at a router: the request, its placements and its attempts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from kvrelay.observe.spans import (
    Attributes,
    AttributeValue,
    SpanKind,
    SpanLink,
    SpanRecorder,
    SpanSink,
)
from kvrelay.observe.trace_context import TraceContext, new_span_id, new_trace_id
from kvrelay.router.errors import InvalidField, RequestError
from kvrelay.router.generation import GenerationRequest, Submission
from kvrelay.router.placement.fleet import Placement
from kvrelay.router.requests.events import Completion

ADMISSION: Final = "admission"
"""The span from the arrival until the request is validated."""
PLACEMENT: Final = "placement"
"""The span from the admission, or the earlier attempt's end, until workers were found."""
ATTEMPT: Final = "attempt"
"""The span from a submission to workers until their last report."""
CHAT: Final = "chat"
COMPLETION: Final = "text_completion"
_RANDOM_BYTES: Final = 7
"""The number of last bytes of a trace's id, which W3C wants to be random."""


@dataclass(frozen=True, slots=True)
class Resubmission:
    """The earlier attempt that an attempt continues."""

    attempt: int
    """The number of the earlier attempt."""
    reason: str
    """Why the earlier attempt ended."""


@dataclass(slots=True)
class _OpenAttempt:
    began: float
    span_id: bytes
    attributes: dict[str, AttributeValue]
    links: tuple[SpanLink, ...]


class RequestTrace:
    """A recorder of one request's spans.

    Args:
        sink: receives the spans.
        context: the request's own span.
        parent_id: the caller's span; empty: there is none.
        door: the door by which the request came.
        operation: `CHAT` or `COMPLETION`.
        model: the served model's name.
    """

    def __init__(
        self,
        sink: SpanSink,
        context: TraceContext,
        parent_id: bytes,
        door: str,
        operation: str,
        model: str,
    ) -> None:
        self._recorder = SpanRecorder(sink, context, parent_id)
        self._arrived = self._placing = time.monotonic()
        self._first_token: float | None = None
        self._name = f"{operation} {model}"
        self._attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "kvrelay",
            "gen_ai.request.model": model,
            "kvrelay.door": door,
        }
        self._open: dict[int, _OpenAttempt] = {}
        self._span_ids: dict[int, bytes] = {}  # of all attempts
        self._ended = False

    @property
    def trace_id(self) -> str:
        """The trace's id, as logs show it."""
        return self._recorder.context.trace_id.hex()

    def admitted(self, request: GenerationRequest) -> None:
        """Record the admission of a validated request."""
        self._attributes.update(_asked(request))
        self._placing = time.monotonic()
        self._recorder.record(ADMISSION, self._arrived, self._placing)

    def submitted(
        self, submission: Submission, placement: Placement, before: Resubmission | None
    ) -> str:
        """Record the placement and begin an attempt; return its `traceparent` for the workers."""
        now, own = time.monotonic(), self._recorder.context
        placed: dict[str, AttributeValue] = {
            "kvrelay.decode_worker": placement.decode.endpoint.incarnation,
            "kvrelay.placement": placement.reason.value,
        }
        if placement.prefill is not None:
            placed["kvrelay.prefill_worker"] = placement.prefill.endpoint.incarnation
        self._recorder.record(PLACEMENT, self._placing, now, placed)
        attributes = {
            **placed,
            "kvrelay.attempt": submission.attempt,
            "kvrelay.choices": len(submission.choices),
            "kvrelay.emitted_tokens": len(submission.emitted),
        }
        links: tuple[SpanLink, ...] = ()
        if before is not None:
            earlier = TraceContext(own.trace_id, self._span_ids[before.attempt], own.sampled)
            links = (SpanLink(earlier, {"kvrelay.resubmission_reason": before.reason}),)
            attributes["kvrelay.resubmission_reason"] = before.reason
        span_id = self._span_ids[submission.attempt] = new_span_id()
        self._open[submission.attempt] = _OpenAttempt(now, span_id, attributes, links)
        return str(TraceContext(own.trace_id, span_id, own.sampled))

    def token_came(self) -> None:
        """Note that a token has come; only the first one counts."""
        if self._first_token is None:
            self._first_token = time.monotonic()

    def attempt_ended(self, attempt: int, error: str | None = None) -> None:
        """Record the end of an attempt; only its first end counts."""
        one = self._open.pop(attempt, None)
        if one is None:
            return
        self._placing = time.monotonic()
        self._recorder.record(
            ATTEMPT,
            one.began,
            self._placing,
            one.attributes,
            span_id=one.span_id,
            links=one.links,
            error=error,
            kind=SpanKind.CLIENT,
        )

    def ended(self, outcome: Completion | RequestError | None) -> None:
        """Record the end or refusal of the request; None: its client left before."""
        if self._ended:
            return
        self._ended = True
        for attempt in list(self._open):
            self.attempt_ended(attempt)
        now = time.monotonic()
        error = None
        if isinstance(outcome, RequestError):
            error = told_of(outcome)
            self._attributes["error.type"] = outcome.outcome
        elif outcome is not None:
            self._attributes.update(_answered(outcome))
        if self._first_token is not None:
            seconds = self._first_token - self._arrived
            self._attributes["gen_ai.latency.time_to_first_token"] = seconds
        self._attributes["gen_ai.latency.e2e"] = now - self._arrived
        self._recorder.record_own(
            self._name, self._arrived, now, self._attributes, error=error, kind=SpanKind.SERVER
        )


class Tracing:
    """The decision on which requests are traced.

    Args:
        sink: receives the spans; None: no request is traced.
        share: the traced share, in [0, 1], of requests without a caller's trace. The others are
            traced if their callers' spans are.
        model: the served model's name.
    """

    def __init__(self, sink: SpanSink | None, share: float, model: str) -> None:
        self._sink = sink
        self._below = int(share * (1 << 8 * _RANDOM_BYTES))
        self._model = model

    @property
    def on(self) -> bool:
        """Whether any request may be traced."""
        return self._sink is not None

    def begin(self, caller: str | None, door: str, operation: str) -> RequestTrace | None:
        """Begin the trace of a request that has just arrived; None: it is not traced.

        Args:
            caller: its traceparent header; None: it has none.
            door: the door by which it came.
            operation: `CHAT` or `COMPLETION`.
        """
        if self._sink is None:
            return None
        parent = None if caller is None else TraceContext.parse(caller)
        if parent is not None:
            if not parent.sampled:
                return None
            context, parent_id = parent.child(), parent.span_id
        else:
            trace_id = new_trace_id()
            if int.from_bytes(trace_id[-_RANDOM_BYTES:]) >= self._below:
                return None
            context, parent_id = TraceContext(trace_id, new_span_id(), sampled=True), b""
        return RequestTrace(self._sink, context, parent_id, door, operation, self._model)


NO_TRACING: Final = Tracing(None, 0.0, "")


def told_of(error: RequestError) -> str:
    """The text of an error for a span; of a bad field only its name, as the rest may quote it."""
    return error.field if isinstance(error, InvalidField) else str(error)


def _asked(request: GenerationRequest) -> Attributes:
    params = request.params
    sampling, stops = params.sampling, params.stops
    asked: dict[str, AttributeValue] = {
        "gen_ai.response.id": request.request_id,
        "gen_ai.request.max_tokens": stops.max_tokens,
        "gen_ai.request.temperature": float(sampling.temperature),
        "gen_ai.request.top_p": float(sampling.top_p),
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": float(sampling.frequency_penalty),
        "gen_ai.request.presence_penalty": float(sampling.presence_penalty),
        "gen_ai.usage.input_tokens": len(request.input_ids),
    }
    if params.n > 1:
        asked["gen_ai.request.choice.count"] = params.n
    return asked


def _answered(completion: Completion) -> Attributes:
    timings = completion.timings
    return {
        "gen_ai.response.finish_reasons": [
            choice.finish_reason.value for choice in completion.choices
        ],
        "gen_ai.usage.output_tokens": completion.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": completion.cached_tokens,
        "gen_ai.latency.time_in_queue": timings.queue_seconds,
        "gen_ai.latency.time_in_model_prefill": timings.prefill_seconds,
        "gen_ai.latency.time_in_model_decode": timings.decode_seconds,
    }
