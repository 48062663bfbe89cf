"""Latency: what clients wait for."""

from __future__ import annotations

from typing import Final

from docs.tools.dashboards.spec import (
    CLUSTER,
    OF_WORKERS,
    WORKER,
    Dashboard,
    Draws,
    Panel,
    Query,
    Row,
    by,
    heatmap,
    percentiles,
    rate,
)

LATENCY: Final = Dashboard(
    "kvrelay-latency",
    "kvrelay: latency",
    "What clients wait for, and where it goes",
    OF_WORKERS,
    (
        Row(
            "Time to first token",
            (
                heatmap("TTFT", "Arrival to first token", "kvrelay_ttft_seconds", CLUSTER),
                percentiles(
                    "TTFT, percentiles", "Arrival to first token", "kvrelay_ttft_seconds", CLUSTER
                ),
            ),
        ),
        Row(
            "Between tokens",
            (
                heatmap("ITL", "Between two deltas", "kvrelay_itl_seconds", CLUSTER),
                percentiles(
                    "ITL, percentiles", "Between two deltas", "kvrelay_itl_seconds", CLUSTER
                ),
            ),
        ),
        Row(
            "End to end",
            (
                heatmap("E2E", "Arrival to end", "kvrelay_e2e_seconds", CLUSTER),
                percentiles("E2E, percentiles", "Arrival to end", "kvrelay_e2e_seconds", CLUSTER),
            ),
        ),
        Row(
            "Where the time goes",
            (
                Panel(
                    "Phases of a request, mean",
                    "Seconds that a completed request spent in each phase at its workers",
                    tuple(
                        Query(
                            f"sum({rate('kvrelay_phase_seconds_sum', of_phase)}) / "
                            f"sum({rate('kvrelay_phase_seconds_count', of_phase)})",
                            phase,
                        )
                        for phase in ("queue", "prefill", "transfer", "decode")
                        for of_phase in [f'{CLUSTER},phase="{phase}"']
                    ),
                    "s",
                    Draws.AREAS,
                    width=12,
                ),
                Panel(
                    "Phases of a request, p95",
                    "The slow ones",
                    (
                        Query(
                            "histogram_quantile(0.95, "
                            + by("le, phase", rate("kvrelay_phase_seconds_bucket", CLUSTER))
                            + ")",
                            "{{phase}}",
                        ),
                    ),
                    "s",
                    width=12,
                ),
                Panel(
                    "A forward",
                    "Seconds of one forward, p50 and p99",
                    tuple(
                        Query(
                            f"histogram_quantile({share / 100:g}, "
                            + by("le, worker", rate("kvrelay_step_seconds_bucket", WORKER))
                            + ")",
                            f"{{{{worker}}}} p{share}",
                        )
                        for share in (50, 99)
                    ),
                    "s",
                    width=24,
                ),
            ),
        ),
    ),
)
