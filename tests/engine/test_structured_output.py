"""Outputs keep to their grammars, and are the same whatever happens to their requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from kvrelay.engine.config import Speculation
from kvrelay.engine.executor import grammar_masks
from kvrelay.engine.executor.grammar_progress import GrammarProgress
from kvrelay.engine.executor.model_executor import ModelExecutor
from kvrelay.engine.executor.step import LaunchedStep
from kvrelay.wire.output import EndReason, FailureReason
from kvrelay.wire.submit import SamplingParams, StructuredOutput
from tests.checkpoints import make_checkpoint
from tests.engine.simulation import SimRequest, Simulation
from tests.engine.test_token_equality import Mode, finish_of, serve
from tests.schemas import random_schema

EOS = 1
FEW = 3
PLAIN = Mode()
PAIR = Mode(aggregated=False, overlap=True, cached=True, chunk=16, retract_every=5)
MODES = [
    replace(PAIR, speculation=Speculation.NGRAM),
    replace(PAIR, speculation=Speculation.DRAFT, retract_every=7),
    replace(PAIR, local=0.7, retract_every=3),
    replace(PAIR, aggregated=True, overlap=True, retract_every=4),
    replace(PAIR, overlap=False, retract_every=0),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("structured") / "llama")


def submit(
    simulation: Simulation, number: int, wanted: StructuredOutput | None, most: int = 600
) -> list[SimRequest]:
    rng = Random(number)
    sampling = SamplingParams(
        temperature=rng.choice((0.0, 0.8, 1.0)), seed=number, structured_output=wanted
    )
    prompt = [rng.randrange(2, 300) for _ in range(rng.randint(1, 40))]
    choices = rng.choice((1, 1, 2))
    return simulation.submit_choices(
        choices, prompt, most, sampling=sampling, stop_token_ids=frozenset({EOS})
    )


def outputs_of(
    model: Path, mode: Mode, wanted: Sequence[StructuredOutput | None]
) -> list[list[SimRequest]]:
    simulation = serve(model, model, "float64", mode)
    served, rng = [], Random(3)
    for number, one in enumerate(wanted):
        served.append(submit(simulation, number, one, 24 if one is None else 600))
        for _ in range(rng.randint(0, 20)):
            simulation.step()
    simulation.run()
    simulation.assert_at_baseline()
    return served


@cache
def schemas(count: int) -> tuple[StructuredOutput | None, ...]:
    """Schemas, and requests without any among them."""
    rng = Random(11)
    wanted = [StructuredOutput(json_schema=random_schema(rng)) for _ in range(count)]
    return tuple(None if number % 5 == 2 else one for number, one in enumerate(wanted))


@cache
def plain_outputs(model: Path, count: int) -> list[list[list[int]]]:
    served = outputs_of(model, PLAIN, schemas(count))
    return [[choice.output for choice in choices] for choices in served]


def text_of(model: Path, output: Sequence[int]) -> str:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text: str = tokenizer.decode(list(output), skip_special_tokens=True)
    return text


def assert_valid(model: Path, request: SimRequest) -> None:
    wanted = request.sampling.structured_output
    end = finish_of(request)
    if wanted is None:
        return
    assert (end.reason, end.matched_stop) == (EndReason.STOP, EOS)
    assert wanted.json_schema is not None
    value = json.loads(text_of(model, request.output))
    jsonschema.validate(value, json.loads(wanted.json_schema))


def assert_same_and_valid(model: Path, mode: Mode, count: int) -> list[SimRequest]:
    served = outputs_of(model, mode, schemas(count))
    for choices, plain in zip(served, plain_outputs(model, count), strict=True):
        assert [one.output for one in choices] == plain
        for one in choices:
            assert_valid(model, one)
    return [one for choices in served for one in choices]


def test_pairs_that_retract(model: Path) -> None:
    served = assert_same_and_valid(model, MODES[0], FEW)
    assert sum(one.retractions for one in served) > 0


def test_a_device_that_works_late(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards run before the tokens are known that their masks follow from."""
    plain_outputs(model, FEW)
    awaited: list[LaunchedStep[Any]] = []
    sample = ModelExecutor.sample

    def listen(self: ModelExecutor, launched: LaunchedStep[Any]) -> None:
        awaited.append(launched)
        sample(self, launched)

    monkeypatch.setattr(ModelExecutor, "sample", listen)
    monkeypatch.setattr(Simulation, "late", True)
    served = assert_same_and_valid(model, MODES[2], FEW)
    assert sum(one.retractions for one in served) > 0
    assert len(awaited) > 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "number"), [(mode, 250 if mode is MODES[0] else 75) for mode in MODES], ids=str
)
def test_200_schemas(model: Path, mode: Mode, number: int) -> None:
    """vllm-project/vllm#45592, #56556, guidance-ai/llguidance#265: no output breaks its schema."""
    assert sum(one is not None for one in schemas(250)) == 200
    assert_same_and_valid(model, mode, number)


def test_unmasked_requests_beside_masked_ones_are_as_alone(model: Path) -> None:
    wanted = schemas(FEW)
    alone = outputs_of(model, PLAIN, [None] * FEW)
    beside = plain_outputs(model, FEW)
    plain = [i for i, one in enumerate(wanted) if one is None]
    assert plain
    for index in plain:
        assert [one.output for one in alone[index]] == beside[index]


