"""Both sides of the hand-over as plain state machines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.kv_transfer.checksums import PageSum, Place
from kvrelay.kv_transfer.errors import ProtocolError
from kvrelay.kv_transfer.hand_over import (
    Announce,
    Beat,
    DecodeHandOver,
    DecodeState,
    Done,
    EndReason,
    FirstToken,
    PageRun,
    PrefillHandOver,
    PrefillState,
    Released,
    Words,
)


def granted(pages: int) -> tuple[PrefillHandOver, DecodeHandOver]:
    prefill, decode = PrefillHandOver(), DecodeHandOver(pages)
    prefill.ask()
    decode.on_ask()
    decode.grant([0])
    prefill.on_grant()
    return prefill, decode


NINE = (FirstToken(9),)


def announced(
    first_page: int, page_ids: tuple[int, ...], first_tokens: tuple[FirstToken, ...] = ()
):
    return Announce((PageRun(first_page, page_ids),), first_tokens)


@given(
    page_size=st.sampled_from([1, 3, 16]),
    chunks=st.lists(st.integers(1, 120), min_size=1, max_size=6),
)
def test_every_page_is_announced_once_in_order(page_size, chunks):
    """Scenario 39, for any chunks: the pages announced are exactly those needed, none twice."""
    prompt = sum(chunks)
    pages = list(range(1000, 1000 + -(-prompt // page_size)))
    prefill, decode = granted(len(pages))
    announced: list[int] = []
    settled = 0
    for chunk in chunks[:-1]:
        settled += chunk
        message = prefill.announce([pages], settled // page_size)
        if message is not None:
            assert message.runs[0].end * page_size <= settled
            (wanted,) = decode.on_announce(message)
            announced += wanted.page_ids
    last = prefill.announce_last([pages], [0], [FirstToken(7)])
    (wanted,) = decode.on_announce(last)
    announced += wanted.page_ids
    assert announced == pages
    assert (decode.state, decode.first_tokens) == (DecodeState.ANNOUNCED, (FirstToken(7),))


def test_scenario_39_by_its_numbers():
    prefill, _ = granted(16)
    pages = list(range(16))
    sent = [prefill.announce([pages], settled // 16) for settled in (100, 200)]
    sent.append(prefill.announce_last([pages], [0], NINE))
    assert [(m.runs[0].first_page, len(m.runs[0].page_ids)) for m in sent if m] == [
        (0, 6),
        (6, 6),
        (12, 4),
    ]


def test_done_is_said_when_all_is_announced_and_read():
    prefill, decode = granted(2)
    decode.on_announce(prefill.announce([[5, 6]], 1))
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
def test_what_was_read_is_compared_before_the_release(mismatches):
    prefill, decode = granted(1)
    decode.on_announce(prefill.announce_last([[5]], [0], NINE))
    decode.on_read()
    done = decode.done([PageSum(Place(0, 0), 77)])
    assert prefill.on_done(done) is None
    assert (prefill.state, prefill.is_announced) == (PrefillState.VERIFYING, True)
    released = prefill.on_verified(mismatches)
    assert released == Released(valid=not mismatches, mismatches=mismatches)
    assert decode.on_released(released) is not bool(mismatches)


def test_pages_that_were_let_go_are_not_activated():
    prefill, decode = granted(1)
    decode.on_announce(prefill.announce_last([[5]], [0], NINE))
    decode.on_read()
    decode.done()
    assert not decode.on_released(Released(valid=False))
    assert decode.state is not DecodeState.VALID


@pytest.mark.parametrize(
    "message",
    [
        announced(1, (5,)),
        announced(0, (5, 6, 7, 8)),
        announced(0, (5,), NINE),
        announced(0, (), NINE),
    ],
    ids=["a gap", "too many", "last but incomplete", "last but empty"],
)
def test_malformed_announcement_is_refused(message):
    _, decode = granted(3)
    with pytest.raises(ProtocolError):
        decode.on_announce(message)


def test_each_choice_has_its_first_token():
    prefill, _ = granted(1)
    decode = DecodeHandOver(1, choices=2)
    decode.on_ask()
    decode.grant([0])
    tokens = (FirstToken(3), FirstToken(4, finished=True))
    decode.on_announce(prefill.announce_last([[5]], [0], tokens))
    assert decode.first_tokens == tokens
    _, decode = granted(1)
    with pytest.raises(ProtocolError, match="2 first tokens of 1"):
        decode.on_announce(announced(0, (5,), tokens))


def test_announcement_twice_is_refused():
    _, decode = granted(3)
    decode.on_announce(announced(0, (5,)))
    with pytest.raises(ProtocolError):
        decode.on_announce(announced(0, (5,)))


@pytest.mark.parametrize(
    "too_early",
    [
        lambda prefill, decode: prefill.on_grant(),
        lambda prefill, decode: prefill.on_done(Done()),
        lambda prefill, decode: prefill.on_verified(0),
        lambda prefill, decode: prefill.announce([[1]], 1),
        lambda prefill, decode: prefill.announce_last([[1]], [0], NINE),
        lambda prefill, decode: decode.grant([0]),
        lambda prefill, decode: decode.on_announce(announced(0, (1,))),
        lambda prefill, decode: decode.on_released(Released(valid=True)),
    ],
)
def test_message_before_its_time_is_refused(too_early):
    with pytest.raises(ProtocolError):
        too_early(PrefillHandOver(), DecodeHandOver(1))


def test_nothing_is_handed_over_of_outputs_that_are_all_finished():
    _, decode = granted(1)
    with pytest.raises(ProtocolError, match="finished"):
        decode.on_announce(announced(0, (5,), (FirstToken(9, finished=True),)))


def test_grant_and_ask_twice_are_refused():
    prefill, decode = granted(1)
    for again in (prefill.on_grant, prefill.ask, decode.on_ask, lambda: decode.grant([0])):
        with pytest.raises(ProtocolError):
            again()


def test_leaving_early_is_said_once_and_not_after_the_release():
    prefill, decode = granted(1)
    assert prefill.end(EndReason.ABORTED) is not None
    assert prefill.end(EndReason.ABORTED) is None
    prefill, decode = granted(1)
    decode.on_announce(prefill.announce_last([[5]], [0], NINE))
    prefill.on_done(Done())
    assert prefill.end(EndReason.ABORTED) is None


def granted_window(missing: tuple[int, int]) -> tuple[PrefillHandOver, DecodeHandOver]:
    """A prompt of four pages in a pool of all tokens and one with a window."""
    windowed = (False, True)
    prefill, decode = PrefillHandOver(windowed), DecodeHandOver(4, windowed)
    prefill.ask()
    decode.on_ask()
    decode.grant(missing)
    prefill.on_grant()
    return prefill, decode


def test_a_windows_pages_come_last_and_only_those_that_it_holds():
    prefill, decode = granted_window((0, 3))
    message = prefill.announce([[5, 6], [7, 8]], 2)
    assert decode.on_announce(message) == (PageRun(0, (5, 6)), PageRun(0))
    last = prefill.announce_last([[5, 6, 1, 2], [-1, -1, 3, 4]], [0, 2], NINE)
    assert last.runs == (PageRun(2, (1, 2)), PageRun(2, (3, 4)))
    assert decode.on_announce(last) == (PageRun(2, (1, 2)), PageRun(3, (4,)))
    assert decode.places_read == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 3)]


def test_what_the_decode_side_has_is_not_read():
    _, decode = granted_window((4, 4))
    wanted = decode.on_announce(Announce((PageRun(0, (5, 6, 1, 2)), PageRun(2, (3, 4))), NINE))
    assert not any(run.page_ids for run in wanted)
    assert decode.has_read, "nothing is to be read, the first token is there"
    assert decode.places_read == []


@pytest.mark.parametrize(
    "message",
    [
        Announce((PageRun(0, (5,)), PageRun(2, (3,)))),
        Announce((PageRun(0, (5, 6, 1, 2)), PageRun(3, (4,))), NINE),
        Announce((PageRun(0, (5, 6, 1, 2)), PageRun(2, (3,))), NINE),
        Announce((PageRun(0, (5, 6, 1, 2)),), NINE),
    ],
    ids=["too early", "begins too late", "ends too early", "a pool is missing"],
)
def test_malformed_window_is_refused(message):
    _, decode = granted_window((0, 2))
    with pytest.raises(ProtocolError):
        decode.on_announce(message)


def test_words_come_in_order_and_once():
    mine, theirs = Words(0.0), Words(0.0)
    ask, beat = mine.say("ask"), mine.say(Beat())
    assert theirs.hear(ask, 1.0)
    assert not theirs.hear(ask, 2.0), "it came before"
    assert theirs.hear(beat, 3.0)
    assert theirs.hear(mine.say("announce"), 4.0)
    assert theirs.heard_at == 4.0


@pytest.mark.parametrize("last", [False, True], ids=["in the middle", "scenario 41: the last"])
def test_a_lost_word_is_missed(last):
    mine, theirs = Words(0.0), Words(0.0)
    assert theirs.hear(mine.say("ask"), 0.0)
    mine.say("lost")
    said = mine.say(Beat()) if last else mine.say("announce")
    with pytest.raises(ProtocolError, match="1 messages were lost"):
        theirs.hear(said, 0.0)
