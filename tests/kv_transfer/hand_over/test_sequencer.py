"""Lost and repeated messages."""

from __future__ import annotations

import pytest

from kvrelay.kv_transfer.errors import ProtocolError
from kvrelay.kv_transfer.hand_over.sequencer import Sequencer
from kvrelay.wire.hand_over import Heartbeat


def test_messages_come_in_order_and_once() -> None:
    mine, theirs = Sequencer(0.0), Sequencer(0.0)
    ask, beat = mine.number("ask"), mine.number(Heartbeat())
    assert theirs.accept(ask, 1.0)
    assert not theirs.accept(ask, 2.0), "it came before"
    assert theirs.accept(beat, 3.0)
    assert theirs.accept(mine.number("announce"), 4.0)
    assert theirs.heard_at == 4.0


@pytest.mark.parametrize("last", [False, True], ids=["in the middle", "scenario 41: the last"])
def test_a_lost_message_is_noticed(last: bool) -> None:
    mine, theirs = Sequencer(0.0), Sequencer(0.0)
    assert theirs.accept(mine.number("ask"), 0.0)
    mine.number("lost")
    sent = mine.number(Heartbeat()) if last else mine.number("announce")
    with pytest.raises(ProtocolError, match="1 messages were lost"):
        theirs.accept(sent, 0.0)
