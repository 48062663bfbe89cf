"""A request on the decode side."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kvrelay.decode_worker.stream import HandOverStream
from kvrelay.engine.outputs import Timings
from kvrelay.engine.request import Request
from kvrelay.engine.stop import StopChecker
from kvrelay.kv_transfer.hand_over import DecodeHandOver
from kvrelay.kv_transfer.pull import Pull


@dataclass(eq=False, slots=True, kw_only=True)
class DecodeRequest(Request):
    """A prompt to take over and to continue."""

    stream: HandOverStream
    hand_over: DecodeHandOver
    checker: StopChecker
    pulls: list[Pull] = field(default_factory=list)
    """Its reads, ended ones included: they fence its pages."""
    bypassed: int = 0
    """Requests that were let in while this one, before them, did not fit."""
    announced_at: float = 0.0
    activated_at: float = 0.0

    @property
    def most_tokens(self) -> int:
        """Tokens whose KV it may come to hold: all but the last one sampled."""
        return len(self.prompt_ids) + self.stops.max_tokens - 1

    def timings(self) -> Timings:
        """What this side saw, at the request's end."""
        if not self.activated_at:
            return Timings()
        return Timings(
            transfer=self.activated_at - self.announced_at,
            decode=time.monotonic() - self.activated_at,
        )
