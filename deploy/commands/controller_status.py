"""`kvrelay status` of a controller: the leader of the cluster, and each worker's state."""

from __future__ import annotations

from kvrelay.deploy.reach.find_controller import Controller
from kvrelay.deploy.reach.grpc_target import CommandAccess
from kvrelay.v1 import controller_pb2, controller_pb2_grpc
from kvrelay.wire.cluster_state import ClusterState, RollState
from kvrelay.wire.messages import CLUSTER_STATE

_SECONDS = 5.0


def ask(controller: Controller, access: CommandAccess) -> ClusterState:
    """Ask a controller for its cluster's state. Raises DeployError."""
    with controller.connected(access, controller_pb2_grpc.ControllerServiceStub) as service:
        answer = service.GetCluster(
            controller_pb2.GetClusterRequest(), timeout=_SECONDS, metadata=access.metadata
        )
    return CLUSTER_STATE.from_message(answer)


def as_text(state: ClusterState) -> str:
    """Return a line for the controller, and one for each worker."""
    name = f"cluster {state.name}" if state.name else "a cluster that ends with its command"
    leads = "" if state.leads else ", DOES NOT LEAD NOW"
    changing = ", the number of workers is being changed" if state.changing else ""
    head = (
        f"{name}: epoch {state.epoch}, controller {state.pid}, up {state.uptime_seconds:.0f} s"
        f"{leads}{changing}"
    )
    if state.successor:
        followed = f"{state.routers_shifted} of {state.routers} routers have followed"
        head += f"\n  new requests go to the workers of {state.successor}: {followed}"
    lines = [head, *([] if state.roll is None else [_roll_text(state.roll)])]
    rolled = any(one.revision for one in state.workers)
    for one in state.workers:
        phase = f"{one.phase}{', to be removed' if one.removing else ''}"
        where = f"{one.incarnation}  {one.address}  process {one.pid} on {one.node}"
        revision = f"revision {one.revision}  " if rolled else ""
        where = f"{revision}{where if one.incarnation else ''}"
        lines.append(f"  {one.name:<12} {phase:<10} {where}".rstrip())
        if one.last_end:
            lines.append(f"{'':<15}its last process died: {one.last_end}")
    return "\n".join(lines)


def _roll_text(roll: RollState) -> str:
    options = ", ".join(f"{name}={text}" for name, text in sorted(roll.options.items()))
    done = f"{roll.replaced} of {roll.workers} workers are replaced"
    line = f"  roll to revision {roll.revision} ({options or 'the options of the start'}): {done}"
    if not roll.failed:
        return line
    return f"{line}\n  it HAS STOPPED: {roll.failed} (`kvrelay roll --undo` goes back)"
