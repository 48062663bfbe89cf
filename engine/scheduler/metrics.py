"""A worker's metrics: all are declared here, each in one place.

To add one, declare it below and call `WorkerMetrics.count` or `observe` with it. A
metric whose value is read from the published state gets a line in `WorkerMetrics._values`.
`METRICS` lists them all; docs/metrics.md is generated from it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.executor.step import StepEnded
from kvrelay.engine.scheduler.commands import Dropped
from kvrelay.kv_transfer.pull import Pull, PullState
from kvrelay.mem_cache.counts import CacheCounts, QuarantineCounts, TierCounts
from kvrelay.mem_cache.fence import FenceKind
from kvrelay.observe.metric_declarations import Instruments, Metric, MetricTable, MetricType
from kvrelay.wire.load import PAGE_STATES, WorkerLoad

_GRAMMAR_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_SECONDS_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)

METRICS: Final = MetricTable("role", "worker", "model")
"""Every metric that a worker exports, with its role, its name and the served model's name."""

# Steps and requests

COMPUTED_TOKENS: Final = METRICS.counter(
    "kvrelay_computed_tokens_total", "Tokens that forwards computed"
)
WIDENED_TOKENS: Final = METRICS.counter(
    "kvrelay_widened_prompt_tokens_total",
    "Prompt tokens that forwards computed on the cores of idle workers, too (--prompt-threads)",
)
WIDENED_ROWS: Final = METRICS.counter(
    "kvrelay_widened_rows_total",
    "Rows that generated in forwards on the cores of idle workers, too: a request in each of them",
)
STEP_SECONDS: Final = METRICS.histogram(
    "kvrelay_step_seconds", "Seconds of one forward", _SECONDS_BUCKETS
)
PRODUCTS: Final = METRICS.collected(
    MetricType.GAUGE,
    "kvrelay_cpu_products_info",
    "1 for the way that products with weights of this shape (outputs x inputs) take on a CPU in "
    "bfloat16: own or onednn (--cpu-kernels)",
    "weights",
    "way",
)
EXPECTED_PROMPT_SECONDS: Final = METRICS.collected(
    MetricType.GAUGE,
    "kvrelay_expected_prompt_seconds",
    "Seconds that a prompt of so many tokens takes alone, as far as steps have shown; 0: unknown",
    "tokens",
)
EXPECTED_STEP_SECONDS: Final = METRICS.collected(
    MetricType.GAUGE,
    "kvrelay_expected_step_seconds",
    "Seconds of a step in which so many sequences generate, behind 1024 tokens each, as far as "
    "steps have shown; 0: unknown",
    "rows",
)
FAILED_STEPS: Final = METRICS.counter("kvrelay_failed_steps_total", "Forwards that failed")
DRAFT_TOKENS: Final = METRICS.counter(
    "kvrelay_draft_tokens_total", "Drafted tokens that forwards verified"
)
ACCEPTED_DRAFT_TOKENS: Final = METRICS.counter(
    "kvrelay_accepted_draft_tokens_total", "Drafted tokens that were what the model sampled"
)
GRAMMAR_SECONDS: Final = METRICS.histogram(
    "kvrelay_grammar_compile_seconds",
    "Seconds that it took to compile a grammar of a structured output; of the first one, with the "
    "tokens of the vocabulary",
    _GRAMMAR_BUCKETS,
)
GRAMMAR_HITS: Final = METRICS.counter(
    "kvrelay_grammar_cache_hits_total",
    "Times that the grammar of a structured output was needed and there already",
)
SPANS: Final = METRICS.counter(
    "kvrelay_spans_total",
    "Spans of traced requests by what became of them: exported, or dropped because too many waited "
    "(full), the collector refused them (refused), or it was away when the process ended (unsent)",
    "fate",
)
RETRACTIONS: Final = METRICS.counter(
    "kvrelay_retractions_total", "Running requests that were retracted to make room for others"
)
REQUESTS: Final = METRICS.collected(
    MetricType.GAUGE, "kvrelay_requests", "Requests on this worker", "state"
)
WAITING_TOKENS: Final = METRICS.collected(
    MetricType.GAUGE, "kvrelay_waiting_tokens", "Prompt tokens not yet computed or read"
)

