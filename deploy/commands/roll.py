"""`kvrelay roll`: all workers get other options, without losing a request."""

from __future__ import annotations

from typing import Final

import click

from kvrelay.deploy.command_errors import with_clear_errors
from kvrelay.deploy.commands.scale import line_of
from kvrelay.deploy.errors import DeployError
from kvrelay.deploy.reach.find_controller import Controller, with_controller
from kvrelay.deploy.reach.grpc_target import CommandAccess, with_access
from kvrelay.v1 import admin_pb2 as pb

_COUNT: Final = click.IntRange(0, 64)


@click.command()
@click.option(
    "--set",
    "settings",
    metavar="OPTION=VALUE",
    multiple=True,
    help="An option of `kvrelay up` that workers are to have, such as kv-memory=2GiB; several "
    "times for several. Others stay as they are. Without a value: as the cluster was started.",
)
@click.option(
    "--max-surge",
    type=_COUNT,
    default=1,
    show_default=True,
    help="So many successors are started before their predecessors drain. They need room beside "
    "them: CPUs, GPUs and memory.",
)
@click.option(
    "--max-unavailable",
    type=_COUNT,
    default=0,
    show_default=True,
    help="So many workers leave before their successors start, which then have their places.",
)
@click.option(
    "--undo",
    is_flag=True,
    help="Go back to the options before the roll that is under way, has stopped, or was the last.",
)
@with_controller
@with_clear_errors
@with_access
def roll(
    *,
    debug: bool,
    settings: tuple[str, ...],
    max_surge: int,
    max_unavailable: int,
    undo: bool,
    controller: Controller,
    access: CommandAccess,
) -> None:
    """Replace all workers by others with other options, a few at a time.

    Each successor takes requests before its predecessor drains. A successor that does not start
    stops the roll: the others stay as they are, until it is tried again or undone. Without --set
    the workers are replaced by others with the same options. Ctrl-C ends the command; the roll
    goes on, and `kvrelay status` with the same controller shows how far it is.
    """
    if undo and settings:
        raise click.UsageError("give --set or --undo")
    request = pb.RollWorkersRequest(
        options=dict(map(_setting, settings)),
        max_surge=max_surge,
        max_unavailable=max_unavailable,
        undo=undo,
    )
    steps = 0
    failed = ""
    with controller.connected(access) as service:
        for step in service.RollWorkers(request, metadata=access.metadata):
            steps += 1
            failed = failed or step.reason
            click.echo(line_of(step))
    if failed:
        raise DeployError("the roll has stopped; `kvrelay roll --undo` goes back")
    if not steps:
        click.echo("All workers have these options already.")


def _setting(text: str) -> tuple[str, str]:
    name, is_given, value = text.partition("=")
    if not is_given or not name:
        raise click.UsageError(f"--set: must be OPTION=VALUE, got {text!r}")
    return name, value
