"""Announcements of pages that lie in the prefill side's host pool."""

from __future__ import annotations

import pytest

from kvrelay.kv_transfer.errors import ProtocolError
from kvrelay.kv_transfer.hand_over.decode_side import DecodeHandOver
from kvrelay.kv_transfer.hand_over.prefill_side import PrefillHandOver
from kvrelay.kv_transfer.hand_over.states import DecodeState
from kvrelay.wire.hand_over import Announce, Begun, Grant, HandOverEnd, PageRun, Sequenced
from kvrelay.wire.messages import FROM_DECODE, FROM_PREFILL
from tests.kv_transfer.hand_over.announcing import NINE, granted, granted_window


def test_pages_of_host_and_device_name_every_page_once() -> None:
    """The device's first, then the host's behind them, then what is computed."""
    prefill, decode = granted(6)
    table = [10, 11, 12, 13, 14, 15]
    wanted = [
        decode.on_announce(message)
        for message in (
            prefill.announce([table], 1),
            prefill.announce_host([70, 71, 72]),
            prefill.announce([table], 3),
            prefill.announce([table], 5),
            prefill.announce_last([table], [0], NINE),
        )
        if message is not None
    ]
    assert wanted == [
        (PageRun(0, (10,)),),
        (PageRun(1, (70, 71, 72)),),
        (PageRun(4, (14,)),),
        (PageRun(5, (15,)),),
    ]
    assert decode.places_read == [(0, page) for page in range(6)]
    assert decode.state is DecodeState.ANNOUNCED


def test_what_the_decode_side_has_is_not_read_from_the_host() -> None:
    prefill, decode = PrefillHandOver(), DecodeHandOver(4)
    decode.on_ask(prefill.ask())
    prefill.on_grant(decode.grant([2]))
    assert decode.on_announce(prefill.announce_host([70, 71, 72])) == (PageRun(2, (72,)),)


def test_of_windows_the_host_has_nothing_to_announce() -> None:
    prefill, decode = granted_window((0, 3))
    message = prefill.announce_host([70, 71])
    assert decode.on_announce(message) == (PageRun(0, (70, 71)), PageRun(0))
    assert not only_windows().may_announce_host


def only_windows() -> PrefillHandOver:
    prefill = PrefillHandOver((True,))
    prefill.ask()
    prefill.on_grant(Grant(reads_host=True))
    return prefill


def test_a_prompt_whose_pages_are_read_from_the_host_is_not_computed_yet() -> None:
    """The decode side goes on counting it as one that nobody computes, until it is told so."""
    prefill, decode = granted(3)
    decode.on_announce(prefill.announce_host([70]))
    assert not decode.begun
    begun = prefill.begin()
    assert begun == Begun()
    decode.on_begun()
    assert decode.begun
    assert prefill.begin() is None


def test_a_decode_side_of_before_is_not_told() -> None:
    """It would take the numbers for those of the device's pages."""
    prefill = PrefillHandOver()
    decode = DecodeHandOver(3)
    decode.on_ask(prefill.ask())
    old = FROM_DECODE.to_message(Sequenced(1, decode.grant([0])))
    old.grant.ClearField("reads_host")
    message = FROM_DECODE.from_message(old).message
    assert isinstance(message, Grant)
    prefill.on_grant(message)
    assert not prefill.may_announce_host
    with pytest.raises(AssertionError):
        prefill.announce_host([70])


@pytest.mark.parametrize("left", ["last", "ended", "before"])
def test_the_host_is_announced_between_the_grant_and_the_last_pages_alone(left: str) -> None:
    prefill = PrefillHandOver()
    if left != "before":
        prefill, _ = granted(3)
        assert prefill.may_announce_host
    if left == "last":
        prefill.announce_last([[5, 6, 7]], [0], NINE)
    elif left == "ended":
        prefill.end(HandOverEnd.ABORTED)
    assert not prefill.may_announce_host


def test_the_last_pages_are_computed_so_they_are_on_the_device() -> None:
    _, decode = granted(1)
    with pytest.raises(ProtocolError, match="from the host"):
        decode.on_announce(Announce((PageRun(0, (5,)),), NINE, from_host=True))


def test_the_word_crosses_the_wire() -> None:
    prefill, _ = granted(3)
    message = Sequenced(3, prefill.announce_host([70]))
    assert FROM_PREFILL.from_message(FROM_PREFILL.to_message(message)) == message
