"""Faults that are injected into a worker of a running cluster."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.deploy.controller.cluster import Cluster
from kvrelay.deploy.nodes.worker_host import WorkerHost
from kvrelay.engine.faults import Fault


async def arm(cluster: Cluster, worker: str, faults: Sequence[Fault]) -> None:
    """Inject these faults into a worker's present incarnation, if it was built for faults."""
    await cluster._supervisors[worker]._actor.call(WorkerHost.arm, faults)


async def faults_fired(cluster: Cluster, worker: str) -> int:
    """Count which of the faults that were last armed in that worker have happened."""
    return await cluster._supervisors[worker]._actor.call(WorkerHost.faults_fired)
