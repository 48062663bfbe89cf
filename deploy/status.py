"""`kvrelay status`: who works, and whose every page is."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import click
import grpc

from kvrelay.deploy.address import Address
from kvrelay.deploy.client import Access, Metadata, connected, with_access
from kvrelay.deploy.edge import with_clear_errors
from kvrelay.deploy.errors import DeployError
from kvrelay.deploy.options import DEFAULT_GRPC, check_tls, check_together
from kvrelay.deploy.params import ADDRESS, FILE
from kvrelay.net.tls import TlsFiles
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
@click.option("--tls-cert", type=FILE, help="With --pages, for workers that ask for one.")
@click.option("--tls-key", type=FILE, help="Its private key.")
@click.option("--tls-ca", type=FILE, help="Its authority, and the workers'.")
@with_clear_errors
@with_access
def status(
    *,
    debug: bool,
    pages: bool,
    as_json: bool,
    server: Address,
    access: Access,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_ca: Path | None,
) -> None:
    """Print workers, their load, and each pool's pages by state, with their sum."""
    access.check(server)
    to_workers = _worker_credentials(tls_cert, tls_key, tls_ca)
    with connected(server, access.credentials()) as service:
        info = service.GetServerInfo(
            pb.GetServerInfoRequest(), timeout=_SECONDS, metadata=access.metadata
        )
        model = _model(service, access.metadata)
    report = as_object(model, info)
    if pages:
        for worker in report["workers"]:
            worker["owners"] = _owners(worker["address"], to_workers)
    click.echo(json.dumps(report) if as_json else as_text(report))


def _worker_credentials(
    cert: Path | None, key: Path | None, ca: Path | None
) -> grpc.ChannelCredentials | None:
    check_together(tls_cert=cert, tls_key=key, tls_ca=ca)
    if cert is None or key is None:
        return None
    files = TlsFiles(cert, key, ca)
    check_tls("tls", files)
    return files.channel_credentials()


def _model(service: Any, metadata: Metadata) -> str | None:
    """What the model is called; None while a role has no worker, which is when one looks here."""
    try:
        name: str = service.GetModelInfo(
            pb.GetModelInfoRequest(), timeout=_SECONDS, metadata=metadata
        ).model
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        return None
    return name


def _owners(address: str, credentials: grpc.ChannelCredentials | None) -> list[dict[str, Any]]:
    """Every page of a worker, in runs of one owner, as it says itself; none if it does not."""
    try:
        stub = worker_pb2_grpc.WorkerServiceStub
        with connected(Address.parse(address), credentials, stub) as worker:
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
        "draining": worker.draining,
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
        "read_gbps": peer.read_gbps,
        "write_gbps": peer.write_gbps,
        "refusal": peer.refusal,
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
            _readiness(worker),
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


def _readiness(worker: dict[str, Any]) -> str:
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
    head = ["worker", "reads from", "GB/s", "back", "backend", "transports", ""]
    rows = [
        [
            worker["worker"],
            peer["incarnation"],
            f"{peer['read_gbps']:.3g}",
            f"{peer['write_gbps']:.3g}",
            peer["backend"],
            peer["transports"],
            f"REFUSED: {peer['refusal']}" if peer["refusal"] else "",
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
