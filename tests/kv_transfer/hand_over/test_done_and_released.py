"""The end of a hand-over: everything is read, perhaps compared, and released."""

from __future__ import annotations

import pytest

from kvrelay.kv_transfer.errors import ProtocolError
from kvrelay.kv_transfer.hand_over.decode_side import DecodeHandOver
from kvrelay.kv_transfer.hand_over.states import DecodeState, PrefillState
from kvrelay.wire.hand_over import Ask, FirstToken, PageSum, Released
from tests.kv_transfer.hand_over.announcing import NINE, announced, granted


def test_done_is_sent_when_all_is_announced_and_read() -> None:
    prefill, decode = granted(2)
    first_page = prefill.announce([[5, 6]], 1)
    assert first_page is not None
    decode.on_announce(first_page)
    assert not decode.has_read
    decode.on_read()
    assert not decode.has_read, "the last announcement is still to come"
    decode.on_announce(prefill.announce_last([[5, 6]], [0], NINE))
    assert not decode.has_read, "a read is still running"
    decode.on_read()
    assert decode.has_read
    done = decode.done()
    assert not decode.has_read, "once"
    assert decode.on_released(prefill.on_done(done))
    assert (prefill.state, decode.state) == (PrefillState.RELEASED, DecodeState.VALID)


@pytest.mark.parametrize("mismatches", [0, 2])
def test_what_was_read_is_compared_before_the_release(mismatches: int) -> None:
    prefill, decode = granted(1)
    decode.on_announce(prefill.announce_last([[5]], [0], NINE))
    decode.on_read()
    done = decode.done([PageSum(0, 0, 77)])
    assert prefill.on_done(done) is None
    assert (prefill.state, prefill.is_announced) == (PrefillState.VERIFYING, True)
    released = prefill.on_verified(mismatches)
    assert released == Released(valid=not mismatches, mismatches=mismatches)
    assert decode.on_released(released) is not bool(mismatches)


def test_pages_that_were_let_go_are_not_activated() -> None:
    prefill, decode = granted(1)
    decode.on_announce(prefill.announce_last([[5]], [0], NINE))
    decode.on_read()
    decode.done()
    assert not decode.on_released(Released(valid=False))
    assert decode.state is not DecodeState.VALID


def test_each_choice_has_its_first_token() -> None:
    prefill, _ = granted(1)
    decode = DecodeHandOver(1, choices=2)
    decode.on_ask(Ask())
    decode.grant([0])
    tokens = (FirstToken(3), FirstToken(4, finished=True))
    decode.on_announce(prefill.announce_last([[5]], [0], tokens))
    assert decode.first_tokens == tokens
    _, decode = granted(1)
    with pytest.raises(ProtocolError, match="2 first tokens of 1"):
        decode.on_announce(announced(0, (5,), tokens))


def test_nothing_is_handed_over_of_outputs_that_are_all_finished() -> None:
    _, decode = granted(1)
    with pytest.raises(ProtocolError, match="finished"):
        decode.on_announce(announced(0, (5,), (FirstToken(9, finished=True),)))
