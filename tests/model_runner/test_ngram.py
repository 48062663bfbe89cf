"""The index proposes what a search through the whole sequence would."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.model_runner.sampling.ngram import NgramIndex

pieces = st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=8)


def indexed(tokens: list[int], min_ngram: int = 2, max_ngram: int = 4) -> NgramIndex:
    index = NgramIndex(min_ngram, max_ngram)
    index.extend(tokens)
    return index


def search(tokens: list[int], min_ngram: int, max_ngram: int, count: int) -> list[int]:
    """The plainest way."""
    for length in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[len(tokens) - length :]:
                copied = list(tokens)
                for _ in range(count):
                    copied.append(copied[len(copied) - len(tokens) + end])
                return copied[len(tokens) :]
    return []


@given(pieces, st.integers(1, 3), st.integers(0, 3), st.integers(0, 9))
def test_proposals_equal_a_search(
    pieces: list[list[int]], min_ngram: int, more: int, count: int
) -> None:
    index = NgramIndex(min_ngram, min_ngram + more)
    tokens: list[int] = []
    for piece in pieces:
        index.extend(piece)
        tokens += piece
        assert len(index) == len(tokens)
        assert index.propose(count) == search(tokens, min_ngram, min_ngram + more, count)


def test_the_longest_match_wins_over_a_later_one() -> None:
    tokens = [1, 2, 3, 50, 51, 9, 2, 3, 60, 61, 1, 2, 3]
    assert indexed(tokens).propose(2) == [50, 51]
    assert indexed(tokens, max_ngram=2).propose(2) == [60, 61]


def test_the_latest_of_equal_matches_wins() -> None:
    assert indexed([1, 2, 50, 1, 2, 60, 1, 2]).propose(1) == [60]


def test_a_match_near_the_end_goes_on_periodically() -> None:
    assert indexed([7, 1, 2, 3, 1, 2]).propose(7) == [3, 1, 2, 3, 1, 2, 3]
    assert indexed([5, 5, 5]).propose(4) == [5, 5, 5, 5]


def test_nothing_to_propose() -> None:
    assert indexed([]).propose(3) == []
    assert indexed([1, 2, 1]).propose(3) == []
    assert indexed([1, 2, 1, 2]).propose(0) == []


def test_a_long_prompt_is_indexed_fast() -> None:
    """About 2 ms; the bar leaves room for a busy machine."""
    tokens = np.random.default_rng(0).integers(0, 49152, 4096).tolist()
    times = []
    for _ in range(10):
        begun = time.perf_counter()
        indexed(tokens)
        times.append(time.perf_counter() - begun)
    assert min(times) < 0.02


@pytest.mark.parametrize(
    ("bounds", "name"), [((0, 4), "min_ngram"), ((3, 2), "max_ngram"), ((-1, -1), "min_ngram")]
)
def test_bounds_out_of_range_are_named(bounds: tuple[int, int], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} "):
        NgramIndex(*bounds)
