"""The workers on this node as Ray knows them, and the notice to Ray that the node leaves."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

from kvrelay.deploy.errors import ClusterError
from kvrelay.deploy.nodes.joined_ray import JoinedRay
from kvrelay.deploy.nodes.local_ray import ray
from kvrelay.deploy.nodes.worker_host import actor_class_name
from kvrelay.wire.worker_info import WorkerRole

_GOES: Final = 2  # DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION of ray's autoscaler.proto
_NAMESPACE: Final = "kvrelay/leave"
"""Ray's namespace of this command, in which no cluster has workers."""
_CLASSES: Final = {actor_class_name(role) for role in WorkerRole}


@dataclass(frozen=True, slots=True)
class NodeWorker:
    """A worker's process on this node."""

    name: str
    pid: int


def leave_node(address: str, seconds: float) -> list[NodeWorker]:
    """Let Ray place nothing more on this node; return the workers that run here.

    Raises ClusterError if Ray cannot be joined or does not agree.

    Args:
        address: the address of Ray's head, or ``auto``.
        seconds: the time after which the node may be gone.
    """
    with JoinedRay(address, _NAMESPACE):
        node = ray.get_runtime_context().get_node_id()
        client = ray._private.worker.global_worker.gcs_client
        gone_at_ms = int((time.time() + seconds) * 1000)
        accepted, why = client.drain_node(node, _GOES, "kvrelay leave", gone_at_ms)
        if not accepted:
            raise ClusterError(f"Ray does not let this node go: {why}")
        return [
            NodeWorker(_name(actor), int(actor["Pid"]))
            for actor in ray._private.state.actors().values()
            if _runs_on(actor, node)
        ]


def _runs_on(actor: dict[str, Any], node: str) -> bool:
    return (
        actor["Address"]["NodeID"] == node
        and actor["State"] == "ALIVE"
        and actor["ActorClassName"] in _CLASSES
    )


def _name(actor: dict[str, Any]) -> str:
    return str(actor["Name"] or actor["ActorID"])
