"""Which pages are announced, and which of them the decode side reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.kv_transfer.errors import ProtocolError
from kvrelay.kv_transfer.hand_over.states import DecodeState
from kvrelay.wire.hand_over import Announce, FirstToken, PageRun
from tests.kv_transfer.hand_over.announcing import NINE, announced, granted, granted_window


@given(
    page_size=st.sampled_from([1, 3, 16]),
    chunks=st.lists(st.integers(1, 120), min_size=1, max_size=6),
)
def test_every_page_is_announced_once_in_order(page_size: int, chunks: list[int]) -> None:
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


def test_scenario_39_by_its_numbers() -> None:
    prefill, _ = granted(16)
    pages = list(range(16))
    sent = [prefill.announce([pages], settled // 16) for settled in (100, 200)]
    sent.append(prefill.announce_last([pages], [0], NINE))
    assert [(m.runs[0].first_page, len(m.runs[0].page_ids)) for m in sent if m] == [
        (0, 6),
        (6, 6),
        (12, 4),
    ]


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
def test_malformed_announcement_is_refused(message: Announce) -> None:
    _, decode = granted(3)
    with pytest.raises(ProtocolError):
        decode.on_announce(message)


def test_announcement_twice_is_refused() -> None:
    _, decode = granted(3)
    decode.on_announce(announced(0, (5,)))
    with pytest.raises(ProtocolError):
        decode.on_announce(announced(0, (5,)))


def test_a_windows_pages_come_last_and_only_those_that_it_holds() -> None:
    prefill, decode = granted_window((0, 3))
    message = prefill.announce([[5, 6], [7, 8]], 2)
    assert message is not None
    assert decode.on_announce(message) == (PageRun(0, (5, 6)), PageRun(0))
    last = prefill.announce_last([[5, 6, 1, 2], [-1, -1, 3, 4]], [0, 2], NINE)
    assert last.runs == (PageRun(2, (1, 2)), PageRun(2, (3, 4)))
    assert decode.on_announce(last) == (PageRun(2, (1, 2)), PageRun(3, (4,)))
    assert decode.places_read == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 3)]


def test_what_the_decode_side_has_is_not_read() -> None:
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
def test_malformed_window_is_refused(message: Announce) -> None:
    _, decode = granted_window((0, 2))
    with pytest.raises(ProtocolError):
        decode.on_announce(message)
