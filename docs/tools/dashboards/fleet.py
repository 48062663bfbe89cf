"""Fleet: the workers."""

from __future__ import annotations

from typing import Final

from docs.tools.dashboards.spec import (
    CLUSTER,
    OF_WORKERS,
    RATE,
    WORKER,
    Dashboard,
    Draws,
    Panel,
    Query,
    Row,
    by,
    rate,
)

FLEET: Final = Dashboard(
    "kvrelay-fleet",
    "kvrelay: fleet",
    "Workers, their incarnations, restarts and drains",
    OF_WORKERS,
    (
        Row(
            "Workers",
            (
                Panel(
                    "Workers by state",
                    "Against those that are wanted",
                    (
                        Query(
                            by("role, state", f'kvrelay_workers{{{CLUSTER},role=~"$role"}}'),
                            "{{role}} {{state}}",
                        ),
                        Query(
                            by("role", f'kvrelay_workers_wanted{{{CLUSTER},role=~"$role"}}'),
                            "{{role}} wanted",
                        ),
                    ),
                    width=12,
                ),
                Panel(
                    "Processes that answer",
                    "1: Prometheus reads its metrics",
                    (Query(f"up{{{CLUSTER}}}", "{{instance}}"),),
                    width=12,
                ),
                Panel(
                    "Incarnations",
                    "Those that run now",
                    (Query(f"kvrelay_worker_info{{{WORKER}}}"),),
                    draws=Draws.TABLE,
                    width=16,
                ),
                Panel(
                    "Refused workers",
                    "They have loaded another model than the served one",
                    (Query(f"sum(kvrelay_workers_refused{{{CLUSTER}}})", "refused"),),
                    width=8,
                ),
            ),
        ),
        Row(
            "Rolls",
            (
                Panel(
                    "Workers of a roll",
                    "Replaced and left, of the one that is under way or has stopped",
                    (
                        Query(
                            f"sum by (cluster, state) (kvrelay_roll_workers{{{CLUSTER}}})",
                            "{{cluster}} {{state}}",
                        ),
                        Query(
                            f"sum by (cluster) (kvrelay_roll_stopped{{{CLUSTER}}})",
                            "{{cluster}} has stopped",
                        ),
                    ),
                    width=12,
                ),
                Panel(
                    "Rolls by outcome",
                    "That ended in the rate interval",
                    (
                        Query(
                            "sum by (cluster, outcome) (increase("
                            f"kvrelay_rolls_total{{{CLUSTER}}}[{RATE}]))",
                            "{{cluster}} {{outcome}}",
                        ),
                    ),
                    width=12,
                ),
                Panel(
                    "Since the last replacement",
                    "While a roll is under way",
                    (
                        Query(
                            f"max by (cluster) (kvrelay_roll_step_seconds{{{CLUSTER}}})",
                            "{{cluster}}",
                        ),
                    ),
                    unit="s",
                    width=24,
                ),
            ),
        ),
        Row(
            "Restarts",
            (
                Panel(
                    "Ends by cause",
                    "Processes that ended, in the rate interval",
                    (
                        Query(
                            "sum by (cause) (increase("
                            f"kvrelay_worker_ends_total{{{WORKER}}}[{RATE}]))",
                            "{{cause}}",
                        ),
                    ),
                    draws=Draws.AREAS,
                    width=12,
                ),
                Panel(
                    "Starts",
                    "Incarnations that became ready, in the rate interval",
                    (
                        Query(
                            "sum by (worker) (increase("
                            f"kvrelay_worker_starts_total{{{WORKER}}}[{RATE}]))",
                            "{{worker}}",
                        ),
                    ),
                    width=12,
                ),
                Panel(
                    "Drains",
                    "Workers that began to drain, and those of them for old quarantine",
                    (
                        Query(
                            "sum by (worker) (increase("
                            f"kvrelay_worker_drains_total{{{WORKER}}}[{RATE}]))",
                            "{{worker}}",
                        ),
                        Query(
                            f"sum(increase(kvrelay_quarantine_drains_total{{{WORKER}}}[{RATE}]))",
                            "for quarantine",
                        ),
                    ),
                    width=12,
                ),
                Panel(
                    "Failed forwards",
                    "Forwards that failed, in the rate interval",
                    (
                        Query(
                            "sum by (worker) (increase("
                            f"kvrelay_failed_steps_total{{{WORKER}}}[{RATE}]))",
                            "{{worker}}",
                        ),
                    ),
                    width=12,
                ),
                Panel(
                    "Tokens computed",
                    "By forwards, a second; of prompts and rows on the cores of idle workers, too",
                    (
                        Query(
                            by("worker", rate("kvrelay_computed_tokens_total", WORKER)),
                            "{{worker}}",
                        ),
                        Query(
                            by("worker", rate("kvrelay_widened_prompt_tokens_total", WORKER)),
                            "{{worker}} prompts with idle workers' cores",
                        ),
                        Query(
                            by("worker", rate("kvrelay_widened_rows_total", WORKER)),
                            "{{worker}} rows with idle workers' cores",
                        ),
                    ),
                    width=24,
                ),
            ),
        ),
    ),
)