# Memory

RELEASES: Final = METRICS.counter(
    "kvrelay_releases_total", "Requests whose memory was released, by outcome", "outcome"
)
SESSION_TURNS: Final = METRICS.counter(
    "kvrelay_session_turns_total",
    "Turns of sessions that were given memory, by whether their session's KV was here (resumed) or "
    "not (opened)",
    "start",
)
HISTORY_READS: Final = METRICS.counter(
    "kvrelay_history_reads_total",
    "Beginnings of prompts that decode workers have lent to this prefill worker, by outcome: read "
    "and found right (valid), computed because it has them, or is expected to compute them sooner "
    "(not_needed), or failed",
    "outcome",
)
SESSION_ENDS: Final = METRICS.counter(
    "kvrelay_session_ends_total",
    "Sessions whose KV was given up, by why: the router said so (forgotten), others needed the "
    "memory (room), the next turn could not go on with it (unusable), a forward failed (failed), "
    "a window had moved on when a turn was undone (roll_back), it was too long (too_long), or "
    "another router goes on with it (adopted)",
    "reason",
)
SESSION_HISTORY_TOKENS: Final = METRICS.collected(
    MetricType.GAUGE,
    "kvrelay_session_history_tokens",
    "Tokens that the histories kept for other routers take, 64 for each of them included",
)
PAGES: Final = METRICS.collected(
    MetricType.GAUGE,
    "kvrelay_pages",
    "Pages (or rows) by state; the states sum to the pool",
    "pool",
    "state",
)
POOL_PAGES: Final = METRICS.collected(
    MetricType.GAUGE,
    "kvrelay_pool_pages",
    "Pages (or rows) of the pool, as it was made; what the states of kvrelay_pages sum to",
    "pool",
)
PROMISED_PAGES: Final = METRICS.collected(
    MetricType.GAUGE,
    "kvrelay_promised_pages",
    "Free or evictable pages that running requests may grow into, so nobody else gets them",
    "pool",
)
QUARANTINE_AGE: Final = METRICS.collected(
    MetricType.GAUGE,
    "kvrelay_quarantine_age_seconds",
    "Seconds that the oldest quarantined memory has been in quarantine",
)
QUARANTINED_PAGES: Final = METRICS.collected(
    MetricType.GAUGE,
    "kvrelay_quarantined_pages",
    "Pages of all pools in quarantine, by what they wait for: a forward, a read that runs, or one "
    "that has failed",
    "reason",
)
QUARANTINED_SECONDS: Final = METRICS.collected(
    MetricType.GAUGE,
    "kvrelay_quarantined_seconds",
    "Seconds that the oldest memory has waited in quarantine, by what it waits for",
    "reason",
)
QUARANTINE_DRAINS: Final = METRICS.counter(
    "kvrelay_quarantine_drains_total",
    "Times that this worker began to drain because memory was in quarantine for too long",
)
AUDIT_FAILURES: Final = METRICS.counter(
    "kvrelay_audit_failures_total", "Times that the audit found memory lost or owned twice"
)
PREFIX_LOOKUPS: Final = METRICS.collected(
    MetricType.COUNTER, "kvrelay_prefix_lookups_total", "Prompts looked up in the prefix index"
)
PREFIX_HITS: Final = METRICS.collected(
    MetricType.COUNTER,
    "kvrelay_prefix_hits_total",
    "Prompts of which the prefix index had one page or more",
)
PREFIX_HIT_TOKENS: Final = METRICS.collected(
    MetricType.COUNTER,
    "kvrelay_prefix_hit_tokens_total",
    "Prompt tokens found in the prefix index",
)
PREFIX_EVICTED_PAGES: Final = METRICS.collected(
    MetricType.COUNTER,
    "kvrelay_prefix_evicted_pages_total",
    "Pages that the prefix index evicted to make room",
)
PREFIX_DUPLICATE_PAGES: Final = METRICS.collected(
    MetricType.COUNTER,
    "kvrelay_prefix_duplicate_pages_total",
    "Pages freed because the prefix index had the same tokens already",
)

