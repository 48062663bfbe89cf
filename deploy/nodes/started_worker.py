"""A worker that runs: its place in Ray, its process and its node."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.deploy.nodes.worker_process import ProcessIdentity
from kvrelay.wire.worker_info import WorkerInfo


@dataclass(frozen=True, slots=True)
class ActorPlace:
    """The place of a worker's actor."""

    group: str
    """The name of a placement group."""
    index: int
    """The index of the bundle in that group."""


@dataclass(frozen=True, slots=True)
class Started:
    """A worker that has started."""

    info: WorkerInfo
    process: ProcessIdentity | None
    """The worker's process; None where the system does not tell it."""
    node: str = ""
    """The address of its node in Ray."""
