"""The cells of the fault matrix: which harm is done to which process in which phase."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

from kvrelay.engine.faults import Fault, FaultAction, FaultEvent
from kvrelay.engine.phases import Phase


class Harm(StrEnum):
    """What is done to the victim."""

    KILL = "kill"
    STOP = "stop 5 s"
    """Shorter than the time after which a worker is given up, so that it goes on."""
    STOP_FOR_GOOD = "stop for good"
    RESTART = "restart at the same address"
    DROP = "drop a message"
    DELAY = "delay a message"
    DUPLICATE = "a message twice"
    FAIL = "break the stream"
    HANG = "a forward hangs"
    FAIL_FORWARD = "a forward fails"
    FAIL_FORWARDS = "every forward fails"
    FAIL_REQUEST = "every forward with one request fails"
    BREAK_DEVICE = "a forward breaks the device"
    CRASH = "a forward crashes"


class Victim(StrEnum):
    """The process that it is done to."""

    PREFILL = "P"
    DECODE = "D"
    DECODE_ALONE = "D alone"
    """A decode worker of a cluster that has no prefill worker: it computes its prompts."""
    ROUTER = "router"


MESSAGE_ACTIONS = {
    Harm.DROP: FaultAction.DROP,
    Harm.DELAY: FaultAction.DELAY,
    Harm.DUPLICATE: FaultAction.DUPLICATE,
    Harm.FAIL: FaultAction.FAIL,
}
BAD = "bad"
"""The request that breaks every forward that it is in."""
FORWARD_FAULTS = {
    Harm.HANG: Fault(FaultAction.HANG, FaultEvent.FORWARD),
    Harm.FAIL_FORWARD: Fault(FaultAction.FAIL, FaultEvent.FORWARD),
    Harm.FAIL_FORWARDS: Fault(FaultAction.FAIL, FaultEvent.FORWARD, always=True),
    Harm.FAIL_REQUEST: Fault(FaultAction.FAIL, FaultEvent.FORWARD, request=BAD, always=True),
    Harm.BREAK_DEVICE: Fault(FaultAction.POISON, FaultEvent.FORWARD),
    Harm.CRASH: Fault(FaultAction.CRASH, FaultEvent.FORWARD),
}
SURVIVED = {Harm.FAIL_FORWARD, Harm.FAIL_REQUEST}
"""Faults of forwards that do not end their worker."""
COMPUTES = {
    Victim.PREFILL: Phase.PREFILLING,
    Victim.DECODE: Phase.DECODING,
    Victim.DECODE_ALONE: Phase.DECODING,
}
"""The phase in which a worker's forwards compute a request."""
EVENTS = {
    (Victim.PREFILL, Phase.QUEUED): FaultEvent.ASK,
    (Victim.PREFILL, Phase.ANNOUNCED): FaultEvent.ANNOUNCE,
    (Victim.PREFILL, Phase.PULLED): FaultEvent.RELEASED,
    (Victim.DECODE, Phase.PREFILLING): FaultEvent.GRANT,
    (Victim.DECODE, Phase.PULLING): FaultEvent.PULL,
    (Victim.DECODE, Phase.PULLED): FaultEvent.DONE,
}
"""The message that a victim sends in a phase, or the read of pages that it starts."""
ROUTER_STREAM = (
    "a router talks to a worker on one ordered stream, which is the lease: to lose a message of "
    "it is to lose the stream, as when the router dies"
)
SENDS_NOTHING = {
    (Victim.PREFILL, Phase.PREFILLING): "P says nothing between the grant and its first page",
    (Victim.PREFILL, Phase.PULLING): "while D reads, P has nothing to say",
    (Victim.PREFILL, Phase.DECODING): "the hand-over is over",
    (Victim.PREFILL, Phase.RETRACTED): "the hand-over is over",
    (Victim.DECODE, Phase.QUEUED): "D waits to be asked",
    (Victim.DECODE, Phase.ANNOUNCED): "D answers an announcement by reading: see pulling",
    (Victim.DECODE, Phase.DECODING): "the hand-over is over",
    (Victim.DECODE, Phase.RETRACTED): "the hand-over is over",
}
COMPUTES_ELSEWHERE = (
    "P computes while it prefills and D while it decodes (D alone in one forward with both); a "
    "router computes nothing"
)
NOT_HANDED_OVER = "a prompt that D computes itself is not handed over"
ALONE_PHASES = {
    Phase.QUEUED,
    Phase.PREFILLING,
    Phase.DECODING,
    Phase.RETRACTED,
    Phase.DRAINING,
}
DRAINS_ALIKE = "a hand-over is the same while its worker drains"
ROUTER_DRAINS = "a router stops taking requests and waits for its own: there is no such phase"


SESSION_PHASES = (
    Phase.SAVING,
    Phase.BORROWING,
    Phase.PREFETCHING,
    Phase.WRITING_BACK,
)
"""The columns of the second table: of sessions, and of host memory below the device."""
TIER_PHASES = (Phase.PREFETCHING, Phase.WRITING_BACK)
STORAGE_PHASES = (Phase.STORING, Phase.FETCHING)
"""They have no column: see `tests/cluster/test_kv_storage.py`."""
_MESSAGES = (Phase.ASKED, Phase.GRANTED)
"""The phases that begin with a message: cells of `FaultEvent.ASK` and `GRANT` are about them."""
PHASES = tuple(phase for phase in Phase if phase not in SESSION_PHASES + STORAGE_PHASES + _MESSAGES)
"""The columns of the first one."""
NOT_BROUGHT_BACK = (
    "what a prefill worker computes is read by the decode worker, which brings nothing back from "
    "the host for it: see D alone"
)


