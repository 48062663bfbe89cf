"""The state of a controller and its workers, as operators see it."""

from __future__ import annotations

import os

from kvrelay.deploy.controller.records.journal import Journal
from kvrelay.deploy.controller.records.leases import Leases
from kvrelay.deploy.controller.records.ordered_changes import Roll
from kvrelay.deploy.controller.records.records import WorkerRecord
from kvrelay.deploy.controller.supervision.membership import Membership
from kvrelay.wire.cluster_state import ClusterState, RollState, WorkerPhase, WorkerState


def state_of(
    name: str, journal: Journal, leases: Leases, members: Membership, *, uptime_seconds: float
) -> ClusterState:
    """Return the state of this process's controller and of all workers that are wanted.

    Args:
        name: the cluster's name.
        journal: has the workers' records.
        leases: tell whether this controller leads.
        members: tell which workers live, and which drain.
        uptime_seconds: the controller's age.
    """
    workers, roll = journal.workers, journal.cluster.roll
    return ClusterState(
        name=name,
        epoch=leases.epoch,
        leads=leases.is_held(leases.clock()),
        changing=journal.cluster.change is not None,
        pid=os.getpid(),
        uptime_seconds=uptime_seconds,
        workers=tuple(_worker_state(workers[one], members) for one in sorted(workers)),
        roll=None if roll is None else _roll_state(roll),
    )


def _worker_state(record: WorkerRecord, members: Membership) -> WorkerState:
    started, removing, revision = record.started, record.removing, record.revision.number
    last_end = members.last_end(record.name)
    if started is None:
        return WorkerState(
            record.name,
            record.role,
            WorkerPhase.STARTING,
            removing=removing,
            revision=revision,
            last_end=last_end,
        )
    info, phase = started.info, WorkerPhase.LOST
    if members.live.get(record.name) == info:
        drains = members.is_draining(record.name)
        phase = WorkerPhase.DRAINING if drains else WorkerPhase.LIVE
    return WorkerState(
        record.name,
        record.role,
        phase,
        incarnation=info.incarnation,
        address=info.address,
        node=started.node,
        pid=info.pid,
        removing=removing,
        revision=revision,
        model=info.model.name,
        last_end=last_end,
    )


def _roll_state(roll: Roll) -> RollState:
    return RollState(
        revision=roll.target.number,
        replaced=roll.workers - len(roll.left),
        workers=roll.workers,
        options=roll.target.options,
        failed=roll.failed,
    )