class Forgetful(GrammarProgress):
    """Is at the grammar's beginning wherever its request goes on."""

    _begun = False

    def follow(self, output_ids: Sequence[int]) -> None:
        if self._begun:
            super().follow(output_ids)
        else:
            self._begun, self.num_tokens = True, len(output_ids)


def test_a_state_that_is_not_made_anew_after_a_retraction_is_found(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = StructuredOutput(choice=("a text that is longer than three tokens",))
    texts = []
    for kind in (GrammarProgress, Forgetful):
        monkeypatch.setattr(grammar_masks, "GrammarProgress", kind)
        simulation = serve(model, model, "float64", replace(PAIR, retract_every=3))
        [one, *_] = submit(simulation, 2, wanted, 40)
        simulation.run()
        assert one.retractions
        texts.append(text_of(model, one.output))
    assert texts[0] == wanted.choice[0]
    assert texts[1] != texts[0]


FORMS: list[tuple[StructuredOutput, Any]] = [
    (StructuredOutput(choice=("yes", "no, never", "é/ü")), {"yes", "no, never", "é/ü"}),
    (StructuredOutput(regex="[a-c]{3}/[0-9]{2}"), None),
    (StructuredOutput(grammar='root ::= "a" item "b"\nitem ::= "x" | "y"'), {"axb", "ayb"}),
    (StructuredOutput(grammar='start: "a" item "b"\nitem: "x" | "y"'), {"axb", "ayb"}),
]


@pytest.mark.parametrize(("wanted", "texts"), FORMS, ids=["choice", "regex", "gbnf", "lark"])
def test_other_forms(model: Path, wanted: StructuredOutput, texts: set[str] | None) -> None:
    simulation = serve(model, model, "float64", replace(PAIR, speculation=Speculation.NGRAM))
    served = submit(simulation, 2, wanted)
    simulation.run()
    for one in served:
        text = text_of(model, one.output)
        assert finish_of(one).matched_stop == EOS
        assert text in texts if texts else text[3] == "/" and text[4:].isdecimal()


def test_a_grammar_that_cannot_be_used_fails_its_request_alone(model: Path) -> None:
    """A router refuses it; a worker that is sent it all the same serves the others."""
    simulation = serve(model, model, "float64", replace(PAIR, aggregated=True))
    [broken, *_] = submit(simulation, 1, StructuredOutput(regex="("))
    [good, *_] = submit(simulation, 1, StructuredOutput(choice=("yes",)))
    simulation.run()
    assert "unclosed group" in broken.ends[next(iter(broken.ends))].error
    assert text_of(model, good.output) == "yes"
    simulation.assert_at_baseline()


ROWS = " | ".join(f'/b/ "c{number}"' for number in range(4100))
WIDE = StructuredOutput(grammar=f'start: "a" x\nx: {ROWS}')
"""It compiles, and its second mask fails: the parser has more alternatives than it takes."""


@pytest.mark.parametrize("late", [False, True])
def test_a_grammar_that_fails_at_a_mask_ends_its_request_and_no_worker(
    late: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Simulation, "late", late)
    simulation = serve(model, model, "float64", replace(PAIR, aggregated=True, retract_every=0))
    [broken] = simulation.submit_choices(
        1,
        [5, 6, 7],
        20,
        sampling=SamplingParams(temperature=0.0, structured_output=WIDE),
        stop_token_ids=frozenset({EOS}),
    )
    for _ in range(5):  # more than the forwards in a row that a worker may fail
        simulation.run()
        [end] = broken.ends.values()
        assert "too many alternatives" in end.error
        assert (end.cause, end.retryable) == (FailureReason.GRAMMAR_FAILED, False)
        assert broken.output
        broken.ends.clear()
        simulation._attempt([broken])  # goes on at once where the grammar fails
    simulation.run()
    [good, *_] = submit(simulation, 1, StructuredOutput(choice=("yes",)))
    simulation.run()
    assert text_of(model, good.output) == "yes"
    simulation.assert_at_baseline()


@pytest.mark.parametrize(
    ("wanted", "side", "problem"),
    [
        (StructuredOutput(regex="("), "prefill", "unclosed group"),
        (WIDE, "decode", "too many alternatives"),
    ],
    ids=["prefill", "decode"],
)
def test_a_grammar_that_fails_on_one_worker_of_a_pair_ends_its_request_on_both(
    model: Path, wanted: StructuredOutput, side: str, problem: str
) -> None:
    simulation = serve(model, model, "float64", replace(PAIR, retract_every=0))
    [broken, *_] = submit(simulation, 2, wanted)
    simulation.run()
    ends = {broken.prefill.name: "prefill", broken.decode.name: "decode"}
    [(failed, end)] = [
        (ends[name], end)
        for name, end in broken.ends.items()
        if end.cause is FailureReason.GRAMMAR_FAILED
    ]
    assert failed == side
    assert problem in end.error
    assert bool(broken.output) == (side == "decode")
    simulation.assert_at_baseline()
