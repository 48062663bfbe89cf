"""`kvrelay status`: who works, and whose every page is."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

import click
import grpc

from kvrelay.deploy.address import Address
from kvrelay.deploy.client import connected
from kvrelay.deploy.edge import with_clear_errors
from kvrelay.deploy.errors import DeployError
from kvrelay.deploy.options import DEFAULT_GRPC
from kvrelay.deploy.params import ADDRESS
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import worker_pb2, worker_pb2_grpc

_SECONDS: Final = 5.0
STATES: Final = (
    "free",
    "held",
    "cached_evictable",
    "cached_protected",
    "session",
    "quarantined",
)
"""Owners of a pool's pages. Every page has one, so they sum to the pool's total."""


@click.command()
@click.option("--pages", is_flag=True, help="Who has each page, too, asked of the workers.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--server", type=ADDRESS, default=str(DEFAULT_GRPC), show_default=True)
@with_clear_errors
def status(*, debug: bool, pages: bool, as_json: bool, server: Address) -> None:
    """Print workers, their load, and each pool's pages by state, with their sum."""
    with connected(server) as service:
        info = service.GetServerInfo(pb.GetServerInfoRequest(), timeout=_SECONDS)
        model = _model(service)
    report = as_object(model, info)
    if pages:
        for worker in report["workers"]:
            worker["owners"] = _owners(worker["address"])
    click.echo(json.dumps(report) if as_json else as_text(report))


def _model(service: Any) -> str | None:
    """What the model is called; None while a role has no worker, which is when one looks here."""
    try:
        name: str = service.GetModelInfo(pb.GetModelInfoRequest(), timeout=_SECONDS).model
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        return None
    return name


def _owners(address: str) -> list[dict[str, Any]]:
    """Every page of a worker, in runs of one owner, as it says itself; none if it does not."""
    try:
        with connected(Address.parse(address), worker_pb2_grpc.WorkerServiceStub) as worker:
            answer = worker.GetPageOwners(worker_pb2.GetPageOwnersRequest(), timeout=_SECONDS)
    except DeployError as error:
        click.echo(f"kvrelay: {error}", err=True)
        return []
    return [
        {
            "pool": pool.pool,
            "first_page": run.first_page,
            "num_pages": run.num_pages,
            "owner": run.owner,
            "holder": run.holder,
        }
        for pool in answer.pools
        for run in pool.runs
    ]


def as_object(model: str | None, info: pb.GetServerInfoResponse) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "model": model,
        "version": info.version,
        "uptime_seconds": info.uptime_seconds,
        "live_requests": info.live_requests,
        "workers": [_worker(worker) for worker in info.workers],
    }


def _worker(worker: pb.WorkerStatus) -> dict[str, Any]:
    return {
        "worker": worker.worker,
        "role": pb.WorkerRole.Name(worker.role).removeprefix("WORKER_ROLE_").lower(),
        "incarnation": worker.incarnation,
        "address": worker.address,
        "metrics_address": worker.metrics_address,
        "ready": worker.ready,
        "waiting_requests": worker.load.waiting_requests,
        "running_requests": worker.load.running_requests,
        "waiting_tokens": worker.load.waiting_tokens,
        "growth_tokens": worker.load.growth_tokens,
        "step_seconds": worker.load.step_seconds,
        "pools": [_pool(pool) for pool in worker.load.pools],
        "peers": [_peer(peer) for peer in worker.load.peers],
    }


def _peer(peer: pb.PeerTransfer) -> dict[str, Any]:
    return {
        "incarnation": peer.incarnation,
        "backend": peer.backend,
        "transports": peer.transports,
        "gbps": peer.gbps,
        "refused": peer.refused,
    }


def _pool(pool: pb.PoolState) -> dict[str, Any]:
    states = {state: getattr(pool, state) for state in STATES}
    return {
        "pool": pool.pool,
        "page_size": pool.page_size,
        **states,
        "sum": sum(states.values()),
        "total": pool.total,
        "promised": pool.promised,
    }


def as_text(report: dict[str, Any]) -> str:
    """What people read: a line on the server, a table of workers, a table of pools."""
    workers = report["workers"]
    parts = [
        f"{report['model'] or 'NO MODEL (a role has no worker)'}, kvrelay {report['version']}, "
        f"up {report['uptime_seconds']:.0f} s, {report['live_requests']} live requests",
        _workers_table(workers),
        _pools_table(workers),
    ]
    if any(worker["peers"] for worker in workers):
        parts.append(_peers_table(workers))
    if any("owners" in worker for worker in workers):
        parts.append(_owners_table(workers))
    return "\n\n".join(parts)


def _workers_table(workers: Iterable[dict[str, Any]]) -> str:
    head = ["worker", "role", "incarnation", "ready", "address", "metrics"]
    head += ["waiting", "running", "tokens due", "growth", "step"]
    rows = [
        [
            worker["worker"],
            worker["role"],
            worker["incarnation"],
            "yes" if worker["ready"] else "no",
            worker["address"],
            worker["metrics_address"],
            worker["waiting_requests"],
            worker["running_requests"],
            worker["waiting_tokens"],
            worker["growth_tokens"],
            f"{1000 * worker['step_seconds']:.1f} ms" if worker["step_seconds"] else "-",
        ]
        for worker in workers
    ]
    return _table(head, rows)


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
    head = ["worker", "reads from", "GB/s", "backend", "transports", ""]
    rows = [
        [
            worker["worker"],
            peer["incarnation"],
            f"{peer['gbps']:.3g}",
            peer["backend"],
            peer["transports"],
            "REFUSED: too slow" if peer["refused"] else "",
        ]
        for worker in workers
        for peer in worker["peers"]
    ]
    return _table(head, rows)


def _pools_table(workers: Iterable[dict[str, Any]]) -> str:
    names = [state.replace("_", " ") for state in STATES]
    head = ["worker", "pool", "page size", *names, "sum", "total", "promised"]
    rows = [
        [
            worker["worker"],
            pool["pool"],
            pool["page_size"] or "-",
            *(pool[state] for state in STATES),
            # Never seen, if all is well; and if not, not to be overlooked.
            pool["sum"] if pool["sum"] == pool["total"] else f"{pool['sum']} (!)",
            pool["total"],
            pool["promised"],
        ]
        for worker in workers
        for pool in worker["pools"]
    ]
    return _table(head, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell: numbers to the right, words to the left."""
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
