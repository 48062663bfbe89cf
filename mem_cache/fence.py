"""What must have ended before memory may be used again."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class FenceKind(StrEnum):
    """What may still touch memory, from what ends by itself to what may not."""

    FORWARD = "forward"
    """A forward that reads or writes it."""
    READ = "read"
    """A transfer that runs."""
    FAILED_READ = "failed_read"
    """A transfer that has failed: its bytes may still arrive."""


class Fence(Protocol):
    """Something in flight that still reads or writes pages or a row.

    A fence passes once and stays passed. It passes by proof that the reader or
    writer has ended, never because time went by.
    """

    @property
    def kind(self) -> FenceKind:
        """What it is that reads or writes."""
        ...

    def passed(self) -> bool:
        """Whether the reader or writer has provably ended. Cheap, never blocks."""
        ...


@dataclass(slots=True)
class StepClock:
    """Counts the forwards that were launched and those that have ended, in order.

    One has ended when its event has passed: nothing of it runs on the device any more.
    """

    launched: int = 0
    ended: int = 0

    @property
    def running(self) -> int:
        """Forwards that were launched and have not ended."""
        return self.launched - self.ended

    def launch(self) -> int:
        """A forward starts; returns its number."""
        self.launched += 1
        return self.launched

    def end(self) -> None:
        """The oldest running forward has ended."""
        assert self.ended < self.launched, "a forward ended that was never launched"
        self.ended += 1


@dataclass(frozen=True, slots=True)
class StepFence:
    """Passes when forward number `step` has ended."""

    clock: StepClock = field(repr=False)
    step: int

    @property
    def kind(self) -> FenceKind:
        """See `Fence`."""
        return FenceKind.FORWARD

    def passed(self) -> bool:
        """See `Fence`."""
        return self.clock.ended >= self.step
