"""vLLM's names beside ours: the same figures, by the router's own listener."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvrelay.router.metrics import LIVE_REQUESTS, METRICS, RESUBMISSIONS, RouterMetrics
from kvrelay.router.vllm_names import VllmNames
from kvrelay.wire.load import PoolCounts, WorkerLoad
from kvrelay.wire.output import PhaseTimings
from kvrelay.wire.worker_info import WorkerRole

POOL = PoolCounts("full", 16, 100, 20, 50, 10, 20, 0, 0, 5)
LABELS = {"model_name": "m"}
LOADS = [
    (WorkerRole.PREFILL, WorkerLoad(pools=(PoolCounts("full", 16, 9, 9, 0, 0, 0, 0, 0, 0),))),
    (WorkerRole.DECODE, WorkerLoad(pools=(POOL,))),
    (WorkerRole.DECODE, WorkerLoad()),  # it has not said yet
]


def exported(metrics: RouterMetrics) -> Iterator[tuple[str, dict[str, str], float]]:
    text = generate_latest(metrics.registry).decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def test_a_request_is_counted_under_both_names():
    metrics = RouterMetrics("m")
    metrics.watch(LIVE_REQUESTS, lambda: 3, state="waiting")
    metrics.watch(LIVE_REQUESTS, lambda: 2, state="streaming")
    metrics.registry.register(VllmNames("m", metrics, lambda: LOADS))
    stopwatch = metrics.stopwatch()
    stopwatch.admitted(40)
    for _ in range(3):
        stopwatch.delta(0, 2)
    stopwatch.completed(PhaseTimings(queue_seconds=1, prefill_seconds=2, decode_seconds=4), 16)
    metrics.count(RESUBMISSIONS, 3, reason="retracted")
    metrics.count(RESUBMISSIONS, 5, reason="failed")
    stopwatch.ended("stop")
    metrics.stopwatch().ended("deadline")
    seen = {(name, *sorted(labels.items())): value for name, labels, value in exported(metrics)}

    def value(name: str, **labels: str) -> float:
        return seen[(f"vllm:{name}", *sorted({**LABELS, **labels}.items()))]

    assert value("num_requests_waiting") == 3
    assert value("num_requests_running") == 2
    assert value("kv_cache_usage_perc") == 0.7  # what can be evicted can be had
    assert value("prompt_tokens_total") == value("prefix_cache_queries_total") == 40
    assert value("prefix_cache_hits_total") == 16
    assert value("generation_tokens_total") == 6
    assert value("time_to_first_token_seconds_count") == 1
    assert value("inter_token_latency_seconds_count") == 2
    assert value("e2e_request_latency_seconds_count") == 2
    assert value("e2e_request_latency_seconds_bucket", le="+Inf") == 2
    for phase, seconds in (("queue", 1), ("prefill", 2), ("decode", 4)):
        assert value(f"request_{phase}_time_seconds_sum") == seconds
    assert value("num_preemptions_total") == 3
    assert value("request_success_total", finished_reason="stop") == 1
    assert not any(("finished_reason", "deadline") in labels for _, *labels in seen)
    assert value("cache_config_info", block_size="16", num_gpu_blocks="100") == 1


def test_without_the_option_there_are_none():
    assert not any(name.startswith("vllm") for name, _, _ in exported(RouterMetrics("m")))
    assert not any(metric.name.startswith("vllm") for metric in METRICS)
