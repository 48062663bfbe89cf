"""Requests: how many, and how they end."""

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

REQUESTS: Final = Dashboard(
    "kvrelay-requests",
    "kvrelay: requests",
    "How many, how they end, and which are computed twice",
    OF_WORKERS,
    (
        Row(
            "Load",
            (
                Panel(
                    "Live requests",
                    "At the routers, by state",
                    (
                        Query(
                            by("state", f"kvrelay_requests_live{{{CLUSTER}}}"),
                            "{{state}}",
                        ),
                    ),
                    draws=Draws.AREAS,
                    width=12,
                ),
                Panel(
                    "Requests at the workers",
                    "Those that wait are the queue",
                    (
                        Query(
                            by("role, state", f"kvrelay_requests{{{WORKER}}}"), "{{role}} {{state}}"
                        ),
                    ),
                    width=12,
                ),
                Panel(
                    "Tokens that wait",
                    "Prompt tokens not yet computed or read",
                    (Query(f"kvrelay_waiting_tokens{{{WORKER}}}", "{{worker}}"),),
                    width=12,
                ),
                Panel(
                    "Tokens a second",
                    "Prompts admitted, and tokens streamed to clients",
                    (
                        Query(f"sum({rate('kvrelay_prompt_tokens_total', CLUSTER)})", "prompt"),
                        Query(f"sum({rate('kvrelay_output_tokens_total', CLUSTER)})", "output"),
                    ),
                    width=12,
                ),
                Panel(
                    "Placement",
                    "Attempts by who computes the prompt, and why, a second",
                    (
                        Query(
                            by("computed_by, reason", rate("kvrelay_placements_total", CLUSTER)),
                            "{{computed_by}}: {{reason}}",
                        ),
                    ),
                    "reqps",
                    width=12,
                ),
                Panel(
                    "Doors",
                    "Requests by the door that they came in by, a second",
                    (Query(by("door", rate("kvrelay_door_requests_total", CLUSTER)), "{{door}}"),),
                    "reqps",
                    width=12,
                ),
            ),
        ),
        Row(
            "Ends",
            (
                Panel(
                    "Outcomes",
                    "Requests that ended, a second",
                    (Query(by("outcome", rate("kvrelay_requests_total", CLUSTER)), "{{outcome}}"),),
                    "reqps",
                    Draws.AREAS,
                    width=12,
                ),
                Panel(
                    "Computed again, by reason",
                    "Attempts after a request's first, a second",
                    (
                        Query(
                            by("reason", rate("kvrelay_resubmissions_total", CLUSTER))
                            + " and "
                            # Of the many reasons those that there have been.
                            + by("reason", f"kvrelay_resubmissions_total{{{CLUSTER}}}")
                            + " > 0",
                            "{{reason}}",
                        ),
                    ),
                    "reqps",
                    Draws.AREAS,
                    width=12,
                ),
                Panel(
                    "Waits for workers, and slow readers",
                    "New requests that wait for a worker; streams whose client reads too slowly",
                    (
                        Query(
                            f"sum(kvrelay_requests_waiting_for_workers{{{CLUSTER}}})",
                            "wait for a worker",
                        ),
                        Query(
                            f"sum(increase(kvrelay_slow_readers_total{{{CLUSTER}}}[{RATE}]))",
                            "slow readers",
                        ),
                        Query(
                            f"sum(increase(kvrelay_contradicted_tokens_total{{{CLUSTER}}}[{RATE}]))",
                            "contradicted tokens",
                        ),
                    ),
                    width=24,
                ),
            ),
        ),
    ),
)
