"""`kvrelay drain`: the removal or replacement of a worker without losing a request."""

from __future__ import annotations

from typing import Final

import click

from kvrelay.deploy.command_errors import with_clear_errors
from kvrelay.deploy.errors import DeployError
from kvrelay.deploy.reach.find_controller import Controller, with_controller
from kvrelay.deploy.reach.grpc_target import CommandAccess, connected, with_access
from kvrelay.v1 import admin_pb2 as pb
from kvrelay.v1 import admin_pb2_grpc

_DRAINING: Final = pb.DrainWorkerResponse.PHASE_DRAINING
_LEFT: Final = pb.DrainWorkerResponse.PHASE_LEFT
_READY: Final = pb.DrainWorkerResponse.PHASE_READY


@click.command()
@click.argument("worker")
@click.option("--remove", is_flag=True, help="Do not start another worker in its place.")
@with_controller
@with_clear_errors
@with_access
def drain(
    *, debug: bool, worker: str, remove: bool, controller: Controller, access: CommandAccess
) -> None:
    """Drain WORKER: it takes no more requests, finishes its own or moves them, and ends.

    Another worker takes its place, and the command ends when that one is ready.
    Ctrl-C ends the command; the drain goes on.
    """
    request = pb.DrainWorkerRequest(worker=worker, remove=remove)
    last = None
    admin = controller.find()
    access.check(admin)
    with connected(admin, access.credentials(), admin_pb2_grpc.AdminServiceStub) as service:
        for response in service.DrainWorker(request, metadata=access.metadata):
            click.echo(line_of(worker, response, remove=remove))
            last = response.phase
    if last != (_LEFT if remove else _READY):
        raise DeployError(f"{admin}: the connection ended before {worker} had drained")


def line_of(worker: str, response: pb.DrainWorkerResponse, *, remove: bool) -> str:
    """Return the line that tells the user a drain's phase."""
    if response.phase == _DRAINING:
        left = "" if response.requests_unknown else f", {response.requests} requests left"
        return f"{worker} drains{left}  ({response.incarnation})"
    if response.phase == _LEFT:
        then = "" if remove else "; another one starts"
        return f"{worker} has left{then}  ({response.incarnation})"
    return f"{worker} is ready again  ({response.incarnation})"
