"""The requests of a decode worker."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from kvrelay.decode_worker.hand_over_stream import HandOverStream
from kvrelay.engine.phases import Phase
from kvrelay.engine.scheduler.attempt_trace import DECODE, GRANT, TAKEN_OVER, PhaseSpan
from kvrelay.engine.scheduler.running_batch import GeneratingRequest
from kvrelay.kv_transfer.hand_over.decode_side import DecodeHandOver
from kvrelay.kv_transfer.hand_over.states import DecodeState
from kvrelay.kv_transfer.pull import Pull, PullState
from kvrelay.wire.agent_description import AgentDescription
from kvrelay.wire.hand_over import PageSum
from kvrelay.wire.output import PhaseTimings
from kvrelay.wire.request_progress import RequestPhase

_SOON_SECONDS = 1.0
"""The longest time without progress after which a request still counts as generating soon."""


@dataclass(frozen=True, slots=True)
class AgentReadable:
    """A message: prefill workers can read this one from now on."""

    agent: AgentDescription


@dataclass(frozen=True, slots=True)
class LentHashed:
    """A message: lent pages whose sums a prefill worker has sent were hashed here."""

    stream: HandOverStream
    own: Sequence[PageSum]
    theirs: Sequence[PageSum]


@dataclass(eq=False, slots=True, kw_only=True)
class DecodeRequest(GeneratingRequest):
    """A request to continue. Its prompt is computed here, unless this is a `HandedOverRequest`."""

    @property
    def peer(self) -> str:
        """The incarnation of the prefill worker that computes it; empty: this worker does."""
        return ""

    @property
    def wants_memory(self) -> bool:
        """Whether its whole input is to be reserved as soon as that fits."""
        return self.lease is None

    @property
    def findable_len(self) -> int:
        """Tokens of its input that may come from the prefix index."""
        return self.reusable_len


@dataclass(eq=False, slots=True, kw_only=True)
class HandedOverRequest(DecodeRequest):
    """A request whose prompt a prefill worker computes, to be taken over and continued."""

    SPANS: ClassVar[Sequence[PhaseSpan]] = (GRANT, TAKEN_OVER, DECODE)
    SHOWN: ClassVar[Mapping[Phase, RequestPhase]] = {
        **DecodeRequest.SHOWN,
        Phase.ASKED: RequestPhase.ASKED,
        Phase.GRANTED: RequestPhase.GRANTED,
        Phase.ANNOUNCED: RequestPhase.READING,
    }

    stream: HandOverStream
    hand_over: DecodeHandOver
    pulls: list[Pull] = field(default_factory=list)
    """All its reads, ended ones included: they fence its pages."""
    reading: set[Pull] = field(default_factory=set)
    """The reads that have not ended yet."""
    read_at: float = 0.0
    """The moment when one of them last began or ended."""
    announced_at: float = 0.0
    """The moment when the last of its pages were announced."""

    @property
    def peer(self) -> str:
        """The incarnation of the prefill worker that computes the prompt."""
        return self.stream.peer.incarnation

    @property
    def wants_memory(self) -> bool:
        """Whether its prefill worker has asked for memory and has not been granted it yet."""
        return self.hand_over.state is DecodeState.ASKED

    @property
    def findable_len(self) -> int:
        """Tokens of its input that the prefix index may have: all, as none is computed here."""
        return self.input_len

    @property
    def pulled_pages(self) -> int:
        """Pages of the first pool whose reads have ended well."""
        done = [pull for pull in self.pulls if pull.state is PullState.DONE]
        return sum(len(pull.local_pages[0]) for pull in done)

    @property
    def is_ahead(self) -> bool:
        """Whether it was granted memory, but its prompt is not being computed yet."""
        return self.hand_over.state is DecodeState.GRANTED and not self.hand_over.begun

    @property
    def is_being_computed(self) -> bool:
        """Whether its prefill worker has begun to compute it, but has not announced all of it."""
        return self.hand_over.begun and not self.announced_at

    def generates_soon(self, now: float) -> bool:
        """Whether all of its pages were announced, and it has not been stuck since."""
        if not self.announced_at or self.activated_at:
            return False
        return now - max(self.announced_at, self.read_at) < _SOON_SECONDS

    def activate_taken_over(self) -> None:
        """Note that all of its pages were read and found right."""
        self.activate(PhaseTimings(transfer_seconds=time.monotonic() - self.announced_at))
