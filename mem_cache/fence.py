"""Fences: work that must have ended before memory may be used again."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class FenceKind(StrEnum):
    """The kind of work that may still touch memory, ordered by how long it may last."""

    FORWARD = "forward"
    """A forward that reads or writes the memory."""
    READ = "read"
    """A transfer that is running."""
    FAILED_READ = "failed_read"
    """A transfer that has failed: its bytes may still arrive."""


class Fence(Protocol):
    """An interface to something in flight that still reads or writes pages or a row.

    A fence passes once and stays passed. It passes by proof that the reader or writer has ended,
    never because time went by.
    """

    @property
    def kind(self) -> FenceKind:
        """The kind of reader or writer."""
        ...

    def passed(self) -> bool:
        """Whether the reader or writer has provably ended. Cheap, never blocks."""
        ...


@dataclass(slots=True)
class StepClock:
    """The counts of the forwards that were launched and that have ended, in order.

    A forward has ended when its event has passed: none of its work runs on the device any more.
    """

    launched: int = 0
    ended: int = 0

    @property
    def running(self) -> int:
        """The number of forwards that were launched and have not ended."""
        return self.launched - self.ended

    def launch(self) -> int:
        """Count a launch. Returns the forward's number."""
        self.launched += 1
        return self.launched

    def end(self) -> None:
        """Count the end of the oldest running forward."""
        assert self.ended < self.launched, "a forward ended that was never launched"
        self.ended += 1


@dataclass(frozen=True, slots=True)
class StepFence:
    """A fence that passes when forward number `step` has ended."""

    clock: StepClock = field(repr=False)
    step: int

    @property
    def kind(self) -> FenceKind:
        """See `Fence`."""
        return FenceKind.FORWARD

    def passed(self) -> bool:
        """See `Fence`."""
        return self.clock.ended >= self.step
