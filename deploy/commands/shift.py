"""`kvrelay shift`: routers send new requests to another cluster, and the old one drains."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import click

from kvrelay.deploy.command_errors import with_clear_errors
from kvrelay.deploy.commands.controller_status import ask
from kvrelay.deploy.commands.drain import line_of
from kvrelay.deploy.errors import DeployError
from kvrelay.deploy.options.listen_address import Address
from kvrelay.deploy.options.option_types import ADDRESS
from kvrelay.deploy.reach.find_controller import Controller, with_controller
from kvrelay.deploy.reach.grpc_target import CommandAccess, connected, with_access
from kvrelay.v1 import admin_pb2 as pb
from kvrelay.v1 import admin_pb2_grpc
from kvrelay.wire.cluster_state import ClusterState

_LOOK_SECONDS: Final = 0.2
_COME_BACK_SECONDS: Final = 6.0
"""The time in which a router certainly asks again for a controller that it has lost."""
_OWN_ROUTERS: Final = "Start routers of its own for it, and let clients use these"


@click.command()
@click.option(
    "--to", type=ADDRESS, metavar="HOST:PORT", help="The controller of the cluster to be used."
)
@click.option(
    "--drain",
    is_flag=True,
    help="Then drain all workers of the old cluster: they end, and no others take their places.",
)
@click.option("--back", is_flag=True, help="Let routers use this controller's workers again.")
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds to wait for the routers.",
)
@with_controller
@with_clear_errors
@with_access
def shift(
    *,
    debug: bool,
    to: Address | None,
    drain: bool,
    back: bool,
    timeout: float,
    controller: Controller,
    access: CommandAccess,
) -> None:
    """Let all routers that follow a controller send new requests to the workers of another one.

    Running requests end where they are. Both clusters must be of one version and have loaded the
    same model; all else may differ. But with another --batch-invariant a request that goes on at
    the new cluster may get other tokens. Routers must reach the new controller with the same
    certificates and the same token. The command ends when all routers have followed, and with
    --drain when the old workers have ended. `kvrelay down` then ends the old cluster.
    """
    if (to is None) is not back or (back and drain):
        raise click.UsageError("give --to, perhaps with --drain, or --back")
    old = controller.find()
    access.check(old)
    before = ask(controller, access)
    if to is not None:
        _check(before, ask(Controller(to), access), old, to)
    with connected(old, access.credentials(), admin_pb2_grpc.AdminServiceStub) as service:
        request = pb.ShiftRoutersRequest(successor="" if to is None else str(to))
        service.ShiftRouters(request, metadata=access.metadata)
    state = _until_shifted(controller, access, old, routers=before.routers, seconds=timeout)
    if to is None:
        click.echo(f"New requests go to the workers of {old}.")
        return
    click.echo(f"New requests of all {state.routers} routers go to the workers of {to}.")
    if drain:
        _drain_all(state, controller.find(), access)
        click.echo("All workers have left; `kvrelay down` ends the rest of the cluster.")


def _check(old: ClusterState, new: ClusterState, where: Address, to: Address) -> None:
    """Raise DeployError unless the routers of one cluster can use the other's workers."""
    ours, theirs = ({one.incarnation for one in state.workers} for state in (old, new))
    if ours & theirs - {""}:
        raise DeployError(f"--to: {to} and {where} are one controller")
    if old.version != new.version:
        theirs_is = new.version or "an earlier version"
        raise DeployError(
            f"--to: the cluster of {to} is of {theirs_is}, that of {where} of {old.version}: their "
            f"messages differ. {_OWN_ROUTERS}"
        )
    if new.successor:
        raise DeployError(f"--to: {to} leads its routers to {new.successor}; --back ends that")
    models, others = ({one.model for one in state.workers if one.model} for state in (old, new))
    if not others:
        raise DeployError(f"--to: the cluster of {to} has no workers that have started")
    if models and not others <= models:
        found, served = (", ".join(sorted(names)) for names in (others, models))
        raise DeployError(
            f"--to: the cluster of {to} has loaded another model ({found}) than that of {where} "
            f"({served}). {_OWN_ROUTERS}"
        )


def _until_shifted(
    controller: Controller, access: CommandAccess, old: Address, *, routers: int, seconds: float
) -> ClusterState:
    """Wait until all routers have followed the controller's order. Raises DeployError.

    A router that has lost its connection is not counted until it comes back; a router that has
    ended does not come back. So a count lower than before is believed only after a while. The
    controller itself may be away as well.
    """
    give_up_at = time.monotonic() + seconds
    all_since = None
    while True:
        now = time.monotonic()
        try:
            state = ask(controller, access)
        except DeployError:  # it is away, and its next process goes on with this
            if now > give_up_at:
                raise
            all_since = None
            time.sleep(_LOOK_SECONDS)
            continue
        left = state.routers - state.routers_shifted if state.successor else state.routers_shifted
        all_since = None if left else all_since or now
        sure_seconds = 0.0 if state.routers >= routers else _COME_BACK_SECONDS
        if all_since is not None and now - all_since >= sure_seconds:
            return state
        if now > give_up_at:
            raise DeployError(
                f"{old}: {left} of {state.routers} routers have not followed within {seconds:g} s "
                "(--timeout); their logs say why. Nothing was drained"
            )
        time.sleep(_LOOK_SECONDS)


def _drain_all(state: ClusterState, old: Address, access: CommandAccess) -> None:
    names = [one.name for one in state.workers if not one.removing]

    def drain_one(name: str) -> None:
        request = pb.DrainWorkerRequest(worker=name, remove=True)
        with connected(old, access.credentials(), admin_pb2_grpc.AdminServiceStub) as service:
            for response in service.DrainWorker(request, metadata=access.metadata):
                click.echo(line_of(name, response, remove=True))

    with ThreadPoolExecutor(max(1, len(names))) as threads:
        list(threads.map(drain_one, names))
