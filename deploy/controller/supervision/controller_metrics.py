"""The controller's metrics: all are declared here, each in one place.

A worker's own metrics end with it, before Prometheus has read them; so its end is counted here.
`METRICS` lists them all; docs/metrics.md is generated from it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from kvrelay.deploy.controller.records.ordered_changes import Roll
from kvrelay.deploy.nodes.worker_end import WorkerEnd
from kvrelay.observe.metric_declarations import Instruments, Metric, MetricTable, MetricType
from kvrelay.router.discovery import Discovery
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole

METRICS: Final = MetricTable("model")
"""Every metric that a controller exports; `model` is the served model's name."""

WANTED_WORKERS: Final = METRICS.collected(
    MetricType.GAUGE, "kvrelay_workers_wanted", "Workers that the cluster is to have", "role"
)
WORKERS: Final = METRICS.collected(
    MetricType.GAUGE,
    "kvrelay_workers",
    "Workers by state: ready, draining, or restarting, which are lost and have no successor yet",
    "role",
    "state",
)
WORKER_INFO: Final = METRICS.collected(
    MetricType.GAUGE,
    "kvrelay_worker_info",
    "1 for the incarnation of each worker that runs",
    "role",
    "worker",
    "incarnation",
    "address",
)
INCARNATIONS: Final = METRICS.counter(
    "kvrelay_worker_starts_total", "Incarnations of a worker that became ready", "role", "worker"
)
ENDS: Final = METRICS.counter(
    "kvrelay_worker_ends_total",
    "Incarnations of a worker whose process has ended, by cause: drained, conservation (its "
    "account of memory was wrong), engine_failed, silent (killed, because it "
    "did not answer), or lost",
    "role",
    "worker",
    "cause",
)
DRAINS: Final = METRICS.counter(
    "kvrelay_worker_drains_total", "Times that a worker began to drain", "role", "worker"
)
ROLLS: Final = METRICS.counter(
    "kvrelay_rolls_total",
    "Rolls that ended, by outcome: done, undone (the workers have the options before again), or "
    "stopped (a new worker did not start)",
    "outcome",
)
ROLL_STOPPED: Final = METRICS.collected(
    MetricType.GAUGE,
    "kvrelay_roll_stopped",
    "1 while a roll has stopped, until somebody lets it go on or undoes it",
)
ROLL_WORKERS: Final = METRICS.collected(
    MetricType.GAUGE,
    "kvrelay_roll_workers",
    "Workers of the roll that is under way or has stopped, by state: replaced, or left",
    "state",
)
ROLL_STEP_SECONDS: Final = METRICS.collected(
    MetricType.GAUGE,
    "kvrelay_roll_step_seconds",
    "Seconds since the roll that is under way has replaced a worker, or has begun, or this "
    "controller went on with it; 0 while none is under way",
)
_OUTCOMES: Final = ("done", "undone", "stopped")
"""The possible outcomes of a roll."""


class ControllerMetrics(Instruments, Collector):
    """The values of `METRICS` in one controller.

    Args:
        model: the served model's name.
        discovery: lists the workers; its lists are read by the scraper's thread.
        wanted: returns the roles of the workers that the cluster is to have; on any thread.
    """

    def __init__(
        self, model: str, discovery: Discovery, wanted: Callable[[], Iterable[WorkerRole]]
    ) -> None:
        super().__init__(METRICS, {"model": model})
        self._model = model
        self._discovery = discovery
        self._wanted = wanted
        self._running: set[str] = set()
        self._draining: set[str] = set()
        self._roll: tuple[Roll | None, float] = (None, 0.0)
        """The roll that is under way or has stopped, and the time of its last step."""
        for outcome in _OUTCOMES:
            self.show(ROLLS, outcome=outcome)
        self.registry.register(self)

    def started(self, info: WorkerInfo) -> None:
        """Count an incarnation that is ready; repeated calls count once."""
        if info.incarnation in self._running:
            return
        self._running.add(info.incarnation)
        self.count(INCARNATIONS, role=info.role.value, worker=info.name)
        self.show(DRAINS, role=info.role.value, worker=info.name)
        for cause in WorkerEnd:
            self.show(ENDS, role=info.role.value, worker=info.name, cause=cause.value)

    def draining(self, info: WorkerInfo) -> None:
        """Count an incarnation that begins to drain; repeated calls count once."""
        if info.incarnation in self._running - self._draining:
            self._draining.add(info.incarnation)
            self.count(DRAINS, role=info.role.value, worker=info.name)

    def ended(self, info: WorkerInfo, cause: WorkerEnd) -> None:
        """Count an incarnation whose process has ended."""
        self._running.discard(info.incarnation)
        self._draining.discard(info.incarnation)
        self.count(ENDS, role=info.role.value, worker=info.name, cause=cause.value)

    def rolling(self, roll: Roll | None) -> None:
        """Note the state of a roll that is under way or has stopped; None: there is none."""
        before, _ = self._roll
        if roll is not None and roll.failed and before is not None and not before.failed:
            self.count(ROLLS, outcome="stopped")
        self._roll = (roll, time.monotonic())

    def rolled(self, *, back: bool) -> None:
        """Count a roll that has replaced all workers.

        back: the new workers have the options from before the roll.
        """
        self.count(ROLLS, outcome="undone" if back else "done")
        self.rolling(None)

    def collect(self) -> Iterator[MetricFamily]:
        """Yield the metrics whose values are read from the lists; any thread may call this."""
        families: dict[Metric, GaugeMetricFamily] = {
            metric: GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
            for metric in METRICS
            if metric.collected
        }
        for metric, value, *labels in self._values():
            families[metric].add_metric([self._model, *labels], value)
        yield from families.values()

    def _values(self) -> Iterator[tuple[Metric, float, *tuple[str, ...]]]:
        """Yield value and own labels of each metric that is collected."""
        listed, awaited = self._discovery.endpoints(), self._discovery.awaited()
        wanted = Counter(self._wanted())
        for role in sorted(wanted | Counter(one.role for one in (*listed, *awaited))):
            mine = [one for one in listed if one.role is role]
            yield WANTED_WORKERS, wanted[role], role.value
            yield WORKERS, sum(not one.draining for one in mine), role.value, "ready"
            yield WORKERS, sum(one.draining for one in mine), role.value, "draining"
            lost = sum(one.role is role for one in awaited)
            yield WORKERS, lost, role.value, "restarting"
        for one in listed:
            yield WORKER_INFO, 1, one.role.value, one.name, one.incarnation, one.address
        yield from self._roll_values()

    def _roll_values(self) -> Iterator[tuple[Metric, float, *tuple[str, ...]]]:
        roll, since = self._roll
        left = 0 if roll is None else len(roll.left)
        yield ROLL_WORKERS, left, "left"
        yield ROLL_WORKERS, 0 if roll is None else roll.workers - left, "replaced"
        has_stopped = roll is not None and bool(roll.failed)
        yield ROLL_STOPPED, has_stopped
        is_under_way = roll is not None and not has_stopped
        yield ROLL_STEP_SECONDS, time.monotonic() - since if is_under_way else 0.0
