"""One request's hand-over stream as the decode side holds it, and what is posted about it.

The engine thread sends messages and `CloseStream` into the stream through the outbox. The event
loop carries them (`hand_over_client.py`), and posts `PeerMessage` and `StreamLost` to the inbox.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvrelay.engine.scheduler.outbox import MessageStream
from kvrelay.kv_transfer.hand_over.sequencer import Sequencer
from kvrelay.wire.hand_over import FromDecode, FromPrefill, Sequenced
from kvrelay.wire.load import PeerTransport
from kvrelay.wire.output import FailureReason
from kvrelay.wire.submit import RequestKey
from kvrelay.wire.worker_info import WorkerAddress


@dataclass(frozen=True, slots=True)
class CloseStream:
    """A command to close the stream, so that the prefill side may release the request's pages."""

    unreadable: bool = False
    """Whether a read from the prefill worker has failed, or does not end: then connect to it
    anew."""


class HandOverStream(MessageStream[Sequenced[FromDecode]]):
    """One request's hand-over stream.

    Args:
        key: the request's.
        peer: the prefill worker that computes its prompt.
    """

    def __init__(self, key: RequestKey, peer: WorkerAddress) -> None:
        super().__init__()
        self.key = key
        self.peer = peer
        self.sequencer = Sequencer(time.monotonic())
        self.is_open = False
        """Whether the handshake is over: from then on the peer answers heartbeats, or is given
        up."""
        self.unreadable = False
        """Whether the connection to the peer is broken, so that later streams need another one."""

    def begin(self, now: float) -> None:
        """Note that the stream is open; the peer's silence counts from `now` (monotonic clock)."""
        self.sequencer.heard_at = now
        self.is_open = True

    def deliver(self, message: Sequenced[FromDecode] | CloseStream) -> None:
        """Queue a message to be sent, or close the stream after what is queued already."""
        if isinstance(message, CloseStream):
            self.unreadable = message.unreadable
            self.close()
        else:
            super().deliver(message)


@dataclass(frozen=True, slots=True)
class OpenStream:
    """A command to the hand-over client: connect to the stream's peer and carry the stream."""

    stream: HandOverStream


@dataclass(frozen=True, slots=True)
class ConnectAnew:
    """A command to the hand-over client: a read from a prefill worker failed, so shake hands again.

    It is sent whether or not a request waits: the pages of the failed read come back only if the
    peer answers, or dies.
    """

    peer: WorkerAddress


@dataclass(frozen=True, slots=True)
class PeerMessage:
    """A message to the engine: the prefill worker has sent a message."""

    stream: HandOverStream
    sequenced: Sequenced[FromPrefill]


@dataclass(frozen=True, slots=True)
class StreamLost:
    """A message to the engine: the stream and its lease on the prefill side's pages have ended."""

    stream: HandOverStream
    detail: str
    cause: FailureReason = FailureReason.PEER_LOST


@dataclass(frozen=True, slots=True)
class PeerProbed:
    """A message to the engine: a prefill worker's transport was measured, and may be refused."""

    transport: PeerTransport
