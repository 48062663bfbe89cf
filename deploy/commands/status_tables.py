"""The output of `kvrelay status` for people: tables of the object that `--json` prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvrelay.wire.load import PAGE_STATES
from kvrelay.wire.speeds import StepSpeeds


def as_text(report: dict[str, Any]) -> str:
    """Return a line on the server, then tables of workers and pools, and further ones if needed."""
    workers = report["workers"]
    parts = [_server_line(report), _workers_table(workers)]
    if refused := [worker for worker in workers if worker["refusal"]]:
        parts.append("\n".join(f"REFUSED {one['worker']}: {one['refusal']}" for one in refused))
    parts.append(_pools_table(workers))
    if broken := [worker for worker in workers if worker["storage_error"]]:
        lines = [
            f"STORAGE of {one['worker']} is not written: {one['storage_error']}" for one in broken
        ]
        parts.append("\n".join(lines))
    if any(worker["quarantine"] for worker in workers):
        parts.append(_quarantine_table(workers))
    if any(worker["peers"] for worker in workers):
        parts.append(_peers_table(workers))
    if any("owners" in worker for worker in workers):
        parts.append(_owners_table(workers))
    return "\n\n".join(parts)


def _server_line(report: dict[str, Any]) -> str:
    digest = f" (digest {report['model_digest']})" if report["model_digest"] else ""
    return (
        f"{report['model'] or 'NO MODEL (a role has no worker)'}{digest}, "
        f"kvrelay {report['version']}, up {report['uptime_seconds']:.0f} s, "
        f"{report['live_requests']} live requests"
    )


def _workers_table(workers: Iterable[dict[str, Any]]) -> str:
    head = ["worker", "role", "incarnation", "digest", "ready", "address", "metrics"]
    head += ["waiting", "running", "tokens due", "growth", "1k prompt", "step"]
    rows = [
        [
            worker["worker"],
            worker["role"],
            worker["incarnation"],
            worker["model_digest"] or "-",
            readiness(worker),
            worker["address"],
            worker["metrics_address"],
            worker["waiting_requests"],
            worker["running_requests"],
            worker["waiting_tokens"],
            worker["growth_tokens"],
            *_speeds(worker),
        ]
        for worker in workers
    ]
    return _table(head, rows)


def _speeds(worker: dict[str, Any]) -> tuple[str, str]:
    """Return the times of a 1024-token prompt, and of a decode step with the present requests."""
    speeds = StepSpeeds(**worker["speeds"])
    prompt = f"{speeds.prompt_seconds(1024):.3g} s" if speeds.prompts_known else "-"
    rows = worker["running_requests"] or 1
    step = f"{1000 * speeds.step_seconds(rows):.3g} ms" if speeds.rows_known else "-"
    return prompt, step


def readiness(worker: dict[str, Any]) -> str:
    """Return one word: whether the worker takes requests, or why not."""
    if worker["refusal"]:
        return "REFUSED"
    if worker["draining"]:
        return "draining" if worker["ready"] else "restarting"
    return "yes" if worker["ready"] else "no"


def _owners_table(workers: Iterable[dict[str, Any]]) -> str:
    head = ["worker", "pool", "first page", "pages", "owner", "holder"]
    rows = [
        [
            worker["worker"],
            run["pool"],
            run["first_page"],
            run["num_pages"],
            run["owner"],
            run["holder"],
        ]
        for worker in workers
        for run in worker["owners"]
    ]
    return _table(head, rows)


def _peers_table(workers: Iterable[dict[str, Any]]) -> str:
    head = ["worker", "reads from", "GB/s", "host", "back", "backend", "transports", ""]
    rows = [
        [
            worker["worker"],
            peer["incarnation"],
            f"{peer['read_bytes_per_second'] / 1e9:.3g}",
            f"{peer['host_bytes_per_second'] / 1e9:.3g}",
            f"{peer['write_bytes_per_second'] / 1e9:.3g}",
            peer["backend"],
            peer["transports"],
            _refusal(peer),
        ]
        for worker in workers
        for peer in worker["peers"]
    ]
    return _table(head, rows)


def _refusal(peer: dict[str, Any]) -> str:
    """Return which reads from a peer are refused, and why; "" if none is."""
    if peer["refusal"]:
        return f"REFUSED: {peer['refusal']}"
    return f"HOST NOT READ: {peer['host_refusal']}" if peer["host_refusal"] else ""


def _pools_table(workers: Iterable[dict[str, Any]]) -> str:
    names = [state.replace("_", " ") for state in PAGE_STATES]
    head = ["worker", "pool", "page size", *names, "sum", "total", "promised"]
    rows = [
        [
            worker["worker"],
            pool["pool"],
            pool["page_size"] or "-",
            *(pool[state] for state in PAGE_STATES),
            # A pool that does not balance is a bug: it must stand out.
            pool["sum"] if pool["sum"] == pool["total"] else f"{pool['sum']} (!)",
            pool["total"],
            pool["promised"],
        ]
        for worker in workers
        for pool in worker["pools"]
    ]
    return _table(head, rows)


def _quarantine_table(workers: Iterable[dict[str, Any]]) -> str:
    rows = [
        [worker["worker"], one["reason"].replace("_", " "), one["pages"], f"{one['seconds']} s"]
        for worker in workers
        for one in worker["quarantine"]
    ]
    return _table(["worker", "quarantine waits for", "pages", "oldest"], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Lay out columns as wide as their widest cell: numbers to the right, words to the left."""
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numeric = [any(isinstance(row[column], int) for row in rows) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in cells
    )
