"""Memory: every page by who owns it."""

from __future__ import annotations

from typing import Final

from docs.tools.dashboards.spec import (
    OF_WORKERS,
    POOLS,
    TOTAL,
    WORKER,
    Dashboard,
    Draws,
    Panel,
    Query,
    Row,
    by,
    rate,
)

_POOL: Final = f'{WORKER},pool=~"$pool",pool!="rows"'

MEMORY: Final = Dashboard(
    "kvrelay-memory",
    "kvrelay: memory",
    "Every page of KV memory, by who owns it",
    (*OF_WORKERS, POOLS),
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
                Panel(
                    "Pages in quarantine",
                    "By what they wait for: a forward, a read that runs, or one that has failed",
                    (
                        Query(
                            by("worker, reason", f"kvrelay_quarantined_pages{{{WORKER}}}"),
                            "{{worker}} {{reason}}",
                        ),
                    ),
                    draws=Draws.AREAS,
                    width=24,
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
