"""The router's metrics under vLLM's names too, which gateways and autoscalers look for.

They describe the whole cluster as vLLM's describe one engine, because clients see the router as one
engine. `--metric-names vllm` adds them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from kvrelay.observe.metric_declarations import Metric
from kvrelay.router.metrics import (
    CACHED_TOKENS,
    E2E_SECONDS,
    ITL_SECONDS,
    LIVE_REQUESTS,
    OUTPUT_TOKENS,
    PHASE_SECONDS,
    PROMPT_TOKENS,
    REQUESTS,
    RESUBMISSIONS,
    TTFT_SECONDS,
    RouterMetrics,
)
from kvrelay.wire.load import PoolCounts, WorkerLoad
from kvrelay.wire.worker_info import WorkerRole

VLLM_NAMES: Final[dict[Metric, str]] = {
    TTFT_SECONDS: "vllm:time_to_first_token_seconds",
    ITL_SECONDS: "vllm:inter_token_latency_seconds",
    E2E_SECONDS: "vllm:e2e_request_latency_seconds",
    PROMPT_TOKENS: "vllm:prompt_tokens_total",
    OUTPUT_TOKENS: "vllm:generation_tokens_total",
}
"""The vLLM names of metrics with the same meaning."""
_PHASES: Final = {
    "queue": "vllm:request_queue_time_seconds",
    "prefill": "vllm:request_prefill_time_seconds",
    "decode": "vllm:request_decode_time_seconds",
}
"""The vLLM names of the time in a phase."""
_SUCCESS: Final = ("stop", "length", "abort")
"""The outcomes that vLLM counts as success."""


class VllmNames(Collector):
    """A collector of the vLLM metrics that the router knows, read at each scrape.

    Args:
        model: the served model's name.
        metrics: the router's.
        loads: returns the workers' loads and roles; for any thread.
    """

    def __init__(
        self,
        model: str,
        metrics: RouterMetrics,
        loads: Callable[[], Iterable[tuple[WorkerRole, WorkerLoad]]],
    ) -> None:
        self._model = model
        self._metrics = metrics
        self._loads = loads

    def collect(self) -> Iterator[MetricFamily]:
        """Yield every metric; for any thread."""
        for metric, name in VLLM_NAMES.items():
            yield self._renamed(metric, name)
        yield self._renamed(PROMPT_TOKENS, "vllm:prefix_cache_queries_total")
        yield self._renamed(CACHED_TOKENS, "vllm:prefix_cache_hits_total")
        for phase, name in _PHASES.items():
            yield self._renamed(PHASE_SECONDS, name, phase=phase)
        yield self._renamed(RESUBMISSIONS, "vllm:num_preemptions_total", reason="retracted")
        yield self._succeeded()
        states = {
            sample.labels["state"]: sample.value for sample in self._metrics.samples(LIVE_REQUESTS)
        }
        yield self._gauge(
            "vllm:num_requests_waiting",
            "Requests that wait for their first token",
            states.get("waiting", 0),
        )
        yield self._gauge(
            "vllm:num_requests_running", "Requests that stream", states.get("streaming", 0)
        )
        yield from self._memory()

    def _memory(self) -> Iterator[MetricFamily]:
        """The KV memory of the first pools of the workers that generate."""
        pools = [
            load.pools[0]
            for role, load in self._loads()
            if role is not WorkerRole.PREFILL and load.pools
        ]
        total = sum(pool.total for pool in pools)
        used = sum(_used(pool) for pool in pools)
        yield self._gauge(
            "vllm:kv_cache_usage_perc",
            "The share of the KV memory of workers that generate which new requests cannot have, "
            "from 0 to 1",
            used / total if total else 0.0,
        )
        labels = ("model_name", "block_size", "num_gpu_blocks")
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Tokens of a page, and pages of the workers that generate",
            labels=labels,
        )
        if pools:
            info.add_metric([self._model, str(pools[0].page_size), str(total)], 1)
        yield info

    def _succeeded(self) -> MetricFamily:
        name = "vllm:request_success_total"
        family = MetricFamily(name.removesuffix("_total"), REQUESTS.help, REQUESTS.type.value)
        family.samples = [
            Sample(name, self._labels(one, (), outcome="finished_reason"), one.value)
            for one in self._metrics.samples(REQUESTS)
            if one.name == REQUESTS.name and one.labels["outcome"] in _SUCCESS
        ]
        return family

    def _renamed(self, metric: Metric, name: str, **only: str) -> MetricFamily:
        """Return a metric by another name: the part with some labels, without these."""
        family = MetricFamily(name.removesuffix("_total"), metric.help, metric.type.value)
        family.samples = [
            Sample(one.name.replace(metric.name, name), self._labels(one, only), one.value)
            for one in self._metrics.samples(metric)
            if not one.name.endswith("_created") and only.items() <= one.labels.items()
        ]
        return family

    def _labels(self, sample: Sample, without: Container[str], **renamed: str) -> dict[str, str]:
        names = {"model": "model_name", **renamed}
        left = {label: value for label, value in sample.labels.items() if label not in without}
        return {names.get(label, label): value for label, value in left.items()}

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=("model_name",))
        family.add_metric([self._model], value)
        return family


def _used(pool: PoolCounts) -> int:
    return pool.total - pool.free - pool.cached_evictable
