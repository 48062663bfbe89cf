"""A prompt's tokens get the log-probabilities that the sampler would report of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvrelay.model_runner.sampling.prompt_scores import score_prompt
from kvrelay.model_runner.sampling.sampler import gather_logprobs

VOCAB = 300


def random_logits(rows: int, decimals: int) -> torch.Tensor:
    """Rounded: the fewer decimals, the more equals."""
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(3)) * 4
    return torch.round(logits, decimals=decimals)


@pytest.mark.parametrize("decimals", [0, 1, 6])
@pytest.mark.parametrize("count", [0, 1, 5, VOCAB - 1, VOCAB, 10 * VOCAB])
def test_scores_equal_the_samplers_report(count: int, decimals: int) -> None:
    logits = random_logits(37, decimals)
    next_ids = np.random.default_rng(0).integers(0, VOCAB, 37).tolist()
    scored = score_prompt(logits, next_ids, count)
    for row, token_id, got in zip(logits.numpy(), next_ids, scored, strict=True):
        expected = gather_logprobs(row, token_id, count)
        assert got.token_id == token_id
        assert got.logprob == pytest.approx(expected.logprob, abs=1e-12)
        assert got.rank == sum(row >= row[token_id])
        assert [i for i, _ in got.top] == [i for i, _ in expected.top]
        assert [p for _, p in got.top] == pytest.approx([p for _, p in expected.top], abs=1e-12)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = random_logits(20, 6)
    together = score_prompt(logits, [7] * 20, 3)
    assert together == [score_prompt(row[None], [7], 3)[0] for row in logits]


def test_a_broken_row_is_nan_and_the_others_are_not() -> None:
    logits = random_logits(3, 6)
    healthy = score_prompt(logits, [1, 2, 3], 2)
    logits[1, 50] = torch.nan
    first, broken, last = score_prompt(logits, [1, 2, 3], 2)
    assert [first, last] == [healthy[0], healthy[2]]
    assert broken.logprob is not None
    assert math.isnan(broken.logprob)
    assert broken.rank is None or broken.rank <= VOCAB


def test_logits_are_not_changed() -> None:
    logits = random_logits(3, 6)
    before = logits.clone()
    score_prompt(logits, [1, 2, 3], 2)
    assert torch.equal(logits, before)


def test_no_rows() -> None:
    assert score_prompt(torch.empty(0, VOCAB), [], 3) == []
