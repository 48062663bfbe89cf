"""The router's metrics: all are declared here, each in one place.

To add one, declare it below and call `RouterMetrics.count`, `observe` or `watch` with it.
`METRICS` lists them all; docs/metrics.md is generated from it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from kvrelay.observe.metric_declarations import Instruments, Metric, MetricTable
from kvrelay.wire.output import FailureReason, PhaseTimings

METRICS: Final = MetricTable("model")
"""Every metric that a router exports; `model` is the served model's name."""

REQUESTS: Final = METRICS.counter(
    "kvrelay_requests_total",
    "Requests that ended, by finish reason or by the cause of the refusal or failure",
    "outcome",
)
DOOR_REQUESTS: Final = METRICS.counter(
    "kvrelay_door_requests_total",
    "Requests by the door that they came in by, grpc or http, whatever became of them",
    "door",
)
HTTP_RESPONSES: Final = METRICS.counter(
    "kvrelay_http_responses_total",
    "Answers over HTTP by path and status; 499: the client left before, and for an error in "
    "mid-stream the status that it stands for",
    "path",
    "status",
)
LEFT_OUT: Final = METRICS.counter(
    "kvrelay_http_left_out_total",
    "Fields and tools without a meaning here that were left out of calls, by path and name: those "
    "that only a vendor serves, such as a web search",
    "path",
    "what",
)
HTTP_CONNECTIONS: Final = METRICS.gauge(
    "kvrelay_http_connections", "Connections to --http that are open"
)
TOKEN_REFUSALS: Final = METRICS.counter(
    "kvrelay_token_refusals_total",
    "Requests that were refused for a limit that their token has in --auth-token-file",
    "token",
    "limit",
)
LIVE_REQUESTS: Final = METRICS.gauge(
    "kvrelay_requests_live",
    "Requests that are live on this router: waiting for the first token, or streaming",
    "state",
)
REFUSED_WORKERS: Final = METRICS.gauge(
    "kvrelay_workers_refused",
    "Workers that get no requests because they have loaded another model than the served one",
)
PREFIX_ENTRIES: Final = METRICS.gauge(
    "kvrelay_prefix_entries",
    "Entries that the router remembers of the workers' cached prefixes, of "
    "--prefix-index-entries at most",
)
EXPECTED_HIT_TOKENS: Final = METRICS.counter(
    "kvrelay_expected_hit_tokens_total",
    "Tokens of prompts that were sent to a worker of this role which was expected to have them "
    "cached; compare with kvrelay_prompt_tokens_total",
    "role",
)
SESSIONS: Final = METRICS.gauge(
    "kvrelay_sessions", "Sessions that are open on this router, of --max-sessions at most"
)
SESSION_TURNS: Final = METRICS.counter(
    "kvrelay_router_session_turns_total",
    "Turns of sessions, by whether they are a part of the history (completed) or not (failed)",
    "outcome",
)
SESSION_ENDS: Final = METRICS.counter(
    "kvrelay_router_session_ends_total",
    "Sessions that ended, because they were closed or had no turn for their time (expired)",
    "reason",
)
ADOPTIONS: Final = METRICS.counter(
    "kvrelay_router_session_adoptions_total",
    "Sessions that were to be opened by the digest of their history, by whether it was found, is "
    "unknown, or a worker that may have it did not answer (unavailable)",
    "outcome",
)
WAITING_FOR_WORKERS: Final = METRICS.gauge(
    "kvrelay_requests_waiting_for_workers",
    "New requests that wait until a worker is replaced, because no other can take them",
)
WORKER_WAITS: Final = METRICS.counter(
    "kvrelay_worker_waits_total",
    "New requests that no worker could take while one was being replaced, by how that ended: "
    "served, expired (--worker-wait), given_up (none is being replaced any more), left (by its "
    "client), full (--max-waiting-for-workers)",
    "outcome",
)
GRAMMAR_SECONDS: Final = METRICS.histogram(
    "kvrelay_grammar_compile_seconds",
    "Seconds that it took to compile a grammar of a structured output, that it can be used or not",
    (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5),
)
GRAMMAR_HITS: Final = METRICS.counter(
    "kvrelay_grammar_cache_hits_total", "Structured outputs whose grammar was compiled already"
)
REFUSED_GRAMMARS: Final = METRICS.counter(
    "kvrelay_grammars_refused_total",
    "Requests that were refused because the grammar of their structured output cannot be used",
    "form",
)
PROMPT_TOKENS: Final = METRICS.counter(
    "kvrelay_prompt_tokens_total", "Prompt tokens of the requests that were admitted"
)
CACHED_TOKENS: Final = METRICS.counter(
    "kvrelay_cached_tokens_total",
    "Prompt tokens of completed requests whose KV a worker had already",
)
OUTPUT_TOKENS: Final = METRICS.counter(
    "kvrelay_output_tokens_total", "Output tokens that were streamed to clients", lone=True
)
SPANS: Final = METRICS.counter(
    "kvrelay_spans_total",
    "Spans of traced requests by what became of them: exported, or dropped because too many waited "
    "(full), the collector refused them (refused), or it was away when the process ended (unsent)",
    "fate",
)
SLOW_READERS: Final = METRICS.counter(
    "kvrelay_slow_readers_total",
    "Streams that the router ended because their client read too slowly",
)
STALE_OUTPUTS: Final = METRICS.counter(
    "kvrelay_stale_outputs_total",
    "Outputs of workers that were dropped because their attempt was over",
)
PLACEMENTS: Final = METRICS.counter(
    "kvrelay_placements_total",
    "Attempts by the role of the worker that computes the prompt, and by why it does: there was no "
    "choice, --placement disaggregated (mode), earlier attempts failed elsewhere (suspect), the "
    "decode worker was idle, the first token was expected there sooner, or no speeds are known yet",
    "computed_by",
    "reason",
)
RESUBMISSIONS: Final = METRICS.counter(
    "kvrelay_resubmissions_total",
    "Attempts after a request's first, by why the attempt before ended",
    "reason",
)
STRICT_FAILURES: Final = METRICS.counter(
    "kvrelay_strict_failures_total",
    "Requests that failed because --strict forbids to compute them again, by why",
    "reason",
)
CONTRADICTED_TOKENS: Final = METRICS.counter(
    "kvrelay_contradicted_tokens_total",
    "Tokens of a later attempt that differ from tokens already streamed; they were dropped",
)
TTFT_SECONDS: Final = METRICS.histogram(
    "kvrelay_ttft_seconds",
    "Seconds from a request's arrival to its first token",
    (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120),
)
ITL_SECONDS: Final = METRICS.histogram(
    "kvrelay_itl_seconds",
    "Seconds between two deltas of one choice",
    (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10),
    lone=True,
)
E2E_SECONDS: Final = METRICS.histogram(
    "kvrelay_e2e_seconds",
    "Seconds from a request's arrival to its end, whatever its outcome",
    (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600),
)
PHASE_SECONDS: Final = METRICS.histogram(
    "kvrelay_phase_seconds",
    "Seconds that a completed request spent in a phase at its workers: queue, prefill, transfer or "
    "decode; those of all its attempts together",
    (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300),
    "phase",
)


