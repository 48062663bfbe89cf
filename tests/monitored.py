"""What the processes of a cluster export, for tests of what reads it."""

from __future__ import annotations

import re

from kvrelay.deploy.controller.supervision.controller_metrics import METRICS as CONTROLLER_METRICS
from kvrelay.engine.scheduler.metrics import METRICS as WORKER_METRICS
from kvrelay.observe.metric_declarations import MetricType
from kvrelay.router.metrics import METRICS as ROUTER_METRICS

_ALL = (*ROUTER_METRICS, *CONTROLLER_METRICS, *WORKER_METRICS)
HISTOGRAMS = {metric.name: metric.buckets for metric in _ALL if metric.buckets}
_LABELS = {
    metric.name + suffix: {"cluster", "instance", "job", *metric.labels, *own}
    for metric in _ALL
    for suffix, own in (
        [("_bucket", ("le",)), ("_sum", ()), ("_count", ())]
        if metric.type is MetricType.HISTOGRAM
        else [("", ())]
    )
}
_LABELS["up"] = {"cluster", "instance", "job"}


def check_exported(expr: str) -> None:
    """Fail unless each metric of a query is exported, and has the labels that it is chosen by."""
    for name, selector in re.findall(r"\b(kvrelay_\w+|up)\b(?:\{(.*?)\})?", expr):
        assert name in _LABELS, f"{name} in {expr}"
        chosen = set(re.findall(r"(\w+)(?:=~|!~|!=|=)", selector))
        assert chosen <= _LABELS[name], f"{name} has no {chosen - _LABELS[name]}: {expr}"