TIER_PAGES: Final = METRICS.collected(
    MetricType.COUNTER,
    "kvrelay_tier_pages_total",
    "Pages of a tier below the device by what became of them: copied there (written), not kept "
    "there for want of room or because the device used them again first (dropped), brought back "
    "(loaded), offered to decode workers, which read them from there if they lack them (lent), "
    "evicted there (evicted), forgotten after a failed forward (forgotten), or found truncated, "
    "foreign or corrupt and removed (broken)",
    "tier",
    "event",
)
TIER_BYTES: Final = METRICS.collected(
    MetricType.COUNTER,
    "kvrelay_tier_bytes_total",
    "KV bytes copied to a tier below the device (write) and back (load)",
    "tier",
    "direction",
)
TIER_SECONDS: Final = METRICS.collected(
    MetricType.COUNTER,
    "kvrelay_tier_copy_seconds_total",
    "Seconds of copies to a tier below the device (write) and back (load), without their wait",
    "tier",
    "direction",
)
TIER_REFUSALS: Final = METRICS.collected(
    MetricType.COUNTER,
    "kvrelay_tier_refusals_total",
    "Times that a prefix of a lower tier was computed all the same: to bring it back was expected "
    "to take longer (slow), or did take longer (late)",
    "tier",
    "reason",
)
PINNED_BYTES: Final = METRICS.collected(
    MetricType.GAUGE,
    "kvrelay_pinned_host_bytes",
    "Bytes of --host-kv-memory that are pinned in main memory, for a GPU to copy; 0 on a CPU",
)
STORAGE_OFF: Final = METRICS.collected(
    MetricType.GAUGE,
    "kvrelay_storage_writing_off",
    "1 while nothing is written to --kv-storage because the disk is full or fails; it is tried "
    "again each minute",
)
PREFIX_WAITS: Final = METRICS.counter(
    "kvrelay_prefix_waits_total",
    "Requests that waited for a prefix that another request computed, or read, at that time",
)

# Transfers and the hand-over

TRANSFERS: Final = METRICS.counter(
    "kvrelay_transfers_total", "Reads of KV from peers, by result", "result"
)
TRANSFER_BYTES: Final = METRICS.counter("kvrelay_transfer_bytes_total", "KV bytes read from peers")
TRANSFER_PAGES: Final = METRICS.counter("kvrelay_transfer_pages_total", "KV pages read from peers")
TRANSFER_HOST_PAGES: Final = METRICS.counter(
    "kvrelay_transfer_host_pages_total",
    "Those of the KV pages read from peers that were read from their host tiers",
)
TRANSFER_SECONDS: Final = METRICS.histogram(
    "kvrelay_transfer_seconds", "Seconds of one read of KV pages", _SECONDS_BUCKETS
)
TRANSFER_RATE: Final = METRICS.collected(
    MetricType.GAUGE,
    "kvrelay_transfer_bytes_per_second",
    "Bytes a second that the latest probe moved from a peer (read), from its host tier (host; 0 if "
    "it has none, or it cannot be read) and to it (write)",
    "peer",
    "backend",
    "transports",
    "direction",
)
TRANSFER_REFUSALS: Final = METRICS.counter(
    "kvrelay_transfer_refusals_total",
    "Peers that are not read from because the transport is too slow or fails",
)
REFUSED_PEERS: Final = METRICS.collected(
    MetricType.GAUGE,
    "kvrelay_refused_peers",
    "Prefill workers that this worker does not read from at present",
)
VERIFIED_PAGES: Final = METRICS.counter(
    "kvrelay_verified_pages_total", "Pages read from peers whose bytes were compared"
)
PAGE_MISMATCHES: Final = METRICS.counter(
    "kvrelay_page_mismatches_total", "Pages read from peers that differ from what was computed"
)
DROPPED_MESSAGES: Final = METRICS.counter(
    "kvrelay_dropped_messages_total",
    "Late, duplicate and misdirected messages that were dropped",
    "kind",
)

