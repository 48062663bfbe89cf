"""Transfer: KV on its way."""

from __future__ import annotations

from typing import Final

from docs.tools.dashboards.spec import (
    OF_WORKERS,
    WORKER,
    Dashboard,
    Panel,
    Query,
    Row,
    by,
    heatmap,
    percentiles,
    rate,
)

TRANSFER: Final = Dashboard(
    "kvrelay-transfer",
    "kvrelay: transfer",
    "KV on its way from prefill to decode workers",
    OF_WORKERS,
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
                    "Refused pairs",
                    "Prefill workers that a decode worker does not read from now",
                    (Query(f"kvrelay_refused_peers{{{WORKER}}}", "{{worker}}"),),
                    width=12,
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
                    width=24,
                ),
            ),
        ),
    ),
)
