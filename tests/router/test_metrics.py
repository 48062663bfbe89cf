"""What `METRICS` lists is what a router exports."""

from __future__ import annotations

from kvrelay.observe.metric_declarations import MetricType
from kvrelay.router.metrics import METRICS, RouterMetrics


def test_every_listed_metric_is_exported_under_its_name() -> None:
    listed = {(metric.name.removesuffix("_total"), metric.type.value) for metric in METRICS}
    families = RouterMetrics("m").registry.collect()
    assert {(family.name, family.type) for family in families} == listed


def test_every_metric_has_a_help_and_the_model_label() -> None:
    for metric in METRICS:
        assert metric.help[0].isupper(), metric.name
        assert metric.labels[0] == "model"
        assert bool(metric.buckets) == (metric.type is MetricType.HISTOGRAM)