_EXPECTED_PROMPTS = (256, 1024, 8192)
_EXPECTED_ROWS = (1, 8, 32)
_Quarantine = Mapping[FenceKind, QuarantineCounts]


class WorkerMetrics(Instruments, Collector):
    """The values of `METRICS` on one worker.

    The engine thread publishes load and memory after a pass, a few times a second if the worker is
    busy. It publishes them as one immutable value, so every scrape sees page states that sum to the
    pool.
    """

    def __init__(self, config: WorkerConfig) -> None:
        common = {
            "role": config.role.value,
            "worker": config.name,
            "model": config.model_name,
        }
        super().__init__(METRICS, common)
        self._common_values = tuple(common.values())
        self._published: tuple[WorkerLoad, float | None, CacheCounts, _Quarantine] = (
            WorkerLoad(0, 0, 0, ()),
            None,
            CacheCounts(),
            {},
        )
        self._tiers: Mapping[str, TierCounts] = {}
        self.history_tokens = 0
        """Tokens that the histories of sessions take."""
        self.pinned_bytes = 0
        """Pinned bytes of the host tier."""
        self.product_ways: Mapping[str, str] = {}
        """The way of products with each shape of weights, on a CPU."""
        for kind in Dropped:
            self.show(DROPPED_MESSAGES, kind=kind.value)
        self.registry.register(self)

    def publish(
        self,
        load: WorkerLoad,
        quarantined_since: float | None,
        cache: CacheCounts,
        quarantine: _Quarantine,
        tiers: Mapping[str, TierCounts] = {},
    ) -> None:
        """Set the state after a pass; on the engine thread. Times are `time.monotonic`'s."""
        self._published = (load, quarantined_since, cache.copy(), quarantine)
        self._tiers = tiers

    @property
    def quarantine_age(self) -> float:
        """Seconds that the oldest memory in quarantine has been there; any thread."""
        since = self._published[1]
        return 0.0 if since is None else time.monotonic() - since

    def count_step(self, ended: StepEnded[object]) -> None:
        """Count a forward that has ended well."""
        self.count(COMPUTED_TOKENS, ended.num_tokens)
        self.observe(STEP_SECONDS, ended.seconds)
        if ended.widening > 1:
            self.count(WIDENED_TOKENS, ended.work.prompt_tokens)
            self.count(WIDENED_ROWS, ended.work.rows)
        drafted = sum([output.num_drafts for output in ended.outputs])
        if drafted:
            self.count(DRAFT_TOKENS, drafted)
            self.count(
                ACCEPTED_DRAFT_TOKENS, sum([output.num_accepted for output in ended.outputs])
            )

    def count_pull(self, pull: Pull) -> None:
        """Count a read that has ended, well or not."""
        self.count(TRANSFERS, result=pull.state.name.lower())
        if pull.state is PullState.DONE:
            self.count(TRANSFER_BYTES, pull.nbytes)
            self.count(TRANSFER_PAGES, pull.num_pages)
            if pull.from_host:
                self.count(TRANSFER_HOST_PAGES, pull.num_pages)
            self.observe(TRANSFER_SECONDS, pull.seconds)

    def count_dropped(self, kind: Dropped) -> None:
        """Count a message that was dropped."""
        self.count(DROPPED_MESSAGES, kind=kind.value)

    def collect(self) -> Iterator[MetricFamily]:
        """Yield the metrics whose values are read from the published state; any thread."""
        families: dict[Metric, GaugeMetricFamily | CounterMetricFamily] = {}
        for metric in METRICS:
            if metric.collected:
                counter = metric.type is MetricType.COUNTER
                family = CounterMetricFamily if counter else GaugeMetricFamily
                families[metric] = family(metric.name, metric.help, labels=metric.labels)
        for metric, value, *labels in self._values():
            families[metric].add_metric([*self._common_values, *labels], value)
        yield from families.values()

    def _values(self) -> Iterator[tuple[Metric, float, *tuple[str, ...]]]:
        """Yield the value and the own labels of each metric that is collected."""
        load, _, cache, quarantine = self._published
        for counts in load.pools:
            for state in PAGE_STATES:
                yield PAGES, getattr(counts, state), counts.pool, state
            yield POOL_PAGES, counts.total, counts.pool
            yield PROMISED_PAGES, counts.promised, counts.pool
        yield REQUESTS, load.waiting_requests, "waiting"
        yield REQUESTS, load.running_requests, "running"
        yield WAITING_TOKENS, load.waiting_tokens
        for tokens in _EXPECTED_PROMPTS:
            yield EXPECTED_PROMPT_SECONDS, load.speeds.prompt_seconds(tokens), str(tokens)
        for rows in _EXPECTED_ROWS:
            yield EXPECTED_STEP_SECONDS, load.speeds.step_seconds(rows, 1024), str(rows)
        yield SESSION_HISTORY_TOKENS, self.history_tokens
        yield QUARANTINE_AGE, self.quarantine_age
        yield REFUSED_PEERS, len(load.refused_peers)
        now = time.monotonic()
        for kind in FenceKind:
            found = quarantine.get(kind)
            yield QUARANTINED_PAGES, found.pages if found else 0, kind.value
            yield QUARANTINED_SECONDS, now - found.since if found else 0.0, kind.value
        for peer in load.peers:
            labels = peer.incarnation, peer.backend, peer.transports
            yield TRANSFER_RATE, peer.read_bytes_per_second, *labels, "read"
            yield TRANSFER_RATE, peer.host_bytes_per_second, *labels, "host"
            yield TRANSFER_RATE, peer.write_bytes_per_second, *labels, "write"
        yield PREFIX_LOOKUPS, cache.lookups
        yield PREFIX_HITS, cache.hits
        yield PREFIX_HIT_TOKENS, cache.hit_tokens
        yield PREFIX_EVICTED_PAGES, cache.evicted_pages
        yield PREFIX_DUPLICATE_PAGES, cache.duplicate_pages
        for name, tier in self._tiers.items():
            yield from _tier_values(name, tier)
        yield PINNED_BYTES, self.pinned_bytes
        for weights, way in self.product_ways.items():
            yield PRODUCTS, 1, weights, way
        yield STORAGE_OFF, bool(load.storage_error)


def _tier_values(name: str, tier: TierCounts) -> Iterator[tuple[Metric, float, *tuple[str, ...]]]:
    yield TIER_PAGES, tier.written_pages, name, "written"
    yield TIER_PAGES, tier.dropped_pages, name, "dropped"
    yield TIER_PAGES, tier.loaded_pages, name, "loaded"
    yield TIER_PAGES, tier.lent_pages, name, "lent"
    yield TIER_PAGES, tier.evicted_pages, name, "evicted"
    yield TIER_PAGES, tier.forgotten_pages, name, "forgotten"
    yield TIER_PAGES, tier.broken_pages, name, "broken"
    yield TIER_BYTES, tier.write_bytes, name, "write"
    yield TIER_BYTES, tier.load_bytes, name, "load"
    yield TIER_SECONDS, tier.write_seconds, name, "write"
    yield TIER_SECONDS, tier.load_seconds, name, "load"
    yield TIER_REFUSALS, tier.slow_loads, name, "slow"
    yield TIER_REFUSALS, tier.late_loads, name, "late"
