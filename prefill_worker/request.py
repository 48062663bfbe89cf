"""A request on the prefill side, and the stream that its decode worker opened."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvrelay.engine.scheduler.outbox import MessageStream
from kvrelay.engine.scheduler.request import Request
from kvrelay.kv_transfer.hand_over.prefill_side import PrefillHandOver
from kvrelay.kv_transfer.hand_over.sequencer import Sequencer
from kvrelay.kv_transfer.hand_over.states import PrefillState
from kvrelay.kv_transfer.pull import Pull
from kvrelay.mem_cache.host.host_page import HostPage
from kvrelay.wire.hand_over import FromDecode, FromPrefill, History, PageSum, Sequenced
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
    """A decode worker has opened the hand-over stream of a request."""

    stream: HandOverStream


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """The decode worker has sent a message."""

    stream: HandOverStream
    sequenced: Sequenced[FromDecode]


@dataclass(frozen=True, slots=True)
class PagesHashed:
    """The pages whose sums the decode worker has sent were hashed here, too."""

    stream: HandOverStream
    own: Sequence[PageSum]
    theirs: Sequence[PageSum]


@dataclass(frozen=True, slots=True)
class HistoryRead:
    """A read of what the decode worker has of a request's prompt has ended, well or not."""

    stream: HandOverStream
    pull: Pull


@dataclass(frozen=True, slots=True)
class HistoryHashed:
    """What was read of it, and is to be compared, was hashed."""

    stream: HandOverStream
    sums: tuple[PageSum, ...]


@dataclass(slots=True)
class HistoryLoad:
    """The read of one request's history."""

    pull: Pull
    first_page: int
    """Of the prompt, that is read; those before it are in the prefix index."""
    end_page: int
    begun: float
    """By `time.monotonic`."""
    is_read: bool = False
    """The read has ended well; what was read may still have to be hashed."""


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """The stream has ended, and with it the lease on the request's pages."""

    stream: HandOverStream


StreamEvent: TypeAlias = StreamOpened | StreamMessage | StreamClosed
"""What the carrier of the streams posts."""
PrefillMessage: TypeAlias = StreamEvent | PagesHashed | HistoryRead | HistoryHashed
"""What the prefill scheduler takes beside the commands that every scheduler takes."""


@dataclass(eq=False, slots=True, kw_only=True)
class PrefillRequest(Request):
    """A prompt to compute and to hand over."""

    hand_over: PrefillHandOver
    stream: HandOverStream | None = None
    announced: bool = False
    """Its decode worker may read pages of it."""
    history: History | None = None
    """What its decode worker lends of it."""
    load: HistoryLoad | None = None
    """The read of that, ended or not: it fences its pages."""
    lent: list[HostPage] = field(default_factory=list)
    """Pages of the host tier that its decode worker may read: held until its stream ends."""
    host_looked_at: int = -1
    """The tier's version when all that it had of the request was announced."""

    @property
    def is_loading(self) -> bool:
        """Whether what its decode worker lends is being read, or was and is not confirmed."""
        return self.hand_over.state in (PrefillState.LOADING, PrefillState.LOADED)

    @property
    def can_ask(self) -> bool:
        """Whether its decode worker has opened the stream and was not asked for memory yet."""
        return self.stream is not None and self.hand_over.state is PrefillState.QUEUED

    @property
    def decode_incarnation(self) -> str:
        """The worker that takes it over; empty before its stream has opened."""
        return self.stream.decode_incarnation if self.stream else ""
