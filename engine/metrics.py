"""What Prometheus sees of a worker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvrelay.engine.commands import Dropped
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.outputs import Load
from kvrelay.engine.step import StepEnded
from kvrelay.kv_transfer.pull import Pull, PullState
from kvrelay.mem_cache.ledger import CacheCounts, PoolCounts
from kvrelay.mem_cache.release import Outcome

SECONDS_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_CACHE_COUNTERS = {
    "lookups": "Prompts looked up in the prefix index",
    "hits": "Prompts of which the prefix index had a page or more",
    "hit_tokens": "Prompt tokens found in the prefix index",
    "evicted_pages": "Pages that the prefix index let go of to make room",
    "duplicate_pages": "Pages given back because the prefix index had the same tokens already",
}
STATES = ("free", "held", "cached_evictable", "cached_protected", "session", "quarantined")


class WorkerMetrics(Collector):
    """A worker's registry: counters of its own, and the ledger's account.

    The engine thread publishes the account after every pass as one immutable
    value, so a scrape at any moment sees states that sum to the pool.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self.registry = CollectorRegistry()
        self._labels = {
            "role": config.role.value,
            "worker": config.name,
            "model": config.model_name,
        }
        self._published: tuple[Load, float | None, CacheCounts] = (
            Load(0, 0, 0, ()),
            None,
            CacheCounts(),
        )
        self._releases = self._counter("releases", "Releases of a request's memory", ["outcome"])
        self._computed_tokens = self._counter(
            "computed_tokens", "Tokens that forwards computed"
        ).labels(**self._labels)
        self._draft_tokens = self._counter(
            "draft_tokens", "Drafted tokens that forwards verified"
        ).labels(**self._labels)
        self._accepted_tokens = self._counter(
            "accepted_draft_tokens", "Drafted tokens that were what the model sampled"
        ).labels(**self._labels)
        self._retractions = self._counter(
            "retractions", "Running requests that made room for others"
        ).labels(**self._labels)
        self._audit_failures = self._counter(
            "audit_failures", "Times that the account of memory was found wrong"
        ).labels(**self._labels)  # so that it is there, at zero, for an alert
        self._quarantine_drains = self._counter(
            "quarantine_drains", "Times that memory was in quarantine for too long"
        ).labels(**self._labels)
        self._failed_steps = self._counter("failed_steps", "Forwards that failed")
        self._transfer_bytes = self._counter("transfer_bytes", "KV bytes read from peers")
        self._transfer_pages = self._counter("transfer_pages", "KV pages read from peers")
        self._transfers = self._counter("transfers", "Reads of KV from peers", ["result"])
        self._verified_pages = self._counter(
            "verified_pages", "Pages read from peers whose bytes were compared"
        ).labels(**self._labels)
        self._page_mismatches = self._counter(
            "page_mismatches", "Pages read from peers that are not as they were computed"
        ).labels(**self._labels)
        self._refusals = self._counter(
            "transfer_refusals", "Peers that are not read from: the transport is too slow"
        ).labels(**self._labels)
        self._dropped = self._counter(
            "dropped_messages", "Late, duplicate and misdirected messages", ["kind"]
        )
        for kind in Dropped:
            self._dropped.labels(**self._labels, kind=kind.value)
        self._step_seconds = self._histogram("step_seconds", "Seconds of one forward").labels(
            **self._labels
        )
        self._transfer_seconds = self._histogram(
            "transfer_seconds", "Seconds of one read of KV pages"
        )
        self.registry.register(self)

    def publish(self, load: Load, quarantined_since: float | None, cache: CacheCounts) -> None:
        """The state after a pass; engine thread. The time is `time.monotonic`'s."""
        self._published = (load, quarantined_since, replace(cache))

    def count_audit_failure(self) -> None:
        """Memory was lost, or is owned twice: the worker is about to end."""
        self._audit_failures.inc()

    @property
    def quarantine_age(self) -> float:
        """Seconds that the oldest memory in quarantine has been there; any thread."""
        since = self._published[1]
        return 0.0 if since is None else time.monotonic() - since

    def count_quarantine_drain(self) -> None:
        """Memory was in quarantine for too long: the worker is about to drain."""
        self._quarantine_drains.inc()

    def count_release(self, outcome: Outcome) -> None:
        """A request's memory was given back."""
        self._releases.labels(**self._labels, outcome=outcome.value).inc()

    def count_failed_step(self) -> None:
        """A forward has failed."""
        self._failed_steps.labels(**self._labels).inc()

    def count_retraction(self) -> None:
        """A running request has made room for others."""
        self._retractions.inc()

    def count_step(self, ended: StepEnded) -> None:
        """A forward has ended well."""
        self._computed_tokens.inc(ended.num_tokens)
        self._step_seconds.observe(ended.seconds)
        drafted = sum([result.num_drafts for result in ended.computed])
        if drafted:
            self._draft_tokens.inc(drafted)
            self._accepted_tokens.inc(sum([result.num_accepted for result in ended.computed]))

    def count_pull(self, pull: Pull) -> None:
        """A read has ended."""
        self._transfers.labels(**self._labels, result=pull.state.name.lower()).inc()
        if pull.state is PullState.DONE:
            self._transfer_bytes.labels(**self._labels).inc(pull.nbytes)
            self._transfer_pages.labels(**self._labels).inc(pull.num_pages)
            self._transfer_seconds.labels(**self._labels).observe(pull.seconds)

    def count_verified(self, pages: int) -> None:
        """So many pages were hashed, to be compared."""
        self._verified_pages.inc(pages)

    def count_mismatches(self, pages: int) -> None:
        """So many pages have other bytes here than where they were computed."""
        self._page_mismatches.inc(pages)

    def count_refusal(self) -> None:
        """A peer's transport is too slow."""
        self._refusals.inc()

    def count_dropped(self, kind: Dropped) -> None:
        """A message came too late, twice, or to the wrong worker; it did nothing."""
        self._dropped.labels(**self._labels, kind=kind.value).inc()

    def collect(self) -> Iterator[Metric]:
        """See `prometheus_client.registry.Collector`."""
        load, _, cache = self._published
        yield self._pools(load.pools)
        requests = self._gauge("requests", "Requests on this worker", ["state"])
        self._add(requests, load.waiting_requests, "waiting")
        self._add(requests, load.running_requests, "running")
        yield requests
        waiting = self._gauge("waiting_tokens", "Prompt tokens not yet computed or pulled")
        self._add(waiting, load.waiting_tokens)
        yield waiting
        age = self._gauge("quarantine_age_seconds", "Age of the oldest quarantined memory")
        self._add(age, self.quarantine_age)
        yield age
        attested = self._gauge(
            "transfer_attested_gbps",
            "What a probe moved from and to a peer in 1e9 bytes a second, when they met",
            ["peer", "backend", "transports", "direction"],
        )
        for peer in load.peers:
            labels = peer.peer, peer.backend, peer.transports
            self._add(attested, peer.read_gbps, *labels, "read")
            self._add(attested, peer.write_gbps, *labels, "write")
        yield attested
        for name, text in _CACHE_COUNTERS.items():
            counter = CounterMetricFamily(f"kvrelay_prefix_{name}", text, labels=[*self._labels])
            counter.add_metric([*self._labels.values()], getattr(cache, name))
            yield counter

    def _pools(self, pools: tuple[PoolCounts, ...]) -> Metric:
        family = self._gauge(
            "pages", "Pages (or rows) by state; they sum to the pool", ["pool", "state"]
        )
        for counts in pools:
            for state in STATES:
                self._add(family, getattr(counts, state), counts.pool, state)
        return family

    def _gauge(self, name: str, text: str, labels: list[str] | None = None) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"kvrelay_{name}", text, labels=[*self._labels, *(labels or [])])

    def _add(self, family: GaugeMetricFamily, value: float, *labels: str) -> None:
        family.add_metric([*self._labels.values(), *labels], value)

    def _counter(self, name: str, text: str, labels: list[str] | None = None) -> Counter:
        names = [*self._labels, *(labels or [])]
        return Counter(f"kvrelay_{name}", text, names, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(
            f"kvrelay_{name}",
            text,
            list(self._labels),
            registry=self.registry,
            buckets=SECONDS_BUCKETS,
        )
