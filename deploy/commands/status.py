"""`kvrelay status`: the workers, their load, and the owners of their pages."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click
import grpc

from kvrelay.client.access import Metadata
from kvrelay.deploy.command_errors import with_clear_errors
from kvrelay.deploy.commands import controller_status
from kvrelay.deploy.commands.status_tables import as_text
from kvrelay.deploy.errors import DeployError
from kvrelay.deploy.options.listen_address import Address
from kvrelay.deploy.options.option_types import FILE
from kvrelay.deploy.options.tls_options import check_tls, check_together
from kvrelay.deploy.reach.find_controller import Controller, with_controller_if_named
from kvrelay.deploy.reach.grpc_target import CommandAccess, connected, with_access, with_server
from kvrelay.net.tls import TlsFiles
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import worker_pb2, worker_pb2_grpc
from kvrelay.wire.load import WorkerStatus
from kvrelay.wire.messages import PAGE_OWNERS, WORKER_STATUS

_SECONDS: Final = 5.0


@click.command()
@click.option("--pages", is_flag=True, help="Show who owns each page, too; the workers are asked.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@with_server
@with_controller_if_named
@click.option(
    "--tls-cert", type=FILE, help="With --pages: the certificate to show to workers that use TLS."
)
@click.option("--tls-key", type=FILE, help="The private key of --tls-cert.")
@click.option(
    "--tls-ca",
    type=FILE,
    help="The authority that signed --tls-cert and the workers' certificates.",
)
@with_clear_errors
@with_access
def status(
    *,
    debug: bool,
    pages: bool,
    as_json: bool,
    server: Address,
    controller: Controller | None,
    access: CommandAccess,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_ca: Path | None,
) -> None:
    """Print the workers, their load, and how many pages of each pool are in which state.

    With --controller or --ray-address: the cluster's controller, and each worker's incarnation.
    """
    if controller is not None:
        state = controller_status.ask(controller, access)
        shown = json.dumps(asdict(state)) if as_json else None
        click.echo(shown or controller_status.as_text(state))
        return
    to_workers = _worker_credentials(tls_cert, tls_key, tls_ca)
    report = ask(server, access)
    if pages:
        for worker in report["workers"]:
            worker["owners"] = _owners(worker["address"], to_workers)
    click.echo(json.dumps(report) if as_json else as_text(report))


def ask(server: Address, access: CommandAccess) -> dict[str, Any]:
    """Ask a router for the status, as `--json` prints it. Raises DeployError."""
    access.check(server)
    with connected(server, access.credentials()) as service:
        info = service.GetServerInfo(
            pb.GetServerInfoRequest(), timeout=_SECONDS, metadata=access.metadata
        )
        model = _model(service, access.metadata)
    return as_object(model, info)


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
    """Return the model's name; None while a role has no worker, when status is needed most."""
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
    """Return a worker's pages, in runs of one owner; none, and a message, if it does not answer."""
    try:
        stub = worker_pb2_grpc.WorkerServiceStub
        with connected(Address.parse(address), credentials, stub) as worker:
            answer = worker.GetPageOwners(worker_pb2.GetPageOwnersRequest(), timeout=_SECONDS)
    except DeployError as error:
        click.echo(f"kvrelay: {error}", err=True)
        return []
    owners = PAGE_OWNERS.from_message(answer)
    return [{"pool": pool.pool, **asdict(run)} for pool in owners.pools for run in pool.runs]


def as_object(model: str | None, info: pb.GetServerInfoResponse) -> dict[str, Any]:
    """Return the status as `--json` prints it."""
    return {
        "model": model,
        "model_digest": info.model_digest,
        "version": info.version,
        "uptime_seconds": info.uptime_seconds,
        "live_requests": info.live_requests,
        "requests": _requests(info.requests) if info.HasField("requests") else None,
        "workers": [_worker(WORKER_STATUS.from_message(worker)) for worker in info.workers],
    }


def _requests(counts: pb.RequestCounts) -> dict[str, Any]:
    return {
        "waiting": counts.waiting,
        "streaming": counts.streaming,
        "waiting_for_workers": counts.waiting_for_workers,
        "ended": dict(counts.ended),
        "resubmitted": counts.resubmitted,
        "prompt_tokens": counts.prompt_tokens,
        "output_tokens": counts.output_tokens,
    }


def _worker(status: WorkerStatus) -> dict[str, Any]:
    """Return a worker's fields, with the fields of its load beside them."""
    worker = asdict(status)
    load = worker.pop("load")
    pools = [{**asdict(pool), "sum": pool.accounted} for pool in status.load.pools]
    return {**worker, **load, "draining": status.draining, "pools": pools}
