"""The five dashboards: memory first."""

from __future__ import annotations

from typing import Final

from docs.tools.dashboards.spec import (
    CLUSTER,
    CLUSTERS,
    POOLS,
    RATE,
    ROLES,
    TOTAL,
    WORKER,
    WORKERS,
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

_POOL: Final = f'{WORKER},pool=~"$pool",pool!="rows"'
_OF_WORKERS: Final = (CLUSTERS, ROLES, WORKERS)

MEMORY: Final = Dashboard(
    "kvrelay-memory",
    "kvrelay: memory",
    "Every page of KV memory, by who owns it",
    (*_OF_WORKERS, POOLS),
    (
        Row(
            "Is the account right, and is there room",
            (
                Panel(
                    "Conservation",
                    "Pages that no state has, or two have. It must be 0.",
                    (
                        Query(
                            f"sum(abs(sum without (state) (kvrelay_pages{{{WORKER}}}) "
                            f"- kvrelay_pool_pages{{{WORKER}}}))",
                            "pages astray",
                        ),
                    ),
                    draws=Draws.NUMBERS,
                    width=4,
                ),
                Panel(
                    "Wrong accounts",
                    "Workers that found their account wrong and were replaced, in the range shown",
                    (
                        Query(
                            "sum(increase(kvrelay_worker_ends_total"
                            f'{{{WORKER},cause="conservation"}}[$__range]))',
                            "workers",
                        ),
                    ),
                    draws=Draws.NUMBERS,
                    width=4,
                ),
                Panel(
                    "In use",
                    "The share of the pool that requests hold, or quarantine keeps",
                    (
                        Query(
                            "sum by (role, worker) (kvrelay_pages"
                            f'{{{_POOL},state!~"free|cached_evictable"}}) / '
                            f"sum by (role, worker) (kvrelay_pool_pages{{{_POOL}}})",
                            "{{worker}}",
                        ),
                    ),
                    "percentunit",
                ),
                Panel(
                    "Oldest memory in quarantine",
                    "A transfer or a forward that may still touch it has not ended",
                    (Query(f"kvrelay_quarantine_age_seconds{{{WORKER}}}", "{{worker}}"),),
                    "s",
                ),
            ),
        ),
        Row(
            "Pages by state: they fill the pool to the brim",
            (
                Panel(
                    "Pages of $role",
                    "All workers of the role together; the states sum to the pool",
                    (
                        Query(by("pool, state", f"kvrelay_pages{{{_POOL}}}"), "{{pool}} {{state}}"),
                        Query(f"sum(kvrelay_pool_pages{{{_POOL}}})", TOTAL),
                    ),
                    draws=Draws.AREAS,
                    width=12,
                    repeat="role",
                ),
                Panel(
                    "Pages of $worker",
                    "The states of each pool, and the pools together as a line",
                    (
                        Query(by("pool, state", f"kvrelay_pages{{{_POOL}}}"), "{{pool}} {{state}}"),
                        Query(f"sum(kvrelay_pool_pages{{{_POOL}}})", TOTAL),
                    ),
                    draws=Draws.AREAS,
                    width=12,
                    repeat="worker",
                ),
            ),
        ),
        Row(
            "Promises, the cache, and shortage",
            (
                Panel(
                    "Promised, and what there is for it",
                    "Running requests may grow into the promised pages: they must not be more than "
                    "those that are free or can be evicted",
                    (
                        Query(
                            by("worker, pool", f"kvrelay_promised_pages{{{_POOL}}}"),
                            "{{worker}} {{pool}} promised",
                        ),
                        Query(
                            by(
                                "worker, pool",
                                f'kvrelay_pages{{{_POOL},state=~"free|cached_evictable"}}',
                            ),
                            "{{worker}} {{pool}} there",
                        ),
                    ),
                ),
                Panel(
                    "Prefix hit rate",
                    "The share of prompt tokens that the prefix index had",
                    (
                        Query(
                            by("worker", rate("kvrelay_prefix_hit_tokens_total", WORKER))
                            + " / ("
                            + by("worker", rate("kvrelay_prefix_hit_tokens_total", WORKER))
                            + " + "
                            + by("worker", rate("kvrelay_computed_tokens_total", WORKER))
                            + ")",
                            "{{worker}} of tokens",
                        ),
                        Query(
                            by("worker", rate("kvrelay_prefix_hits_total", WORKER))
                            + " / "
                            + by("worker", rate("kvrelay_prefix_lookups_total", WORKER)),
                            "{{worker}} of prompts",
                        ),
                    ),
                    "percentunit",
                ),
                Panel(
                    "Evicted and duplicate pages",
                    "Evictions make room; duplicates were computed by two requests at once",
                    (
                        Query(
                            by("worker", rate("kvrelay_prefix_evicted_pages_total", WORKER)),
                            "{{worker}} evicted",
                        ),
                        Query(
                            by("worker", rate("kvrelay_prefix_duplicate_pages_total", WORKER)),
                            "{{worker}} duplicate",
                        ),
                    ),
                ),
                Panel(
                    "Retractions",
                    "Running requests that made room for others, a second",
                    (Query(by("worker", rate("kvrelay_retractions_total", WORKER)), "{{worker}}"),),
                ),
                Panel(
                    "Releases by outcome",
                    "Requests whose memory was released, a second",
                    (
                        Query(
                            by("role, outcome", rate("kvrelay_releases_total", WORKER)),
                            "{{role}} {{outcome}}",
                        ),
                    ),
                ),
                Panel(
                    "Rows of the request table",
                    "Rows by state",
                    (
                        Query(
                            by("worker, state", f'kvrelay_pages{{{WORKER},pool="rows"}}'),
                            "{{worker}} {{state}}",
                        ),
                    ),
                ),
            ),
        ),
    ),
)

TRANSFER: Final = Dashboard(
    "kvrelay-transfer",
    "kvrelay: transfer",
    "KV on its way from prefill to decode workers",
    _OF_WORKERS,
    (
        Row(
            "Reads",
            (
                Panel(
                    "Bytes read",
                    "KV that decode workers read, a second",
                    (
                        Query(
                            by("worker", rate("kvrelay_transfer_bytes_total", WORKER)), "{{worker}}"
                        ),
                    ),
                    "Bps",
                    width=12,
                ),
                Panel(
                    "Reads by result",
                    "Reads that ended, a second",
                    (
                        Query(
                            by("worker, result", rate("kvrelay_transfers_total", WORKER)),
                            "{{worker}} {{result}}",
                        ),
                    ),
                    "reqps",
                    width=12,
                ),
                heatmap(
                    "Time of a read",
                    "Seconds from the order to the end of one read",
                    "kvrelay_transfer_seconds",
                    WORKER,
                ),
                percentiles(
                    "Time of a read, percentiles",
                    "Seconds of one read of pages",
                    "kvrelay_transfer_seconds",
                    WORKER,
                ),
            ),
        ),
        Row(
            "Pairs, and trust",
            (
                Panel(
                    "Attested rate of each pair",
                    "What the latest probe read; that the transport is what you paid for",
                    (
                        Query(
                            "max by (worker, peer, backend, transports) "
                            f'(kvrelay_transfer_bytes_per_second{{{WORKER},direction="read"}})',
                            "{{worker}} from {{peer}} by {{backend}}",
                        ),
                    ),
                    "Bps",
                    width=12,
                ),
                Panel(
                    "Refused pairs",
                    "Prefill workers that a decode worker does not read from now",
                    (Query(f"kvrelay_refused_peers{{{WORKER}}}", "{{worker}}"),),
                    width=6,
                ),
                Panel(
                    "Refusals",
                    "Pairs that were refused, a second",
                    (
                        Query(
                            by("worker", rate("kvrelay_transfer_refusals_total", WORKER)),
                            "{{worker}}",
                        ),
                    ),
                    width=6,
                ),
                Panel(
                    "Verified pages, and mismatches",
                    "Pages whose bytes were compared, and those that differed, a second",
                    (
                        Query(
                            by("worker", rate("kvrelay_verified_pages_total", WORKER)),
                            "{{worker}} verified",
                        ),
                        Query(
                            by("worker", rate("kvrelay_page_mismatches_total", WORKER)),
                            "{{worker}} differ",
                        ),
                    ),
                    width=12,
                ),
                Panel(
                    "Dropped messages",
                    "Late, duplicate and misdirected messages, a second",
                    (
                        Query(
                            by("kind", rate("kvrelay_dropped_messages_total", WORKER)), "{{kind}}"
                        ),
                    ),
                    width=12,
                ),
            ),
        ),
    ),
)

LATENCY: Final = Dashboard(
    "kvrelay-latency",
    "kvrelay: latency",
    "What clients wait for, and where it goes",
    (CLUSTERS, ROLES, WORKERS),
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
                    (
                        Query(
                            by("phase", rate("kvrelay_phase_seconds_sum", CLUSTER))
                            + " / "
                            + by("phase", rate("kvrelay_phase_seconds_count", CLUSTER)),
                            "{{phase}}",
                        ),
                    ),
                    "s",
                    Draws.AREAS,
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
                ),
            ),
        ),
    ),
)

