"""A picture of one or more runs: latency distributions, and throughput side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvrelay.deploy.load_generator.load_client import RequestRecord
from kvrelay.deploy.load_generator.load_report import LoadReport, itl, ttft

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Samples = Callable[[RequestRecord], Sequence[float]]

_PANELS: tuple[tuple[str, Samples], ...] = (
    ("time to first token", lambda record: [ttft(record)]),
    ("inter-token latency", itl),
    ("end to end", lambda record: [record.ended - record.sent]),
)


class PlotError(RuntimeError):
    """The plot cannot be drawn."""


def require_matplotlib() -> Any:
    """Return matplotlib's `Figure`, drawn without a display. Raises `PlotError` without it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError("--plot needs matplotlib: pip install 'kvrelay[bench]'") from error
    return Figure


def save_plot(path: Path, runs: Sequence[tuple[LoadReport, Sequence[RequestRecord]]]) -> None:
    """Draw the runs to ``path``; its suffix chooses the format."""
    figure = require_matplotlib()(figsize=(12, 8), layout="constrained")
    axes = figure.subplots(2, 2).ravel()
    for axis, (title, samples) in zip(axes, _PANELS, strict=False):
        _draw_distributions(axis, title, samples, runs)
    if axes[0].lines:
        axes[0].legend(fontsize="small")
    _draw_throughput(axes[3], [report for report, _ in runs])
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise PlotError(f"{path}: {error}") from error


def _draw_distributions(
    axis: Axes,
    title: str,
    samples: Samples,
    runs: Sequence[tuple[LoadReport, Sequence[RequestRecord]]],
) -> None:
    """Draw the share of samples at or below each latency, one step line a run."""
    for report, records in runs:
        values = [1000 * s for record in records if record.completed for s in samples(record)]
        if values:
            share = np.arange(1, len(values) + 1) / len(values)
            axis.step(np.sort(values), share, where="post", label=_label(report))
    axis.set(title=title, xlabel="milliseconds", ylabel="share", xscale="log", ylim=(0, 1))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter(plain_minor_ticks())
    axis.grid(alpha=0.3)


def plain_minor_ticks() -> Any:
    """Return a formatter that labels minor ticks as 20, not 2×10¹, where there is room for them."""
    from matplotlib.ticker import LogFormatter

    return LogFormatter(labelOnlyBase=False)


def _draw_throughput(axis: Axes, reports: Sequence[LoadReport]) -> None:
    rows = range(len(reports))
    bars = axis.barh(rows, [report.output_tokens_per_s for report in reports])
    axis.set_yticks(rows, [_label(report) for report in reports])
    axis.bar_label(bars, fmt="%.0f", padding=3)
    axis.margins(x=0.15)
    axis.invert_yaxis()
    axis.set(title="throughput", xlabel="output tokens a second")


def _label(report: LoadReport) -> str:
    return f"{report.workload}, {report.load}"
