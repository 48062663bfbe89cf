"""Memory: every page by who owns it."""

from __future__ import annotations

from typing import Final

from docs.tools.dashboards.spec import (
    CLUSTER,
    OF_WORKERS,
    POOLS,
    WORKER,
    Dashboard,
    Draws,
    Panel,
    Query,
    Row,
    by,
    rate,
    states,
)

_POOL: Final = f'{WORKER},pool=~"$pool",pool!~"rows|host.*|storage"'
"""Of the device."""
_HOST: Final = f'{WORKER},pool=~"host.*"'
"""Of the host; for sliding windows, the model's and a draft model's, it has pools of their own."""
_STORAGE: Final = f'{WORKER},pool="storage"'

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
                    width=16,
                ),
                Panel(
                    "Oldest memory in quarantine",
                    "A transfer or a forward that may still touch it has not ended",
                    (Query(f"kvrelay_quarantine_age_seconds{{{WORKER}}}", "{{worker}}"),),
                    "s",
                    width=12,
                ),
                Panel(
                    "Pages in quarantine",
                    "By what they wait for: a forward, a read that runs, or one that has failed",
                    (Query(by("reason", f"kvrelay_quarantined_pages{{{WORKER}}}"), "{{reason}}"),),
                    draws=Draws.AREAS,
                    width=12,
                ),
            ),
        ),
        Row(
            "Pages by state: they fill the pool to the brim",
            (
                Panel(
                    "Pages of $role",
                    "All workers of the role together; the states sum to the pool",
                    states(_POOL),
                    draws=Draws.AREAS,
                    width=12,
                    repeat="role",
                ),
                Panel(
                    "Pages of $worker",
                    "The states of each pool, and the pools together as a line",
                    states(_POOL),
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
                            by("role, pool", f"kvrelay_promised_pages{{{_POOL}}}"),
                            "{{role}} {{pool}} promised",
                        ),
                        Query(
                            by(
                                "role, pool",
                                f'kvrelay_pages{{{_POOL},state=~"free|cached_evictable"}}',
                            ),
                            "{{role}} {{pool}} there",
                        ),
                    ),
                    width=12,
                ),
                Panel(
                    "Prefix hit rate",
                    "The share of prompt tokens that the prefix index had",
                    (
                        Query(
                            by("role", rate("kvrelay_prefix_hit_tokens_total", WORKER))
                            + " / ("
                            + by("role", rate("kvrelay_prefix_hit_tokens_total", WORKER))
                            + " + "
                            + by("role", rate("kvrelay_computed_tokens_total", WORKER))
                            + ")",
                            "{{role}} of tokens",
                        ),
                        Query(
                            by("role", rate("kvrelay_prefix_hits_total", WORKER))
                            + " / "
                            + by("role", rate("kvrelay_prefix_lookups_total", WORKER)),
                            "{{role}} of prompts",
                        ),
                    ),
                    "percentunit",
                    width=12,
                ),
                Panel(
                    "Evicted and duplicate pages",
                    "Evictions make room; duplicates were computed by two requests at once",
                    (
                        Query(
                            by("role", rate("kvrelay_prefix_evicted_pages_total", WORKER)),
                            "{{role}} evicted",
                        ),
                        Query(
                            by("role", rate("kvrelay_prefix_duplicate_pages_total", WORKER)),
                            "{{role}} duplicate",
                        ),
                    ),
                    width=12,
                ),
                Panel(
                    "Retractions",
                    "Running requests that made room for others, a second",
                    (Query(by("worker", rate("kvrelay_retractions_total", WORKER)), "{{worker}}"),),
                    width=12,
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
                    width=12,
                ),
                Panel(
                    "Rows of the request table",
                    "The share of each worker's rows that requests have",
                    (
                        Query(
                            "sum by (worker) (kvrelay_pages"
                            f'{{{WORKER},pool="rows",state!="free"}}) / '
                            f'sum by (worker) (kvrelay_pool_pages{{{WORKER},pool="rows"}})',
                            "{{worker}}",
                        ),
                    ),
                    "percentunit",
                    width=12,
                ),
            ),
        ),
        Row(
            "Tiers below the device",
            (
                Panel(
                    "Pages of the host tier",
                    "All workers together; the states sum to the pools. What is kept of sliding "
                    "windows has pools of its own",
                    states(_HOST),
                    draws=Draws.AREAS,
                ),
                Panel(
                    "Pages of the tier of storage",
                    "What the workers that run fill of --kv-storage; the states sum to its size",
                    states(_STORAGE),
                    draws=Draws.AREAS,
                ),
                Panel(
                    "Pages by what became of them",
                    "Copied to a tier, dropped, brought back, evicted, forgotten, or broken there, "
                    "a second",
                    (
                        Query(
                            by("tier, event", rate("kvrelay_tier_pages_total", WORKER)),
                            "{{tier}} {{event}}",
                        ),
                    ),
                ),
                Panel(
                    "Bytes copied",
                    "To a tier (write) and back (load), a second",
                    (
                        Query(
                            by("tier, direction", rate("kvrelay_tier_bytes_total", WORKER)),
                            "{{tier}} {{direction}}",
                        ),
                    ),
                    "Bps",
                ),
                Panel(
                    "Time of copies",
                    "Seconds in which copies run, a second: at 1 a worker can copy no more",
                    (
                        Query(
                            "max by (tier, direction) ("
                            + rate("kvrelay_tier_copy_seconds_total", WORKER)
                            + ")",
                            "{{tier}} {{direction}}",
                        ),
                    ),
                ),
                Panel(
                    "Computed all the same",
                    "Prefixes of a tier that it was or would have been slower to bring back, "
                    "a second",
                    (
                        Query(
                            by("tier, reason", rate("kvrelay_tier_refusals_total", WORKER)),
                            "{{tier}} {{reason}}",
                        ),
                    ),
                    "reqps",
                ),
            ),
        ),
        Row(
            "Sessions",
            (
                Panel(
                    "Open sessions",
                    "Of each router",
                    (Query(f"kvrelay_sessions{{{CLUSTER}}}", "{{instance}}"),),
                ),
                Panel(
                    "Pages kept for sessions",
                    "Between their turns; they are given up where others need the memory",
                    (Query(by("role", f'kvrelay_pages{{{_POOL},state="session"}}'), "{{role}}"),),
                    draws=Draws.AREAS,
                ),
                Panel(
                    "Turns by where their history was",
                    "Resumed: the worker had its KV; opened: the history was computed, a second",
                    (Query(by("start", rate("kvrelay_session_turns_total", WORKER)), "{{start}}"),),
                    "reqps",
                    Draws.AREAS,
                ),
                Panel(
                    "Turns by outcome",
                    "Those that completed are a part of the history, a second",
                    (
                        Query(
                            by("outcome", rate("kvrelay_router_session_turns_total", CLUSTER)),
                            "{{outcome}}",
                        ),
                    ),
                    "reqps",
                    Draws.AREAS,
                ),
                Panel(
                    "Sessions' KV given up",
                    "By why; room: others needed the memory, a second",
                    (
                        Query(
                            by("reason", rate("kvrelay_session_ends_total", WORKER)), "{{reason}}"
                        ),
                    ),
                    draws=Draws.AREAS,
                ),
                Panel(
                    "Sessions that ended",
                    "Closed by their clients, or expired, a second",
                    (
                        Query(
                            by("reason", rate("kvrelay_router_session_ends_total", CLUSTER)),
                            "{{reason}}",
                        ),
                    ),
                    draws=Draws.AREAS,
                ),
            ),
        ),
    ),
)