REQUESTS: Final = Dashboard(
    "kvrelay-requests",
    "kvrelay: requests",
    "How many, how they end, and which are computed twice",
    _OF_WORKERS,
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
                ),
                Panel(
                    "Requests at the workers",
                    "Those that wait are the queue",
                    (
                        Query(
                            by("role, state", f"kvrelay_requests{{{WORKER}}}"), "{{role}} {{state}}"
                        ),
                    ),
                ),
                Panel(
                    "Tokens that wait",
                    "Prompt tokens not yet computed or read",
                    (Query(f"kvrelay_waiting_tokens{{{WORKER}}}", "{{worker}}"),),
                ),
                Panel(
                    "Tokens a second",
                    "Prompts admitted, and tokens streamed to clients",
                    (
                        Query(f"sum({rate('kvrelay_prompt_tokens_total', CLUSTER)})", "prompt"),
                        Query(f"sum({rate('kvrelay_output_tokens_total', CLUSTER)})", "output"),
                    ),
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
                ),
                Panel(
                    "Doors",
                    "Requests by the door that they came in by, a second",
                    (Query(by("door", rate("kvrelay_door_requests_total", CLUSTER)), "{{door}}"),),
                    "reqps",
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
                ),
                Panel(
                    "Computed again, by reason",
                    "Attempts after a request's first, a second",
                    (
                        Query(
                            by("reason", rate("kvrelay_resubmissions_total", CLUSTER)),
                            "{{reason}}",
                        ),
                    ),
                    "reqps",
                    Draws.AREAS,
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
                ),
            ),
        ),
    ),
)

