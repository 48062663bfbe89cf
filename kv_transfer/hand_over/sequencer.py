"""Numbers on hand-over messages, by which lost and repeated ones are noticed.

Each side numbers its messages from 1 on. Now and then the decode side sends a `Heartbeat`, which
the prefill side answers. It carries the number of the previous message. So a lost last message is
noticed, too, and so is a peer that no longer answers.
"""

from __future__ import annotations

from typing import TypeVar

from kvrelay.kv_transfer.errors import ProtocolError
from kvrelay.wire.hand_over import Heartbeat, Sequenced

MessageT = TypeVar("MessageT")


class Sequencer:
    """The numbers of the messages that one side sends and receives on a stream.

    Args:
        now: when the stream was opened, by the caller's clock, in seconds.
    """

    def __init__(self, now: float) -> None:
        self.heard_at = now
        """The moment when the last message arrived, or the stream was opened; by the caller's
        clock."""
        self._sent = 0
        self._received = 0

    def number(self, message: MessageT) -> Sequenced[MessageT]:
        """Number a message that is about to be sent."""
        if not isinstance(message, Heartbeat):
            self._sent += 1
        return Sequenced(self._sent, message)

    def accept(self, sequenced: Sequenced[object], now: float) -> bool:
        """Check a received message's number. Returns False for a duplicate, which must be dropped.

        Raises:
            ProtocolError: an earlier message was lost. It will not arrive any more, because a
                stream keeps the order.
        """
        self.heard_at = now
        is_heartbeat = isinstance(sequenced.message, Heartbeat)
        expected = self._received if is_heartbeat else self._received + 1
        if sequenced.number > expected:
            raise ProtocolError(f"{sequenced.number - expected} messages were lost")
        if is_heartbeat or sequenced.number < expected:
            return is_heartbeat
        self._received = sequenced.number
        return True
