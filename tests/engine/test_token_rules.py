"""Outputs keep to the tokens that their clients allow, whatever happens to their requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import pytest

from kvrelay.engine.executor.token_rules import TokenRules
from kvrelay.wire.output import FailureReason
from kvrelay.wire.submit import BannedSequence, Reasoning, SamplingParams, StructuredOutput
from tests.checkpoints import make_checkpoint
from tests.engine.simulation import SimRequest, Simulation
from tests.engine.test_structured_output import EOS, MODES, PLAIN, text_of
from tests.engine.test_token_equality import Mode, finish_of, serve

ALLOWED = tuple(range(3, 300, 3))
PROMPTS = [[5, 6, 7], list(range(40, 70))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("rules") / "llama")


def outputs_of(
    model: Path, mode: Mode, samplings: Sequence[SamplingParams]
) -> tuple[list[list[int]], list[SimRequest]]:
    """What each request, with each prompt, has for output."""
    simulation = serve(model, model, "float64", mode)
    served: list[SimRequest] = []
    for number, sampling in enumerate(samplings):
        for prompt in PROMPTS:
            served += simulation.submit_choices(
                2 if number == 1 else 1,
                prompt,
                12,
                sampling=sampling,
                stop_token_ids=frozenset({EOS}),
            )
    simulation.run()
    simulation.assert_at_baseline()
    return [one.output for one in served], served


def banned(*sequences: Sequence[int]) -> tuple[BannedSequence, ...]:
    return tuple(BannedSequence(tuple(one)) for one in sequences)


def has(output: Sequence[int], sequence: Sequence[int]) -> bool:
    size = len(sequence)
    return any(output[i : i + size] == list(sequence) for i in range(len(output)))


@cache
def rules(model: Path) -> tuple[SamplingParams, ...]:
    """Rules that forbid what would have been sampled."""
    free = (SamplingParams(temperature=0), SamplingParams(temperature=0.9, seed=4))
    outputs, _ = outputs_of(model, PLAIN, free)
    single = [one[0] for one in outputs]
    pairs = [one[i : i + 2] for one in outputs for i in (0, 3, 8)]
    triples = [one[i : i + 3] for one in outputs for i in (1, 5)]
    return (
        SamplingParams(temperature=0, banned_sequences=banned(*pairs, *triples), logprobs=1),
        SamplingParams(temperature=0.9, seed=4, banned_sequences=banned(*map(list, zip(single)))),
        SamplingParams(temperature=0.9, seed=4, allowed_token_ids=ALLOWED, repetition_penalty=1.2),
        SamplingParams(
            temperature=0.9,
            seed=5,
            allowed_token_ids=ALLOWED,
            banned_sequences=banned((6, 9), (9, 9), (12,)),
        ),
    )


def obeys(output: Sequence[int], sampling: SamplingParams) -> bool:
    allowed = set(sampling.allowed_token_ids)
    return (not allowed or allowed.issuperset(output)) and not any(
        has(output, one.ids) for one in sampling.banned_sequences
    )


@cache
def plain_outputs(model: Path) -> list[list[int]]:
    outputs, served = outputs_of(model, PLAIN, rules(model))
    assert all(obeys(one.output, one.sampling) for one in served)
    return outputs


@pytest.mark.parametrize(
    ("mode", "late"),
    [
        (MODES[0], False),
        (MODES[1], True),
        *[
            pytest.param(mode, late, marks=pytest.mark.slow)
            for mode in MODES
            for late in (False, True)
        ],
    ],
)
def test_outputs_are_those_of_a_plain_run(
    model: Path, mode: Mode, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain_outputs(model)
    monkeypatch.setattr(Simulation, "late", late)
    outputs, served = outputs_of(model, mode, rules(model))
    assert outputs == expected
    if mode.retract_every and not mode.aggregated:  # that one goes on where it is
        assert sum(one.retractions for one in served) > 0


def test_a_grammar_and_rules_hold_together(model: Path) -> None:
    wanted = StructuredOutput(regex="[a-d]{12}")
    for mode in (PLAIN, MODES[0]):
        free = SamplingParams(temperature=0, structured_output=wanted)
        [output, *_], _ = outputs_of(model, mode, [free])
        assert len(output) > 4
        both = SamplingParams(
            temperature=0, structured_output=wanted, banned_sequences=banned(output[1:3])
        )
        [other, *_], [served, *_] = outputs_of(model, mode, [both])
        assert not has(other, output[1:3])
        assert finish_of(served).matched_stop == EOS
        assert set(text_of(model, other)) <= set("abcd")


@pytest.mark.parametrize(
    ("sampling", "min_tokens"),
    [
        (SamplingParams(allowed_token_ids=(7,), structured_output=StructuredOutput(regex="b")), 0),
        (SamplingParams(allowed_token_ids=(EOS,)), 3),
        (SamplingParams(allowed_token_ids=(7,), banned_sequences=banned((7, 7))), 0),
        (SamplingParams(allowed_token_ids=(7, EOS), banned_sequences=banned((7,) * 5)), 9),
        (SamplingParams(thinking_token_budget=1), 9),
    ],
    ids=["grammar", "least", "banned", "drafts", "forced"],
)
def test_rules_that_leave_nothing_fail_their_request_alone(
    model: Path, sampling: SamplingParams, min_tokens: int
) -> None:
    """Also behind drafts, and where the end of reasoning that is forced is a stop token."""
    has_budget = sampling.thinking_token_budget is not None
    simulation = serve(model, model, "float64", replace(MODES[0], retract_every=0))
    [broken] = simulation.submit_choices(
        1,
        [7] * 9,
        20,
        sampling=sampling,
        stop_token_ids=frozenset({EOS}),
        min_tokens=min_tokens,
        reasoning=Reasoning(begun=True, ends=("</s>",)) if has_budget else None,
    )
    [good] = simulation.submit_choices(1, [5, 6], 6)
    simulation.run()
    assert FailureReason.GRAMMAR_FAILED in [end.cause for end in broken.ends.values()]
    assert len(good.output) == 6
    simulation.assert_at_baseline()


@pytest.mark.parametrize("seed", range(5))
def test_masks_are_those_of_a_plain_search(seed: int) -> None:
    rng = Random(seed)
    size = rng.choice((8, 31, 32, 70))
    draw = lambda count: [rng.randrange(size) for _ in range(count)]  # noqa: E731
    allowed = draw(size) if rng.random() < 0.7 else []
    sequences = [draw(rng.choice((1, 2, 2, 3, 4))) for _ in range(rng.randint(0, size))]
    output, drafts = draw(rng.randint(0, 9)), draw(3)
    made = TokenRules(allowed, banned(*sequences), size)
    for count, mask in enumerate(made.masks(output, drafts)):
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        before = [*output, *drafts[:count]]
        expected = {
            token
            for token in (allowed or range(size))
            if not any(one == [*before, token][-len(one) :] for one in sequences)
        }
        assert set(np.flatnonzero(bits).tolist()) == expected
    kept = made.cut(output, drafts)
    assert list(kept) == drafts[: len(kept)]
