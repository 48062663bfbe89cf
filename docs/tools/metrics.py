"""A process's metrics as Markdown, from the table that declares them."""

from __future__ import annotations

from kvrelay.deploy.controller.supervision.controller_metrics import METRICS as CONTROLLER_METRICS
from kvrelay.engine.scheduler.metrics import METRICS as WORKER_METRICS
from kvrelay.observe.metric_declarations import Metric, MetricTable
from kvrelay.router.metrics import METRICS as ROUTER_METRICS


def router_metrics() -> str:
    """What the router exports."""
    return _table(ROUTER_METRICS)


def worker_metrics() -> str:
    """What each worker exports."""
    return _table(WORKER_METRICS)


def controller_metrics() -> str:
    """What a controller exports, beside what its router does."""
    return _table(CONTROLLER_METRICS)


def _table(metrics: MetricTable) -> str:
    common = ", ".join(f"`{label}`" for label in metrics.common_labels)
    lines = [f"All have: {common}.", "", "| metric | type | further labels | what |"]
    lines.append("| --- | --- | --- | --- |")
    lines += [_row(metric, metrics) for metric in metrics]
    return "\n".join(lines)


def _row(metric: Metric, metrics: MetricTable) -> str:
    own = metric.labels[len(metrics.common_labels) :]
    labels = ", ".join(f"`{label}`" for label in own)
    return f"| `{metric.name}` | {metric.type} | {labels} | {metric.help} |"
