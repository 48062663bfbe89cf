"""Declarations of a process's metrics, and Prometheus' instruments made from them."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString


class MetricType(StrEnum):
    """The behaviour of a metric's value."""

    COUNTER = "counter"
    """A value that only grows."""
    GAUGE = "gauge"
    """A value that goes up and down."""
    HISTOGRAM = "histogram"
    """Observations counted in buckets."""


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """A metric's declaration."""

    name: str
    """The name as Prometheus stores it: a counter's ends in `_total`."""
    type: MetricType
    help: str
    labels: tuple[str, ...]
    """All labels, the common ones of the table first."""
    buckets: tuple[float, ...] = ()
    """A histogram's upper bounds."""
    lone: bool = False
    """Whether one thread alone counts it, and often; it then has no labels of its own."""
    collected: bool = False
    """Whether a collector of the process yields its values; `Instruments` then leaves it out."""


class MetricTable:
    """All metrics that one kind of process exports. Iterates in the order of declaration.

    Args:
        common_labels: the labels that every metric of the table has.
    """

    def __init__(self, *common_labels: str) -> None:
        self.common_labels = common_labels
        self._metrics: list[Metric] = []

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._metrics)

    def counter(self, name: str, text: str, *labels: str, lone: bool = False) -> Metric:
        """Declare a counter; `name` ends in `_total`."""
        assert name.endswith("_total"), name
        return self._declare(name, MetricType.COUNTER, text, labels, lone=lone)

    def gauge(self, name: str, text: str, *labels: str) -> Metric:
        """Declare a gauge."""
        return self._declare(name, MetricType.GAUGE, text, labels)

    def histogram(
        self,
        name: str,
        text: str,
        buckets: tuple[float, ...],
        *labels: str,
        lone: bool = False,
    ) -> Metric:
        """Declare a histogram with these upper bounds; infinity is added."""
        return self._declare(name, MetricType.HISTOGRAM, text, labels, buckets, lone=lone)

    def collected(self, kind: MetricType, name: str, text: str, *labels: str) -> Metric:
        """Declare a metric whose values a collector of the process yields at each scrape."""
        return self._declare(name, kind, text, labels, collected=True)

    def _declare(
        self,
        name: str,
        kind: MetricType,
        text: str,
        labels: tuple[str, ...],
        buckets: tuple[float, ...] = (),
        *,
        lone: bool = False,
        collected: bool = False,
    ) -> Metric:
        assert not (lone and labels), name
        metric = Metric(name, kind, text, (*self.common_labels, *labels), buckets, lone, collected)
        self._metrics.append(metric)
        return metric


class LoneCounter(Collector):
    """A counter that one thread adds to often; any thread collects it.

    Prometheus' own counter takes a lock for each addition, and several times as long.

    Args:
        metric: has no labels but the common ones.
        common: the value of each common label.
    """

    def __init__(self, metric: Metric, common: Mapping[str, str]) -> None:
        self._metric = metric
        self._common = dict(common)
        self._began = time.time()
        self._total = 0

    def add(self, amount: int) -> None:
        """Add to the count."""
        self._total += amount

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the counter's value for a scrape."""
        metric = self._metric
        family = CounterMetricFamily(metric.name, metric.help, labels=list(self._common))
        family.add_metric(list(self._common.values()), self._total, self._began)
        yield family


class LoneHistogram(Collector):
    """A histogram that one thread observes often; see `LoneCounter`.

    It exports no `_created`, unlike `LoneCounter`: Prometheus' family of histograms takes none.

    Args:
        metric: has no labels but the common ones.
        common: the value of each common label.
    """

    def __init__(self, metric: Metric, common: Mapping[str, str]) -> None:
        self._metric = metric
        self._common = dict(common)
        self._bounds = metric.buckets
        self._counts = [0] * (len(metric.buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Add an observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the histogram's buckets for a scrape."""
        metric, bounds = self._metric, (*self._bounds, float("inf"))
        upto = list(map(floatToGoString, bounds))
        buckets = list(zip(upto, accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(metric.name, metric.help, labels=list(self._common))
        family.add_metric(list(self._common.values()), buckets, self._sum)
        yield family


class Instruments:
    """The values of a table's metrics in one process, in a registry of their own.

    A metric without labels of its own is exported from the start, at zero. A metric with labels is
    exported for the label values that were used, or given to `show`. Calls are safe from any
    thread.

    Args:
        table: the declarations.
        common: the value of each common label.
    """

    def __init__(self, table: MetricTable, common: Mapping[str, str]) -> None:
        assert set(common) == set(table.common_labels), common
        self.registry = CollectorRegistry()
        self._common = dict(common)
        self._families = {metric: self._family(metric) for metric in table if not metric.collected}
        self._children: dict[tuple[object, ...], Counter | Gauge | Histogram] = {}
        """The children by metric and labels, as Prometheus' look-up takes longer than counting."""
        for metric in self._families:
            if metric.labels == table.common_labels and not metric.lone:
                self._child(metric, {})

    def count(self, metric: Metric, amount: float = 1, **labels: str) -> None:
        """Add to a counter."""
        counter = self._child(metric, labels)
        assert isinstance(counter, Counter), metric.name
        counter.inc(amount)

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Add an observation to a histogram."""
        histogram = self._child(metric, labels)
        assert isinstance(histogram, Histogram), metric.name
        histogram.observe(value)

    def lone_counter(self, metric: Metric) -> LoneCounter:
        """The `LoneCounter` of a metric declared with `lone`; one thread alone adds to it."""
        counter = self._families[metric]
        assert isinstance(counter, LoneCounter), metric.name
        return counter

    def lone_histogram(self, metric: Metric) -> LoneHistogram:
        """The `LoneHistogram` of a metric declared with `lone`; one thread alone observes it."""
        histogram = self._families[metric]
        assert isinstance(histogram, LoneHistogram), metric.name
        return histogram

    def watch(self, metric: Metric, value: Callable[[], float], **labels: str) -> None:
        """Call `value` for a gauge at every scrape, on the scraper's thread."""
        gauge = self._child(metric, labels)
        assert isinstance(gauge, Gauge), metric.name
        gauge.set_function(value)

    def samples(self, metric: Metric) -> Iterator[Sample]:
        """The samples that a scrape would have of a metric now; for any thread."""
        for family in self._families[metric].collect():
            yield from family.samples

    def show(self, metric: Metric, **labels: str) -> None:
        """Export the metric with these label values from now on, even at zero."""
        self._child(metric, labels)

    def _child(self, metric: Metric, labels: dict[str, str]) -> Counter | Gauge | Histogram:
        child = self._children.get((metric, *labels.items()))
        if child is None:
            family = self._families[metric]
            assert isinstance(family, Counter | Gauge | Histogram), metric.name
            child = family.labels(**self._common, **labels)
            self._children[metric, *labels.items()] = child
        return child

    def _family(self, metric: Metric) -> Counter | Gauge | Histogram | LoneCounter | LoneHistogram:
        name, text, labels = metric.name, metric.help, metric.labels
        if metric.lone:
            kind = LoneCounter if metric.type is MetricType.COUNTER else LoneHistogram
            self.registry.register(lone := kind(metric, self._common))
            return lone
        if metric.type is MetricType.COUNTER:
            return Counter(name, text, labels, registry=self.registry)
        if metric.type is MetricType.GAUGE:
            return Gauge(name, text, labels, registry=self.registry)
        return Histogram(name, text, labels, registry=self.registry, buckets=metric.buckets)
