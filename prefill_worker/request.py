"""A request on the prefill side, and the stream that its decode worker opened."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.engine.outbox import MessageStream
from kvrelay.engine.outputs import RequestKey
from kvrelay.engine.request import Request
from kvrelay.kv_transfer.checksums import PageSum
from kvrelay.kv_transfer.hand_over import (
    FromDecode,
    FromPrefill,
    PrefillHandOver,
    PrefillState,
    Said,
    Words,
)


class HandOverStream(MessageStream[Said[FromPrefill]]):
    """One request's hand-over stream, as the prefill side holds it."""

    def __init__(self, key: RequestKey, decode_incarnation: str) -> None:
        super().__init__()
        self.key = key
        self.decode_incarnation = decode_incarnation
        self.words = Words(time.monotonic())


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """A decode worker wants to take a request over."""

    stream: HandOverStream


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """The decode worker says something."""

    stream: HandOverStream
    said: Said[FromDecode]


@dataclass(frozen=True, slots=True)
class PagesHashed:
    """The pages that the decode worker has told sums of were hashed here, too."""

    stream: HandOverStream
    own: Sequence[PageSum]
    theirs: Sequence[PageSum]


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """The lease on the request's pages has ended."""

    stream: HandOverStream


@dataclass(eq=False, slots=True, kw_only=True)
class PrefillRequest(Request):
    """A prompt to compute and to hand over."""

    hand_over: PrefillHandOver
    stream: HandOverStream | None = None
    granted: bool = False
    """Its decode worker holds memory for it, and may be reading."""

    @property
    def may_be_asked_for(self) -> bool:
        """Whether its decode worker is there and was not asked yet."""
        return self.stream is not None and self.hand_over.state is PrefillState.QUEUED

    @property
    def decode_incarnation(self) -> str:
        """The worker that takes it over; empty before its stream has opened."""
        return self.stream.decode_incarnation if self.stream else ""
