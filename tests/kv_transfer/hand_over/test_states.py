"""The order of a hand-over's messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum

import pytest

from kvrelay.kv_transfer.errors import ProtocolError
from kvrelay.kv_transfer.hand_over.decode_side import DecodeHandOver
from kvrelay.kv_transfer.hand_over.prefill_side import PrefillHandOver
from kvrelay.kv_transfer.hand_over.states import (
    DECODE_STEPS,
    PREFILL_STEPS,
    DecodeState,
    PrefillState,
)
from kvrelay.wire.hand_over import Ask, Done, Grant, HandOverEnd, Released
from tests.kv_transfer.hand_over.announcing import NINE, announced, granted


@pytest.mark.parametrize(
    "too_early",
    [
        lambda prefill, decode: prefill.on_grant(Grant()),
        lambda prefill, decode: prefill.on_done(Done()),
        lambda prefill, decode: prefill.on_verified(0),
        lambda prefill, decode: prefill.announce([[1]], 1),
        lambda prefill, decode: prefill.announce_last([[1]], [0], NINE),
        lambda prefill, decode: decode.grant([0]),
        lambda prefill, decode: decode.on_announce(announced(0, (1,))),
        lambda prefill, decode: decode.on_released(Released(valid=True)),
    ],
)
def test_message_before_its_time_is_refused(
    too_early: Callable[[PrefillHandOver, DecodeHandOver], object],
) -> None:
    with pytest.raises(ProtocolError):
        too_early(PrefillHandOver(), DecodeHandOver(1))


def test_grant_and_ask_twice_are_refused() -> None:
    prefill, decode = granted(1)
    for again in (
        lambda: prefill.on_grant(Grant()),
        prefill.ask,
        lambda: decode.on_ask(Ask()),
        lambda: decode.grant([0]),
    ):
        with pytest.raises(ProtocolError):
            again()


def test_leaving_early_is_sent_once_and_not_after_the_release() -> None:
    prefill, decode = granted(1)
    assert prefill.end(HandOverEnd.ABORTED) is not None
    assert prefill.end(HandOverEnd.ABORTED) is None
    prefill, decode = granted(1)
    decode.on_announce(prefill.announce_last([[5]], [0], NINE))
    prefill.on_done(Done())
    assert prefill.end(HandOverEnd.ABORTED) is None


@pytest.mark.parametrize(
    ("steps", "states", "first", "last"),
    [
        (PREFILL_STEPS, PrefillState, PrefillState.QUEUED, {"RELEASED", "ENDED"}),
        (DECODE_STEPS, DecodeState, DecodeState.OPEN, {"VALID"}),
    ],
    ids=["prefill", "decode"],
)
def test_every_state_is_reached_and_only_the_last_have_no_step(
    steps: Mapping[str, Mapping[Enum, Enum]], states: type[Enum], first: Enum, last: set[str]
) -> None:
    reached, before = {first}, set[Enum]()
    while reached != before:
        before = set(reached)
        reached |= {step[state] for step in steps.values() for state in before & set(step)}
    assert reached == set(states)
    assert {
        state.name for state in states if not any(state in step for step in steps.values())
    } == last
