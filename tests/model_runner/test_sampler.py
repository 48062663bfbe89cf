"""The sampler draws from the right distribution, and each row depends on itself alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvrelay.model_runner.errors import NonFiniteLogitsError
from kvrelay.model_runner.sampling.sampler import (
    Sampled,
    SamplingRow,
    TokenMasks,
    edit_logits,
    filter_top_k_top_p_min_p,
    sample_token_id,
)
from kvrelay.model_runner.sampling.verify import DraftedSequence, verify
from kvrelay.wire.output import SampledToken
from kvrelay.wire.submit import SamplingParams
from tests.model_runner.samples import as_tokens
from tests.pairwise import few

VOCAB = 700


def row(
    position: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    banned: Sequence[int] = (),
    **params: Any,
) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), position, prompt, output, banned)


def random_logits(rows: int = 1, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def outcomes(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
    return [sampled for (sampled,) in verify(logits, [DraftedSequence(row) for row in rows])]


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    return as_tokens(outcomes(logits, rows))


def sample_one(logits: torch.Tensor, one: SamplingRow) -> int:
    return sample(logits, [one])[0].token_id


def frequencies(logits: torch.Tensor, draws: int, **params: Any) -> np.ndarray:
    """Of each token, over positions and a seed."""
    rows = [row(position, seed=11, **params) for position in range(draws)]
    sampled = sample(logits.expand(draws, -1), rows)
    return np.bincount([token.token_id for token in sampled], minlength=logits.shape[1])


def assert_drawn_from(counts: np.ndarray, expected: np.ndarray) -> None:
    """Chi-square within four standard deviations; nothing where there is no probability."""
    assert counts[expected == 0].sum() == 0
    usual = expected > 0
    wanted = expected[usual] * counts.sum()
    degrees = usual.sum() - 1
    chi_square = ((counts[usual] - wanted) ** 2 / wanted).sum()
    assert abs(chi_square - degrees) < 4 * math.sqrt(2 * degrees) + 4


def reference(logits: torch.Tensor, **params: Any) -> np.ndarray:
    """Probabilities by the plainest code there is: one sort, three cuts."""
    p = torch.softmax(logits.double() / params.get("temperature", 1.0), -1).numpy()
    order = np.argsort(-p, kind="stable")
    if params.get("top_k"):
        order = order[: params["top_k"]]
    if "top_p" in params:
        before = np.cumsum(p[order] / p[order].sum()) - p[order] / p[order].sum()
        order = order[before < params["top_p"]]
    order = order[p[order] >= params.get("min_p", 0) * p.max()]
    kept = np.zeros_like(p)
    kept[order] = p[order] / p[order].sum()
    return kept


@few(3)
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 5},
        {"top_k": 10**6},
        {"top_p": 0.7},
        {"top_p": 0.999},
        {"min_p": 0.05},
        {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_distribution(params: dict[str, Any]) -> None:
    logits = random_logits(scale=2.0)[:, :40]
    assert_drawn_from(frequencies(logits, 4000, **params), reference(logits[0], **params))


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 0.9999])
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 8.0])
def test_top_p_keeps_what_a_full_sort_keeps(top_p: float, scale: float) -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(3)) * scale
    weights = torch.exp(logits - logits.max()).numpy()
    order = np.argsort(-weights, kind="stable")
    sums = np.cumsum(weights[order], dtype=np.float64)
    expected = order[: np.searchsorted(sums, top_p * sums[-1]) + 1]
    assert filter_top_k_top_p_min_p(weights, SamplingParams(top_p=top_p)).tolist() == sorted(
        expected.tolist()
    )


def test_equal_logits_all_survive_top_k() -> None:
    logits = torch.zeros(1, 20)
    assert (frequencies(logits, 400, top_k=3) > 0).sum() == 20


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [30, 40]] = 2.0
    assert [t.token_id for t in sample(logits, [row(temperature=0)] * 2)] == [30, 0]


def test_near_zero_temperature_is_greedy() -> None:
    logits = random_logits()
    assert sample_one(logits, row(temperature=1e-30)) == int(logits.argmax())


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = random_logits(12)
    rows = [
        row(3, seed=5),
        row(4, seed=5, top_p=0.8),
        row(5, seed=6, temperature=0),
        row(6, seed=7, top_k=4, logprobs=2),
        row(7, seed=8, banned=[1, 2], temperature=0),
        row(8, output=[5, 5, 6], prompt=[9], seed=9, frequency_penalty=1.0),
    ] * 2
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [rows[i]])[0] for i in range(12)]
    backwards = sample(logits.flip(0), rows[::-1])[::-1]
    assert together == alone == backwards


def test_draws_are_keyed_by_seed_and_position() -> None:
    logits = torch.zeros(1, VOCAB)
    drawn = {(s, p): sample_one(logits, row(p, seed=s)) for s in range(20) for p in range(20)}
    again = {(s, p): sample_one(logits, row(p, seed=s)) for s in range(20) for p in range(20)}
    assert drawn == again
    assert len({tuple(drawn[s, p] for p in range(20)) for s in range(20)}) == 20
    assert len(set(drawn.values())) > 250


@pytest.mark.parametrize("number", [0, -1, 2**63, 2**64 - 1])
def test_any_64_bit_seed(number: int) -> None:
    assert 0 <= sample_one(random_logits(), row(seed=number, position=2**31)) < VOCAB


def test_known_draws_never_change() -> None:
    """A resumed stream may meet another version of kvrelay."""
    logits = torch.zeros(1, 49152)
    assert [sample_one(logits, row(p, seed=1234)) for p in range(3)] == [6043, 24356, 45537]


def test_each_choice_has_draws_of_its_own() -> None:
    logits = torch.zeros(1, VOCAB)
    rows = [[replace(row(p, seed=1234), choice=c) for p in range(30)] for c in (0, 0, 1, 2)]
    first, again, second, third = (
        [token.token_id for token in sample(logits.expand(30, -1), choice)] for choice in rows
    )
    assert first == again
    assert len({tuple(first), tuple(second), tuple(third)}) == 3
    # Seed and choice are two words of the key: no choice of one seed is another seed's.
    other_seed = [sample_one(logits, row(p, seed=1235)) for p in range(30)]
    assert other_seed not in (second, third)


def test_known_draws_of_a_choice_never_change() -> None:
    logits = torch.zeros(1, 49152)
    rows = [replace(row(p, seed=1234), choice=7) for p in range(3)]
    assert [sample_one(logits, one) for one in rows] == [25576, 12539, 4813]


def test_bans_end() -> None:
    logits = random_logits()
    best = int(logits.argmax())
    first = row(3, temperature=0, banned=[best])
    two = replace(first, banned_for=2)
    assert sample_one(logits, first) != best
    assert sample_one(logits, two.after([1])) != best
    assert sample_one(logits, two.after([1, 1])) == sample_one(logits, two.after([1] * 5)) == best
    assert not replace(first, banned_for=0).edits_logits


def test_the_row_after_some_tokens() -> None:
    one = row(9, prompt=[1], output=(2,), frequency_penalty=1.0)
    assert one.after([]) == one
    later = one.after([5, 6])
    assert (later.position, later.prompt_ids, later.output_ids) == (11, [1], (2, 5, 6))
    # Nobody looks at the output of a request without penalties: it is not copied.
    assert row(9).after([5]).output_ids == ()


def test_penalties_by_their_formulas() -> None:
    logits = random_logits()
    one = row(
        prompt=[3, 4, 4],
        output=[4, 5, 5, 5],
        banned=[8],
        temperature=0,
        logit_bias={5: 2.0, 6: 40.0, 8: 100.0},
        repetition_penalty=1.5,
        frequency_penalty=0.3,
        presence_penalty=0.7,
    )
    expected = logits[0].clone()
    expected[5] += 2.0
    expected[6] += 40.0
    for token_id in (3, 4, 5):
        value = expected[token_id]
        expected[token_id] = value / 1.5 if value > 0 else value * 1.5
    for token_id, count in ((4, 1), (5, 3)):
        expected[token_id] -= 0.3 * count + 0.7
    expected[8] = -torch.inf
    np.testing.assert_allclose(edit_logits(logits[0].numpy(), one), expected.numpy(), rtol=1e-5)
    assert sample_one(logits, one) == 6


def test_sampling_does_not_change_the_logits() -> None:
    logits = random_logits(2)
    before = logits.clone()
    sample(logits, [row(banned=[1], logit_bias={2: 5.0}, logprobs=3), row(temperature=0)])
    assert torch.equal(logits, before)


def test_banned_tokens_are_never_drawn() -> None:
    logits = torch.zeros(1, 4)
    rows = [row(p, banned=[0, 2]) for p in range(200)]
    assert {t.token_id for t in sample(logits.expand(200, -1), rows)} == {1, 3}


def test_logprobs_are_the_models_own() -> None:
    logits = random_logits()
    token = sample(logits, [row(temperature=0.3, top_k=2, logit_bias={9: 50.0}, logprobs=4)])[0]
    expected = torch.log_softmax(logits[0].double(), -1)
    assert token.token_id == 9
    assert token.logprob == pytest.approx(float(expected[9]), abs=1e-5)
    values, ids = expected.topk(4)
    assert [i for i, _ in token.top] == ids.tolist()
    assert [p for _, p in token.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_logprobs_zero_reports_the_token_alone() -> None:
    token = sample(random_logits(), [row(logprobs=0)])[0]
    assert token.logprob is not None
    assert token.top == ()


def test_no_logprobs_unless_asked() -> None:
    token = sample(random_logits(), [row()])[0]
    assert (token.logprob, token.top) == (None, ())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 0}, {"logit_bias": {1: 1.0}}])
def test_broken_logits_fail_their_own_row(value: float, params: dict[str, Any]) -> None:
    logits = random_logits(3)
    healthy = sample(logits, [row(**params)] * 3)
    logits[1, 77] = value
    first, broken, last = outcomes(logits, [row(**params)] * 3)
    assert isinstance(broken, NonFiniteLogitsError)
    assert str(broken) == f"the model's logits are not finite: {value}"
    assert [first, last] == [healthy[0], healthy[2]]


@pytest.mark.parametrize("temperature", [0, 1])
def test_everything_banned_fails_its_own_row(temperature: float) -> None:
    free = row(temperature=temperature, logprobs=1)
    barred = row(temperature=temperature, logprobs=1, banned=range(VOCAB))
    logits = random_logits(2)
    healthy, broken = outcomes(logits, [free, barred])
    assert isinstance(broken, NonFiniteLogitsError)
    assert str(broken) == "no token can be sampled: every one is banned or impossible"
    assert [healthy] == sample(logits[:1], [free])


def test_no_rows() -> None:
    assert sample(torch.empty(0, VOCAB), []) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("min_p", 2.0),
        ("frequency_penalty", math.nan),
        ("presence_penalty", math.inf),
        ("repetition_penalty", 0.0),
        ("logprobs", -1),
        ("logit_bias", {1: math.nan}),
    ],
)
def test_params_out_of_range_are_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        SamplingParams(**{field: value})


def masks(*allowed: Sequence[int]) -> TokenMasks:
    """Masks that allow these tokens of 70."""
    bits = np.zeros((len(allowed), 96), np.uint8)
    for row, tokens in enumerate(allowed):
        bits[row, list(tokens)] = 1
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def test_only_tokens_that_the_grammar_allows_are_sampled() -> None:
    logits = np.random.default_rng(3).normal(0, 3, 70).astype(np.float32)
    before = logits.copy()
    for seed in range(50):
        params = SamplingParams(temperature=1.0 if seed else 0.0, seed=seed, top_k=5 * (seed % 2))
        row = SamplingRow(params, 9, (), (), allowed=masks([3, 40, 69], [5]))
        assert sample_token_id(logits, row) in (3, 40, 69)
        assert sample_token_id(logits, row.after([40])) == 5
    np.testing.assert_array_equal(logits, before)
