"""A request on the prefill side, and the stream that its decode worker opened."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from kvrelay.engine.phases import Phase
from kvrelay.engine.scheduler.attempt_trace import ASK, HANDED_OVER, PhaseSpan
from kvrelay.engine.scheduler.outbox import MessageStream
from kvrelay.engine.scheduler.request import Request
from kvrelay.kv_transfer.hand_over.prefill_side import PrefillHandOver
from kvrelay.kv_transfer.hand_over.sequencer import Sequencer
from kvrelay.kv_transfer.hand_over.states import PrefillState
from kvrelay.kv_transfer.pull import Pull
from kvrelay.mem_cache.host.host_page import HostPage
from kvrelay.wire.hand_over import FromDecode, FromPrefill, History, PageSum, Sequenced
from kvrelay.wire.request_progress import RequestPhase
from kvrelay.wire.submit import RequestKey


class HandOverStream(MessageStream[Sequenced[FromPrefill]]):
    """One request's hand-over stream, as the prefill side holds it."""

    def __init__(self, key: RequestKey, decode_incarnation: str) -> None:
        super().__init__()
        self.key = key
        self.decode_incarnation = decode_incarnation
        self.sequencer = Sequencer(time.monotonic())


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """A message: a decode worker has opened the hand-over stream of a request."""

    stream: HandOverStream


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """A message: the decode worker has sent a message."""

    stream: HandOverStream
    sequenced: Sequenced[FromDecode]


@dataclass(frozen=True, slots=True)
class PagesHashed:
    """A message: the pages whose sums the decode worker has sent were hashed here, too."""

    stream: HandOverStream
    own: Sequence[PageSum]
    theirs: Sequence[PageSum]


@dataclass(frozen=True, slots=True)
class HistoryRead:
    """A message: a read of the decode worker's pages of a prompt has ended, well or not."""

    stream: HandOverStream
    pull: Pull


@dataclass(frozen=True, slots=True)
class HistoryHashed:
    """A message: the pages of such a read that are to be compared were hashed."""

    stream: HandOverStream
    sums: tuple[PageSum, ...]


@dataclass(slots=True)
class HistoryLoad:
    """The read of one request's history."""

    pull: Pull
    first_page: int
    """The first page of the prompt that is read; those before it are in the prefix index."""
    end_page: int
    begun: float
    """The moment when it began, by `time.monotonic`."""
    is_read: bool = False
    """Whether the read has ended well; its pages may still have to be hashed."""


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """A message: the stream has ended, and with it the lease on the request's pages."""

    stream: HandOverStream


StreamEvent: TypeAlias = StreamOpened | StreamMessage | StreamClosed
"""The messages that the carrier of the streams posts."""
PrefillMessage: TypeAlias = StreamEvent | PagesHashed | HistoryRead | HistoryHashed
"""The messages of the prefill scheduler, beside the commands that every scheduler takes."""


@dataclass(eq=False, slots=True, kw_only=True)
class PrefillRequest(Request):
    """A request whose prompt is computed here and handed over."""

    SPANS: ClassVar[Sequence[PhaseSpan]] = (ASK, HANDED_OVER)
    SHOWN: ClassVar[Mapping[Phase, RequestPhase]] = {
        **Request.SHOWN,
        Phase.ASKED: RequestPhase.ASKED,
        Phase.GRANTED: RequestPhase.GRANTED,
        Phase.BORROWING: RequestPhase.READING,
    }

    hand_over: PrefillHandOver
    stream: HandOverStream | None = None
    announced: bool = False
    """Whether its decode worker may read pages of it."""
    history: History | None = None
    """The history that its decode worker lends."""
    load: HistoryLoad | None = None
    """The read of the history, ended or not: it fences its pages."""
    lent: list[HostPage] = field(default_factory=list)
    """Pages of the host tier that its decode worker may read: held until its stream ends."""
    host_looked_at: int = -1
    """The tier's version when all its pages of the request were announced."""

    @property
    def is_loading(self) -> bool:
        """Whether the history is being read, or was read and is not confirmed."""
        return self.hand_over.state in (PrefillState.LOADING, PrefillState.LOADED)

    @property
    def can_ask(self) -> bool:
        """Whether its decode worker has opened the stream and was not asked for memory yet."""
        return self.stream is not None and self.hand_over.state is PrefillState.QUEUED

    @property
    def decode_incarnation(self) -> str:
        """The worker that takes it over; empty before its stream has opened."""
        return self.stream.decode_incarnation if self.stream else ""

    @property
    def peer(self) -> str:
        """The worker that takes it over; empty before its stream has opened."""
        return self.decode_incarnation