FLEET: Final = Dashboard(
    "kvrelay-fleet",
    "kvrelay: fleet",
    "Workers, their incarnations, restarts and drains",
    _OF_WORKERS,
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
                ),
                Panel(
                    "Processes that answer",
                    "1: Prometheus reads its metrics",
                    (Query(f"up{{{CLUSTER}}}", "{{instance}}"),),
                ),
                Panel(
                    "Refused workers",
                    "They have loaded another model than the served one",
                    (Query(f"sum(kvrelay_workers_refused{{{CLUSTER}}})", "refused"),),
                ),
                Panel(
                    "Incarnations",
                    "Those that run now",
                    (Query(f"kvrelay_worker_info{{{WORKER}}}"),),
                    draws=Draws.TABLE,
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
                            "sum by (worker, cause) (increase("
                            f"kvrelay_worker_ends_total{{{WORKER}}}[{RATE}]))",
                            "{{worker}} {{cause}}",
                        ),
                    ),
                    draws=Draws.AREAS,
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
                            "sum by (worker) (increase("
                            f"kvrelay_quarantine_drains_total{{{WORKER}}}[{RATE}]))",
                            "{{worker}} for quarantine",
                        ),
                    ),
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
                    "By forwards, a second",
                    (
                        Query(
                            by("worker", rate("kvrelay_computed_tokens_total", WORKER)),
                            "{{worker}}",
                        ),
                    ),
                    width=12,
                ),
            ),
        ),
    ),
)

DASHBOARDS: Final = (MEMORY, TRANSFER, LATENCY, REQUESTS, FLEET)
