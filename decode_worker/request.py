"""A request on the decode side."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kvrelay.decode_worker.hand_over_stream import HandOverStream
from kvrelay.engine.scheduler.running_batch import GeneratingRequest
from kvrelay.kv_transfer.hand_over.decode_side import DecodeHandOver
from kvrelay.kv_transfer.pull import Pull
from kvrelay.wire.output import NO_TIMINGS, PhaseTimings


@dataclass(eq=False, slots=True, kw_only=True)
class DecodeRequest(GeneratingRequest):
    """A prompt to take over and to continue."""

    stream: HandOverStream
    hand_over: DecodeHandOver
    pulls: list[Pull] = field(default_factory=list)
    """Its reads, ended ones included: they fence its pages."""
    reading: set[Pull] = field(default_factory=set)
    """The reads that have not ended yet."""
    read_at: float = 0.0
    """When one of them last began or ended."""
    announced_at: float = 0.0
    activated_at: float = 0.0

    def timings(self) -> PhaseTimings:
        """Seconds of the phases until now, as far as this worker saw them."""
        if not self.activated_at:
            return NO_TIMINGS
        return PhaseTimings(
            transfer_seconds=self.activated_at - self.announced_at,
            decode_seconds=time.monotonic() - self.activated_at,
        )
