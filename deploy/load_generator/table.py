"""Markdown tables of reports, aligned so that they also read well in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.deploy.load_generator.load_report import PHASES, LoadReport, Stats

_STATS_HEADER = ("ms", "mean", "p50", "p90", "p95", "p99", "max")
_SWEEP_HEADER = (
    "in/out",
    "load",
    "requests",
    "failed",
    "output tok/s",
    "req/s",
    "TTFT p50",
    "TTFT p99",
    "ITL p50",
    "ITL p99",
    "TPOT mean",
    "E2E p50",
    "E2E p99",
)


def render(reports: Sequence[LoadReport]) -> str:
    """Return one run in full, or several at one line each."""
    return render_run(reports[0]) if len(reports) == 1 else render_sweep(reports)


def render_run(report: LoadReport) -> str:
    """Return every figure of one run."""
    rows = [
        _stats_row("TTFT", report.ttft_ms),
        _stats_row("ITL", report.itl_ms),
        _stats_row("TPOT", report.tpot_ms),
        _stats_row("end to end", report.e2e_ms),
        *(_stats_row(f"server: {phase}", report.phases_ms[phase]) for phase in PHASES),
    ]
    if report.send_lag_ms:
        rows.append(_stats_row("sent late by", report.send_lag_ms))
    return "\n".join((*_headlines(report), "", table(_STATS_HEADER, rows)))


def render_sweep(reports: Sequence[LoadReport]) -> str:
    """Return one line a run; latencies in milliseconds."""
    with_slo = any(report.slo for report in reports)
    header = (*_SWEEP_HEADER, "SLO met") if with_slo else _SWEEP_HEADER
    rows = [_sweep_row(report)[: len(header)] for report in reports]
    notes = [
        f"{report.workload}, {report.load}: {note}"
        for report in reports
        for note in notes_on(report)
    ]
    return "\n".join((table(header, rows), *notes))


def notes_on(report: LoadReport) -> list[str]:
    """Return notes that a reader needs to trust the run's figures; empty if there are none."""
    requests, notes = report.requests, []
    if requests.failures:
        kinds = ", ".join(f"{count} {status}" for status, count in requests.failures.items())
        notes.append(f"{requests.failed} failed ({kinds})")
    if requests.not_sent:
        notes.append(f"time ran out, {requests.not_sent} of {requests.planned} were not sent")
    if report.cached_tokens:
        notes.append(
            f"{report.cached_tokens} of {report.input_tokens} prompt tokens came from a cache"
        )
    return notes


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, the first column aligned left and the others right."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(_line(cells, widths) for cells in (header, rule, *rows))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cells[0].ljust(widths[0])]
    padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
    return f"| {' | '.join(padded)} |"


def _headlines(report: LoadReport) -> list[str]:
    requests = report.requests
    lines = [
        f"{report.workload}, {report.load}: {requests.completed} of {requests.planned} requests"
        f" completed in {report.duration_s:.1f} s",
        f"{report.output_tokens_per_s:.1f} output tok/s, {report.requests_per_s:.2f} req/s,"
        f" {_number(report.tokens_per_delta, 2)} tokens a delta;"
        f" the generator used {report.client_cpu_percent:.0f}% of a core",
    ]
    if report.slo:
        slo = report.slo
        lines.append(
            f"SLO (TTFT {_bound(slo.ttft_ms)}, mean ITL {_bound(slo.itl_ms)}):"
            f" {slo.share:.1%} of requests sent, goodput {slo.goodput_rps:.2f} req/s"
        )
    return [*lines, *notes_on(report)]


def _stats_row(name: str, stats: Stats | None) -> list[str]:
    values = (getattr(stats, column, None) for column in _STATS_HEADER[1:])
    return [name, *(_number(value) for value in values)]


def _sweep_row(report: LoadReport) -> list[str]:
    return [
        report.workload,
        report.load,
        str(report.requests.planned),
        str(report.requests.failed),
        _number(report.output_tokens_per_s),
        _number(report.requests_per_s, 2),
        *_columns(report.ttft_ms, "p50", "p99"),
        *_columns(report.itl_ms, "p50", "p99"),
        *_columns(report.tpot_ms, "mean"),
        *_columns(report.e2e_ms, "p50", "p99"),
        f"{report.slo.share:.1%}" if report.slo else "-",
    ]


def _columns(stats: Stats | None, *names: str) -> list[str]:
    return [_number(getattr(stats, name, None)) for name in names]


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _bound(milliseconds: float | None) -> str:
    return "unbounded" if milliseconds is None else f"{milliseconds:g} ms"
