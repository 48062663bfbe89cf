from __future__ import annotations

import pytest

from kvrelay.decode_worker.hand_over_client import read_message
from kvrelay.kv_transfer.errors import ProtocolError
from kvrelay.v1 import hand_over_pb2
from kvrelay.wire.hand_over import Announce, FirstToken, PageRun

VOCAB_SIZE = 100


def announce(token_id: int) -> hand_over_pb2.HandOverResponse:
    token = hand_over_pb2.FirstToken(token_id=token_id)
    run = hand_over_pb2.PageRun(first_page=2, page_ids=[7, 5])
    message = hand_over_pb2.HandOverAnnounce(runs=[run], first_tokens=[token])
    return hand_over_pb2.HandOverResponse(announce=message)


def test_last_announcement_brings_the_first_token() -> None:
    expected = Announce((PageRun(2, (7, 5)),), (FirstToken(VOCAB_SIZE - 1),))
    assert read_message(announce(VOCAB_SIZE - 1), VOCAB_SIZE).message == expected


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (announce(VOCAB_SIZE), "first token 100 of a vocabulary of 100"),
        (hand_over_pb2.HandOverResponse(), "unknown message of HandOverResponse: None"),
    ],
)
def test_what_cannot_be_used_is_a_protocol_error(
    message: hand_over_pb2.HandOverResponse, error: str
) -> None:
    with pytest.raises(ProtocolError, match=error):
        read_message(message, VOCAB_SIZE)
