"""The state of a controller and its workers, as it is shown to operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvrelay.wire.worker_info import WorkerRole


class WorkerPhase(StrEnum):
    """The phase of a worker's life, as its controller sees it."""

    STARTING = "starting"
    """It has no incarnation yet."""
    LIVE = "live"
    """It takes requests."""
    DRAINING = "draining"
    """It takes no more requests."""
    LOST = "lost"
    """It cannot be reached, or its successor is starting."""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker, and its latest incarnation."""

    name: str
    role: WorkerRole
    phase: WorkerPhase
    incarnation: str = ""
    address: str = ""
    """``host:port`` of its gRPC services."""
    node: str = ""
    """The address of its node in Ray."""
    pid: int = 0
    """The process id of the worker, on its node."""
    removing: bool = False
    """The worker is being removed: no other incarnation follows."""
    revision: int = 0
    """The revision of its options: 0 before the first roll."""
    model: str = ""
    """One hash of everything that it has loaded."""
    last_end: str = ""
    """Why its latest process that died did so; empty: none has, since this controller leads."""


@dataclass(frozen=True, slots=True)
class RollState:
    """A roll: all workers are being replaced, one after another."""

    revision: int
    """The revision of options that the workers are to have afterwards."""
    replaced: int
    workers: int
    """The number of workers to replace."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options that this revision gives the workers, beside those of the start."""
    failed: str = ""
    """Why the roll has stopped; empty while it goes on."""


@dataclass(frozen=True, slots=True)
class ClusterState:
    """A controller and its workers."""

    name: str
    """The cluster's name; empty if the cluster ends with its command."""
    epoch: int
    """The controller's epoch: each controller has a greater one than all before it."""
    leads: bool
    """Whether the store has lately confirmed that this is the latest controller."""
    changing: bool
    """Whether the number of workers is being changed."""
    pid: int
    """The process id of the controller."""
    uptime_seconds: float
    """Seconds since this controller started."""
    workers: tuple[WorkerState, ...] = ()
    """The workers, in the order of their names."""
    roll: RollState | None = None
    """The roll that is under way, or has stopped."""
    version: str = ""
    """The version of the controller."""
    successor: str = ""
    """``host:port`` of the controller that routers are to follow; empty: this one."""
    routers: int = 0
    """The number of routers that follow this controller's list."""
    routers_shifted: int = 0
    """The number of these routers that have shifted.

    With a successor: their new requests go to its workers. Without: their new requests
    do not go to this controller's workers yet.
    """
