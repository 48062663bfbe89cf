"""Tokens are put in order, once each, in whatever order they come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.router.requests.output_choice import TokenMerge
from kvrelay.wire.output import SampledToken


def tokens(*ids: int) -> list[SampledToken]:
    return [SampledToken(token_id) for token_id in ids]


def test_later_tokens_wait_for_the_first() -> None:
    merge = TokenMerge()
    merge.add(1, tokens(11, 12))
    assert merge.take() == ()
    assert not merge.gapless
    merge.add(0, tokens(10))
    assert merge.take() == tuple(tokens(10, 11, 12))
    assert merge.gapless


def test_another_token_at_a_known_place_is_ignored_and_counted() -> None:
    merge = TokenMerge()
    assert merge.add(0, tokens(10, 11)) == 0
    assert merge.take() == tuple(tokens(10, 11))
    assert merge.add(3, tokens(13)) == 0
    assert merge.add(0, tokens(10, 99, 12, 98)) == 2
    assert merge.take() == tuple(tokens(12, 13))
    assert list(merge.taken_ids) == [10, 11, 12, 13]


def test_what_waits_can_be_forgotten() -> None:
    merge = TokenMerge()
    merge.add(1, tokens(11))
    merge.forget_early()
    merge.add(0, tokens(10))
    assert merge.take() == tuple(tokens(10))
    assert merge.gapless


def test_nothing_is_not_gapless() -> None:
    assert not TokenMerge().gapless


@given(st.permutations(list(range(12))), st.integers(1, 4))
def test_any_order_and_any_overlap_give_each_token_once(order: list[int], length: int) -> None:
    merge = TokenMerge()
    taken: list[SampledToken] = []
    for index in order:
        merge.add(index, tokens(*range(index, index + length)))
        taken += merge.take()
    assert taken == tokens(*range(12 + length - 1))
    assert merge.gapless