class Memory(Enum):
    """What is done, and with how much memory."""

    PLAIN = MappingProxyType[str, Any]({})
    """Single requests."""
    SESSIONS = MappingProxyType[str, Any]({"prefix_index": "none"})
    """Conversations. A prefill worker finds nothing of them, and reads it from their sessions."""
    TIERS = MappingProxyType[str, Any]({"kv_memory": 512 << 10, "host_kv_memory": 768 << 10})
    """Conversations of which two fit on a device, and three on its host: pages come and go."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Of the cluster."""
        return self.value


class Setup(NamedTuple):
    """The cluster that a cell needs."""

    alone: bool
    """It has decode workers alone."""
    memory: Memory


@dataclass(frozen=True, slots=True)
class Cell:
    """One experiment."""

    harm: Harm
    victim: Victim
    phase: Phase

    def __str__(self) -> str:
        return f"{self.harm}, {self.victim}, {self.phase}"

    @property
    def setup(self) -> Setup:
        """The cluster that it needs."""
        memory = Memory.SESSIONS if self.phase in SESSION_PHASES else Memory.PLAIN
        memory = Memory.TIERS if self.phase in TIER_PHASES else memory
        return Setup(self.victim is Victim.DECODE_ALONE, memory)

    @property
    def event(self) -> FaultEvent | None:
        """The message that is harmed; `None` if the harm is done to a process, or there is none."""
        return EVENTS.get((self.victim, self.phase)) if self.harm in MESSAGE_ACTIONS else None

    @property
    def impossible(self) -> str:
        """Why this cell cannot be run; empty if it can."""
        if self.phase in SESSION_PHASES:
            return self._impossible_in_a_session
        if self.phase is Phase.DRAINING and self.victim is Victim.ROUTER:
            return ROUTER_DRAINS
        if self.victim is Victim.DECODE_ALONE and (
            self.phase not in ALONE_PHASES or self.harm in MESSAGE_ACTIONS
        ):
            return NOT_HANDED_OVER
        if self.harm in FORWARD_FAULTS:
            return "" if COMPUTES.get(self.victim) is self.phase else COMPUTES_ELSEWHERE
        if self.harm not in MESSAGE_ACTIONS or self.event is not None:
            return ""
        if self.phase is Phase.DRAINING:
            return DRAINS_ALIKE
        if self.victim is Victim.ROUTER:
            return ROUTER_STREAM
        return SENDS_NOTHING[self.victim, self.phase]

    @property
    def _impossible_in_a_session(self) -> str:
        if (self.victim, self.phase) == (Victim.DECODE_ALONE, Phase.BORROWING):
            return NOT_HANDED_OVER
        return NOT_BROUGHT_BACK if (self.victim, self.phase) == _BY_PREFILL else ""


_BY_PREFILL = (Victim.DECODE, Phase.PREFETCHING)


def matrix() -> Iterator[Cell]:
    """All cells of the first table, the impossible ones included, row by row."""
    for harm in Harm:
        for victim in Victim:
            for phase in PHASES:
                yield Cell(harm, victim, phase)


def session_matrix() -> Iterator[Cell]:
    """All cells of the second one."""
    for victim in Victim:
        for phase in SESSION_PHASES:
            yield Cell(Harm.KILL, victim, phase)


SHORT = (
    Cell(Harm.KILL, Victim.PREFILL, Phase.PULLING),
    Cell(Harm.DROP, Victim.DECODE, Phase.PULLED),
    Cell(Harm.KILL, Victim.DECODE, Phase.DECODING),
    Cell(Harm.DROP, Victim.PREFILL, Phase.ANNOUNCED),
    Cell(Harm.KILL, Victim.ROUTER, Phase.DECODING),
    Cell(Harm.DUPLICATE, Victim.DECODE, Phase.PULLING),
    Cell(Harm.STOP_FOR_GOOD, Victim.DECODE, Phase.PULLED),
    Cell(Harm.FAIL, Victim.PREFILL, Phase.ANNOUNCED),
    Cell(Harm.RESTART, Victim.PREFILL, Phase.ANNOUNCED),
    Cell(Harm.FAIL_REQUEST, Victim.DECODE, Phase.DECODING),
    Cell(Harm.BREAK_DEVICE, Victim.DECODE, Phase.DECODING),
)
"""The cells that `make chaos-short` runs, a few seconds each."""
SHORT_ALONE = (
    Cell(Harm.KILL, Victim.DECODE_ALONE, Phase.PREFILLING),
    Cell(Harm.FAIL_REQUEST, Victim.DECODE_ALONE, Phase.DECODING),
    Cell(Harm.RESTART, Victim.DECODE_ALONE, Phase.DECODING),
)
"""The same, on a cluster of decode workers alone."""