class RouterMetrics(Instruments):
    """The values of `METRICS` on one router."""

    def __init__(self, model: str) -> None:
        super().__init__(METRICS, {"model": model})
        self.output_tokens = self.lone_counter(OUTPUT_TOKENS)
        self.itl_seconds = self.lone_histogram(ITL_SECONDS)
        # From zero, so that Prometheus sees the first one come.
        for reason in (*FailureReason, "retracted"):
            self.show(RESUBMISSIONS, reason=str(reason))

    def total(self, metric: Metric) -> int:
        """The count of a counter, over all its labels; for any thread."""
        return sum(amount for _, amount in self._counted(metric))

    def by_outcome(self) -> dict[str, int]:
        """The requests that have ended, by `REQUESTS`' label; for any thread."""
        return {labels["outcome"]: amount for labels, amount in self._counted(REQUESTS)}

    def _counted(self, metric: Metric) -> Iterator[tuple[dict[str, str], int]]:
        # A counter has a second sample for each label, which tells when it began.
        for sample in self.samples(metric):
            if sample.name == metric.name:
                yield sample.labels, int(sample.value)

    def stopwatch(self) -> Stopwatch:
        """Start to time a request that has just arrived."""
        return Stopwatch(self)


class Stopwatch:
    """A timer of one request from its arrival, which reports to the router's metrics."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self.arrived = time.monotonic()
        """The moment of the request's arrival."""
        self._last_delta: dict[int, float] = {}  # by choice

    @property
    def seconds(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self.arrived

    def admitted(self, prompt_tokens: int) -> None:
        """Note that the request was admitted."""
        self._metrics.count(PROMPT_TOKENS, prompt_tokens)

    def delta(self, choice: int, tokens: int) -> None:
        """Note streamed tokens of this choice; the first of any choice is the request's first."""
        now, latest = time.monotonic(), self._last_delta.get(choice)
        if latest is not None:
            self._metrics.itl_seconds.observe(now - latest)
        elif not self._last_delta:
            self._metrics.observe(TTFT_SECONDS, now - self.arrived)
        self._last_delta[choice] = now
        self._metrics.output_tokens.add(tokens)

    def contradicted(self, tokens: int) -> None:
        """Note tokens that differed from those already streamed."""
        self._metrics.count(CONTRADICTED_TOKENS, tokens)

    def completed(self, timings: PhaseTimings, cached_tokens: int) -> None:
        """Note the request's completion, its seconds in each phase, and its cached tokens."""
        self._metrics.count(CACHED_TOKENS, cached_tokens)
        for phase in ("queue", "prefill", "transfer", "decode"):
            seconds: float = getattr(timings, f"{phase}_seconds")
            self._metrics.observe(PHASE_SECONDS, seconds, phase=phase)

    def ended(self, outcome: str) -> None:
        """Note that the request has its outcome."""
        self._metrics.observe(E2E_SECONDS, self.seconds)
        self._metrics.count(REQUESTS, outcome=outcome)
