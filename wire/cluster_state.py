"""What a controller says of itself and of its workers, to operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvrelay.wire.worker_info import WorkerRole


class WorkerPhase(StrEnum):
    """How a worker is."""

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
    """Of its process, on its node."""
    removing: bool = False
    """No other incarnation follows."""
    revision: int = 0
    """Of its options: 0 before the first roll."""
    model: str = ""
    """One hash for all that it has loaded."""


@dataclass(frozen=True, slots=True)
class RollState:
    """All workers are being replaced."""

    revision: int
    """That they are to have."""
    replaced: int
    workers: int
    """That there are to replace."""
    options: Mapping[str, str] = field(default_factory=dict)
    """That this revision gives them, beside those of the start."""
    failed: str = ""
    """Why it has stopped; empty while it goes on."""


@dataclass(frozen=True, slots=True)
class ClusterState:
    """A controller and its workers."""

    name: str
    """Of the cluster; empty if it ends with its command."""
    epoch: int
    """Of the controller: each one has a greater one than all before it."""
    leads: bool
    """Whether the store has said lately that this is the latest controller."""
    changing: bool
    """Whether the number of workers is being changed."""
    pid: int
    """Of the controller's process."""
    uptime_seconds: float
    """Of this controller."""
    workers: tuple[WorkerState, ...] = ()
    """In the order of their names."""
    roll: RollState | None = None
    """The roll that is under way, or has stopped."""
    version: str = ""
    """Of the controller."""
    successor: str = ""
    """``host:port`` of the controller that routers are to follow; empty: this one."""
    routers: int = 0
    """That follow this controller's list."""
    routers_shifted: int = 0
    """Of these, those whose new requests go to the successor's workers; if there is no successor,
    those whose new requests do not go to this controller's workers yet."""
