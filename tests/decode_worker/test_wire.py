from __future__ import annotations

import pytest

from kvrelay.decode_worker.wire import from_wire
from kvrelay.kv_transfer.errors import ProtocolError
from kvrelay.kv_transfer.hand_over import Announce, FirstToken, PageRun
from kvrelay.v1 import hand_over_pb2

VOCAB_SIZE = 100


def announce(token_id: int) -> hand_over_pb2.HandOverResponse:
    token = hand_over_pb2.FirstToken(token_id=token_id)
    run = hand_over_pb2.PageRun(first_page=2, page_ids=[7, 5])
    message = hand_over_pb2.HandOverAnnounce(runs=[run], first_tokens=[token])
    return hand_over_pb2.HandOverResponse(announce=message)


def test_last_announcement_brings_the_first_token():
    expected = Announce((PageRun(2, (7, 5)),), (FirstToken(VOCAB_SIZE - 1),))
    assert from_wire(announce(VOCAB_SIZE - 1), VOCAB_SIZE).message == expected


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (announce(VOCAB_SIZE), "first token 100 of a vocabulary of 100"),
        (hand_over_pb2.HandOverResponse(), "unknown hand-over message: None"),
    ],
)
def test_what_cannot_be_used_is_a_protocol_error(message, error: str):
    with pytest.raises(ProtocolError, match=error):
        from_wire(message, VOCAB_SIZE)
