"""The steps of drains, scalings and rolls, as operators see them; and the order of a roll."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class DrainPhase(StrEnum):
    """How far a drain has come."""

    DRAINING = "draining"
    """The worker takes no more requests."""
    LEFT = "left"
    """The worker's process has ended."""
    READY = "ready"
    """The worker's successor takes requests."""


@dataclass(frozen=True, slots=True)
class DrainStep:
    """One step of a drain: it has reached a phase."""

    phase: DrainPhase
    incarnation: str
    """The incarnation of the worker that leaves; in `READY`, of its successor."""


class ScalePhase(StrEnum):
    """How far the change of one worker has come."""

    STARTING = "starting"
    """A new worker starts."""
    READY = "ready"
    """A new worker takes requests."""
    DRAINING = "draining"
    """A surplus worker takes no more requests."""
    LEFT = "left"
    """The surplus worker's process has ended."""
    FAILED = "failed"
    """This change was not made; `ScaleStep.reason` says why."""


@dataclass(frozen=True, slots=True)
class ScaleStep:
    """One step of one worker's change: it has reached a phase."""

    worker: str
    phase: ScalePhase
    reason: str = ""
    """Why the change has failed."""


@dataclass(frozen=True, slots=True)
class RollOrder:
    """An order to replace all workers."""

    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the successors that differ from the workers' present ones, as a command line's."""
    max_surge: int = 1
    """The number of successors that start before their predecessors drain."""
    max_unavailable: int = 0
    """The number of workers that leave before their successors start."""
    undo: bool = False
    """Whether to go back to the options before the roll that runs, has stopped, or was the last."""
