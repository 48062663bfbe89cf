"""`kvrelay scale`: a change of a cluster's number of workers, without losing a request."""

from __future__ import annotations

from typing import Final

import click

from kvrelay.deploy.command_errors import with_clear_errors
from kvrelay.deploy.errors import DeployError
from kvrelay.deploy.reach.find_controller import Controller, with_controller
from kvrelay.deploy.reach.grpc_target import CommandAccess, with_access
from kvrelay.v1 import admin_pb2 as pb

_COUNT: Final = click.IntRange(1)
_PHASES: Final = {
    pb.ScaleWorkersResponse.PHASE_STARTING: "starts",
    pb.ScaleWorkersResponse.PHASE_READY: "is ready",
    pb.ScaleWorkersResponse.PHASE_DRAINING: "drains",
    pb.ScaleWorkersResponse.PHASE_LEFT: "has left",
    pb.ScaleWorkersResponse.PHASE_FAILED: "FAILED",
}


@click.command()
@click.option("--prefill", type=_COUNT, help="Number of prefill workers.")
@click.option("--decode", type=_COUNT, help="Number of decode workers.")
@click.option("--aggregated", type=_COUNT, help="Number of aggregated workers.")
@with_controller
@with_clear_errors
@with_access
def scale(
    *,
    debug: bool,
    prefill: int | None,
    decode: int | None,
    aggregated: int | None,
    controller: Controller,
    access: CommandAccess,
) -> None:
    """Start workers, or drain and remove some, until each role has the given number.

    Roles that are left out stay as they are. Workers are removed once the new ones are ready, the
    latest first. Ctrl-C ends the command; the change goes on.
    """
    counts = {"prefill": prefill, "decode": decode, "aggregated": aggregated}
    asked = {role: count for role, count in counts.items() if count is not None}
    if not asked:
        raise click.UsageError("give --prefill, --decode or --aggregated")
    failed = 0
    with controller.connected(access) as service:
        request = pb.ScaleWorkersRequest(**asked)
        for step in service.ScaleWorkers(request, metadata=access.metadata):
            click.echo(line_of(step))
            failed += step.phase == pb.ScaleWorkersResponse.PHASE_FAILED
    if failed:
        raise DeployError(f"{failed} of the changes could not be made")


def line_of(step: pb.ScaleWorkersResponse | pb.RollWorkersResponse) -> str:
    """Return the line that tells the user a step of a worker's change."""
    reason = f": {step.reason}" if step.reason else ""
    return f"{step.worker} {_PHASES[step.phase]}{reason}"
