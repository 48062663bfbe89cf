"""A request on the decode side."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kvrelay.decode_worker.stream import HandOverStream
from kvrelay.engine.outputs import NO_TIMINGS, Timings
from kvrelay.engine.running import GeneratingRequest
from kvrelay.kv_transfer.hand_over import DecodeHandOver
from kvrelay.kv_transfer.pull import Pull


@dataclass(eq=False, slots=True, kw_only=True)
class DecodeRequest(GeneratingRequest):
    """A prompt to take over and to continue."""

    stream: HandOverStream
    hand_over: DecodeHandOver
    pulls: list[Pull] = field(default_factory=list)
    """Its reads, ended ones included: they fence its pages."""
    reading: set[Pull] = field(default_factory=set)
    """Those of its reads whose end was not told."""
    read_at: float = 0.0
    """When one of them last began or ended."""
    announced_at: float = 0.0
    activated_at: float = 0.0

    def timings(self) -> Timings:
        """What this side saw, at the request's end."""
        if not self.activated_at:
            return NO_TIMINGS
        return Timings(
            transfer=self.activated_at - self.announced_at,
            decode=time.monotonic() - self.activated_at,
        )
