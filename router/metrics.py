"""What the router counts, and how long its clients wait."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120)
_BETWEEN_TOKENS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_WHOLE_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600)


class RouterMetrics:
    """The router's metrics, in a registry of their own; every one has the label `model`."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._ended = Counter(
            "kvrelay_requests",
            "Requests that ended, by finish reason or cause of refusal or failure",
            ["model", "outcome"],
            registry=self.registry,
        )
        self._live = Gauge(
            "kvrelay_requests_live",
            "Requests that are live on this router, by state",
            ["model", "state"],
            registry=self.registry,
        )
        self._prompt_tokens = self._counter("kvrelay_prompt_tokens", "Prompt tokens admitted")
        self._output_tokens = self._counter("kvrelay_output_tokens", "Output tokens streamed")
        self._stale = self._counter(
            "kvrelay_stale_outputs", "Worker outputs dropped: of no live attempt"
        )
        self._resubmitted = Counter(
            "kvrelay_resubmissions",
            "Attempts after a request's first, by why the one before ended",
            ["model", "reason"],
            registry=self.registry,
        )
        self._strict = Counter(
            "kvrelay_strict_failures",
            "Requests that failed instead of being computed again, by why",
            ["model", "reason"],
            registry=self.registry,
        )
        self._contradicted = self._counter(
            "kvrelay_contradicted_tokens",
            "Tokens of a later attempt that differ from those already streamed, which stay",
        )
        self._ttft = self._histogram(
            "kvrelay_ttft_seconds", "From arrival to the first token", _FIRST_TOKEN_BUCKETS
        )
        self._itl = self._histogram(
            "kvrelay_itl_seconds", "Between two deltas of a choice", _BETWEEN_TOKENS_BUCKETS
        )
        self._e2e = self._histogram(
            "kvrelay_e2e_seconds", "From arrival to the end, whatever it was", _WHOLE_BUCKETS
        )

    def watch_live(self, state: str, count: Callable[[], int]) -> None:
        """Asks `count` at every scrape, on the scraper's thread."""
        self._live.labels(self._model, state).set_function(count)

    def refused(self, outcome: str) -> None:
        """A request was not admitted."""
        self._ended.labels(self._model, outcome).inc()

    def stale_output(self) -> None:
        """A worker's output was of no live attempt."""
        self._stale.inc()

    def resubmitted(self, reason: str) -> None:
        """There is to be another attempt, because the one before was `reason`."""
        self._resubmitted.labels(self._model, reason).inc()

    def failed_strictly(self, reason: str) -> None:
        """There is to be no other attempt, though there could be."""
        self._strict.labels(self._model, reason).inc()

    def stopwatch(self) -> Stopwatch:
        """For a request that has just arrived."""
        return Stopwatch(self)

    def _counter(self, name: str, documentation: str) -> Counter:
        return Counter(name, documentation, ["model"], registry=self.registry).labels(self._model)

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            name, documentation, ["model"], buckets=buckets, registry=self.registry
        )
        return histogram.labels(self._model)

    def _admitted(self, prompt_tokens: int) -> None:
        self._prompt_tokens.inc(prompt_tokens)

    def _first_delta(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def _later_delta(self, seconds: float) -> None:
        self._itl.observe(seconds)

    def _streamed(self, tokens: int) -> None:
        self._output_tokens.inc(tokens)

    def _end(self, seconds: float, outcome: str) -> None:
        self._e2e.observe(seconds)
        self._ended.labels(self._model, outcome).inc()


class Stopwatch:
    """Times one request from its arrival and reports to the router's metrics."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._arrived = time.monotonic()
        self._last_delta: dict[int, float] = {}  # by choice

    @property
    def seconds(self) -> float:
        """Since the request arrived."""
        return time.monotonic() - self._arrived

    def admitted(self, prompt_tokens: int) -> None:
        """It has been placed."""
        self._metrics._admitted(prompt_tokens)

    def delta(self, choice: int, tokens: int) -> None:
        """Some tokens of this choice came; the first of any choice is the request's first."""
        now = time.monotonic()
        if not self._last_delta:
            self._metrics._first_delta(now - self._arrived)
        elif choice in self._last_delta:
            self._metrics._later_delta(now - self._last_delta[choice])
        self._last_delta[choice] = now
        self._metrics._streamed(tokens)

    def contradicted(self, tokens: int) -> None:
        """So many came otherwise than they had been streamed."""
        self._metrics._contradicted.inc(tokens)

    def ended(self, outcome: str) -> None:
        """It is over."""
        self._metrics._end(self.seconds, outcome)
