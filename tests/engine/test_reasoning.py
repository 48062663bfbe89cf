"""A form holds behind the reasoning, whose tokens are those of a request without a form.

Where the reasoning ends is read from the tokens alone, so outputs are the same whatever happens to
their requests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from kvrelay.engine.executor.reasoning_masks import ReasoningMasks
from kvrelay.text.grammar import model_vocabulary
from kvrelay.text.reasoning_progress import ReasoningProgress
from kvrelay.text.token_texts import token_texts
from kvrelay.wire.submit import (
    GenerationParams,
    Reasoning,
    SamplingParams,
    StopConditions,
    StructuredOutput,
)
from tests.checkpoints import make_checkpoint
from tests.engine.simulation import SimRequest, Simulation
from tests.engine.test_structured_output import EOS, MODES, PLAIN
from tests.engine.test_token_equality import Mode, finish_of, serve
from tests.known import known

FORMS: Sequence[StructuredOutput | None] = (
    StructuredOutput(choice=("yes", "no, never", "é/ü")),
    StructuredOutput(json_schema='{"type": "object", "properties": {"a": {"type": "integer"}}}'),
    StructuredOutput(regex="[a-c]{3}/[0-9]{2}"),
    None,
)
MARKS = (
    Reasoning(begun=True, ends=("z", "qu")),
    Reasoning(begins=("fox", "the"), ends=("ju", "w")),
    Reasoning(begun=True, ends=("never",), forced_end="\nSo: never"),
)
FEW = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("reasoning") / "llama")


def submit(simulation: Simulation, number: int, *, free: bool = False) -> list[SimRequest]:
    """Submit a request of many kinds; a free one has no form, and no budget."""
    rng = Random(number)
    marks = MARKS[number % len(MARKS)]
    budget = rng.choice((0, 3, 9)) if marks.forced_end or not number % 4 else None
    sampling = SamplingParams(
        temperature=rng.choice((0.9, 1.0)),
        seed=number,
        structured_output=None if free else FORMS[number % len(FORMS)],
        thinking_token_budget=None if free else budget,
    )
    prompt = [rng.randrange(2, 300) for _ in range(rng.randint(1, 40))]
    return simulation.submit_choices(
        rng.choice((1, 1, 2)),
        prompt,
        250,
        sampling=sampling,
        stop_token_ids=frozenset({EOS}),
        stop=("e", "ox") if number % 4 == 3 else (),
        reasoning=marks,
    )


def outputs_of(model: Path, mode: Mode, count: int, *, free: bool = False) -> list[SimRequest]:
    simulation = serve(model, model, "float64", mode)
    served, rng = [], Random(3)
    for number in range(count):
        served += submit(simulation, number, free=free)
        for _ in range(rng.randint(0, 20)):
            simulation.step()
    simulation.run()
    simulation.assert_at_baseline()
    return served


@cache
def plain_outputs(model: Path, count: int, free: bool = False) -> list[SimRequest]:
    return outputs_of(model, PLAIN, count, free=free)


def reasoning_of(model: Path, one: SimRequest) -> ReasoningProgress:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    progress = ReasoningProgress(known(one.stops.reasoning), token_texts(tokenizer).bytes_of)
    progress.follow(one.output)
    return progress


def text_of(model: Path, output: Sequence[int]) -> str:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text: str = tokenizer.decode(list(output), skip_special_tokens=True)
    return text


def is_of_form(text: str, form: StructuredOutput) -> bool:
    if form.json_schema is not None:
        value: Any = json.loads(text)
        return bool(value.keys() <= {"a"})
    if form.choice:
        return text in form.choice
    return text[3] == "/" and text[4:].isdecimal()


def test_a_form_holds_behind_the_reasoning(model: Path) -> None:
    """Before its end, and before its budget is spent, the tokens are those without a form."""
    forced = 0
    for one, free in zip(plain_outputs(model, FEW), plain_outputs(model, FEW, True), strict=True):
        progress, form, end = reasoning_of(model, one), one.sampling.structured_output, one.output
        if form is not None and progress.has_ended:
            assert is_of_form(text_of(model, end[known(progress.follows_at) :]), form)
            assert finish_of(one).matched_stop == EOS
        same = progress.num_thought - 1
        if (budget := one.sampling.thinking_token_budget) is not None:
            assert progress.num_thought <= budget + len("\nSo: never")
            same, forced = min(same, budget), forced + (progress.num_thought > budget)
        if known(one.stops.reasoning).begun:
            assert one.output[:same] == free.output[:same]
    assert forced


def test_stop_strings_count_behind_the_reasoning(model: Path) -> None:
    [one] = [one for one in plain_outputs(model, FEW) if one.stops.stop]
    progress, end = reasoning_of(model, one), finish_of(one)
    at = known(progress.follows_at)
    assert end.matched_stop == "e"
    assert "e" in text_of(model, one.output[:at])
    assert "e" not in text_of(model, one.output[at:-1])


def assert_same(model: Path, mode: Mode, count: int) -> list[SimRequest]:
    served, plain = outputs_of(model, mode, count), plain_outputs(model, count)
    assert [one.output for one in served] == [one.output for one in plain]
    assert [finish_of(one) for one in served] == [finish_of(one) for one in plain]
    return served


def test_an_attempt_that_goes_on_after_any_token(model: Path) -> None:
    """Workers that die in the reasoning, in its end, and in the form leave the same output."""
    one = plain_outputs(model, FEW)[-1]
    assert text_of(model, one.output).endswith("\nSo: never\n\n{}")
    simulation = serve(model, model, "float64", MODES[0])
    again = []
    for count in range(1, len(one.output)):
        prefill, decode = simulation._place(one.prompt, one.max_tokens)
        tokens = {index: one.tokens[index] for index in range(count)}
        key = one.key._replace(request_id=str(count))
        again.append(replace(one, key=key, prefill=prefill, decode=decode, tokens=tokens, ends={}))
        simulation.submitted.append(again[-1])
        simulation._attempt(again[-1:])
    simulation.run()
    simulation.assert_at_baseline()
    assert {tuple(other.output) for other in again} == {tuple(one.output)}


def test_tokens_that_say_more_behind_an_end_are_those_of_a_plain_search(model: Path) -> None:
    reasoning_masks = ReasoningMasks(model_vocabulary(model, 364, [EOS])())
    tokens = [reasoning_masks._bytes_of(token_id) for token_id in range(364)]
    rng, found = Random(2), 0
    for _ in range(200):
        ends = tuple("".join(rng.choices("the ox\n", k=rng.randint(1, 3))) for _ in range(2))
        params = GenerationParams(
            sampling=SamplingParams(),
            stops=StopConditions(max_tokens=9, reasoning=Reasoning(begun=True, ends=ends)),
        )
        progress = reasoning_masks.begin(known(params.stops.reasoning))
        progress.follow(rng.choices(range(364), k=rng.randint(0, 5)))
        mask = reasoning_masks.that_say_no_more(progress, params)
        forbidden: set[int] = set()
        if mask is not None:
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            forbidden = set(np.flatnonzero(bits == 0).tolist())
        rests = [*progress.unfinished_ends(99)] if not progress.has_ended else []
        wholes = [end.encode() for end in ends] if not progress.has_ended else []
        assert forbidden == {
            token_id
            for token_id, token in enumerate(tokens)
            if any(token.startswith(rest) and token[len(rest) :].strip() for rest in rests)
            or any(token.partition(end)[2].strip() for end in wholes)
        }
        found += len(forbidden)
    assert found > 500


def test_pairs_that_retract(model: Path) -> None:
    served = assert_same(model, MODES[0], FEW)
    assert sum(one.retractions for one in served) > 0


def test_a_device_that_works_late(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_outputs(model, FEW)
    monkeypatch.setattr(Simulation, "late", True)
    assert_same(model, MODES[2], FEW)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_outputs_are_the_same_in_every_mode(model: Path, mode: Mode) -> None:
    assert_same(model, mode, 60)
