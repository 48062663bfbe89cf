"""The noise of sampling is Philox's, is Gumbel-distributed, and hides rounding errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvrelay.cpu_kernels.gumbel import WORDS_MULTIPLE, add_noise, random_words
from kvrelay.model_runner.sampling.sampler import SamplingRow, sample_token_id
from kvrelay.wire.submit import SamplingParams

Words = np.ndarray[tuple[int], np.dtype[np.uint32]]
Floats = np.ndarray[tuple[int], np.dtype[np.float32]]


def words(seed: int, choice: int, position: int, count: int = WORDS_MULTIPLE) -> Words:
    out = np.empty(count, np.uint32)
    random_words(np.uint64(seed), choice, position, out)
    return out


def noise_of(some_words: Words) -> Floats:
    zeros, out = np.zeros(len(some_words), np.float32), np.empty(len(some_words), np.float32)
    add_noise(zeros, np.float32(0), np.float32(1), some_words, out)
    return out


def test_words_are_philox() -> None:
    """The first known answer of Random123, where the kernel says that its words go."""
    of_the_first_block = words(0, 0, 0)[[0, 16, 32, 48]]
    assert of_the_first_block.tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_words_differ_by_seed_choice_and_position_and_not_by_count() -> None:
    keys = [(1, 0, 0), (1 << 32, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)]
    drawn = [words(*key) for key in keys]
    assert len({one.tobytes() for one in drawn}) == len(keys)
    assert len(set(np.concatenate(drawn).tolist())) == len(keys) * WORDS_MULTIPLE
    assert words(5, 2, 9, 640)[:WORDS_MULTIPLE].tolist() == words(5, 2, 9).tolist()


def test_noise_is_the_double_logarithm_of_a_uniform_number() -> None:
    some = np.array([0, 1, 2, 1000, 2**25, 42949672, 42949673, 2**31, 2**32 - 2**12], np.uint32)
    expected = -np.log(-np.log1p(-(some + 0.5) * 2.0**-32))
    np.testing.assert_allclose(noise_of(some), expected, rtol=5e-6, atol=1e-6)
    # Near the end that never wins, a float32 has not so many digits.
    assert -3.2 < noise_of(np.array([2**32 - 1], np.uint32))[0] < -2.8


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}], ids=["all", "top_p"])
def test_a_rounding_error_changes_a_token_only_where_two_nearly_tie(
    params: dict[str, Any],
) -> None:
    """Drawn by a cumulated sum, several of a hundred would have changed."""
    random = np.random.default_rng(5)
    logits = (random.standard_normal(8192) * 2).astype(np.float32)
    shaken = (logits + 2e-6 * random.standard_normal(8192)).astype(np.float32)
    rows = [SamplingRow(SamplingParams(seed=3, **params), p, (), ()) for p in range(4000)]
    changed = [row for row in rows if sample_token_id(logits, row) != sample_token_id(shaken, row)]
    assert len(changed) <= 1
