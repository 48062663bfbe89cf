"""Grammars are compiled once, off the caller's thread, and their errors name their place."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

from kvrelay.text import grammar
from kvrelay.text.grammar import (
    GrammarError,
    Grammars,
    model_vocabulary,
)
from kvrelay.text.json_schema import find_place
from kvrelay.wire.submit import StructuredOutput
from tests.checkpoints import VOCAB_SIZE, make_tokenizer
from tests.known import known
from tests.vocabularies import byte_vocabulary


@dataclass(frozen=True)
class Wanted:
    json_schema: str | None = None
    regex: str | None = None
    choice: Sequence[str] = ()
    grammar: str | None = None


@pytest.fixture
def grammars() -> Grammars:
    return Grammars(byte_vocabulary)


def test_a_grammar_is_compiled_once_in_another_thread() -> None:
    threads = []

    def make() -> LLTokenizer:
        threads.append(threading.current_thread())
        return byte_vocabulary()

    grammars = Grammars(make)
    seconds: list[float] = []
    hits: list[int] = []
    grammars.on_compiled = seconds.append
    grammars.on_hit = lambda: hits.append(1)
    first = grammars.prepare(Wanted(regex="a+"))
    assert grammars.prepare(Wanted(regex="a+")) is first
    assert not known(first.result().new_matcher()).is_accepting()
    assert (len(seconds), len(hits)) == (1, 1)
    assert threads != [threading.current_thread()]


def begun(grammars: Grammars, wanted: Wanted) -> LLMatcher:
    """A matcher at the beginning of a grammar."""
    return known(grammars.prepare(wanted).result().new_matcher())


def compilations_of(grammars: Grammars) -> list[float]:
    """An entry for each compilation from now on."""
    seconds: list[float] = []
    grammars.on_compiled = seconds.append
    return seconds


def test_the_oldest_are_forgotten(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "_MOST_KEPT", 2)
    compiled = compilations_of(grammars)
    for regex, count in [("a", 1), ("b", 2), ("a", 2), ("c", 3), ("a", 3), ("b", 4)]:
        grammars.prepare(Wanted(regex=regex)).result()
        assert len(compiled) == count, regex


def test_what_is_held_is_not_compiled_again(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "_MOST_KEPT", 1)
    held = {regex: grammars.prepare(Wanted(regex=regex)) for regex in "abc("}
    for _ in range(2):
        for regex, future in held.items():
            assert grammars.prepare(Wanted(regex=regex)) is future
            assert isinstance(future.exception(), GrammarError) == (regex == "(")


def test_what_nobody_waits_for_is_not_compiled() -> None:
    go = threading.Event()

    def make() -> LLTokenizer:
        assert go.wait(60)
        return byte_vocabulary()

    grammars = Grammars(make)
    compiled = compilations_of(grammars)
    running, waited_for = (grammars.prepare(Wanted(regex=regex)) for regex in "ab")
    for number in range(10):
        grammars.prepare(Wanted(regex=f"c{number}"))
    again = grammars.prepare(Wanted(regex="b"))
    del waited_for
    go.set()
    grammars.prepare(Wanted(regex="d")).result()
    assert running.done()
    assert again.done()
    assert len(compiled) == 3


def test_what_takes_too_much_is_refused(grammars: Grammars) -> None:
    """Each adds a factor to the schema's forms."""
    parts = [
        {"anyOf": [{"properties": {f"{x}{n}": {"const": 1}}} for x in "ab"]} for n in range(16)
    ]
    with pytest.raises(GrammarError, match="too large"):
        grammars.prepare(Wanted(json_schema=json.dumps({"allOf": parts}))).result()


@pytest.mark.parametrize("text", ["", "é", 'a"b', "a\nb", "😀 x", "a/b\\"])
def test_choices_of_any_text(grammars: Grammars, text: str) -> None:
    matcher = begun(grammars, Wanted(choice=("no", text)))
    assert matcher.consume_tokens(list(text.encode()))
    assert matcher.is_accepting()


def test_a_schema_bounds_white_space(grammars: Grammars) -> None:
    wanted = Wanted(json_schema='{"type": "array"}')
    for text in ("[1, 2]", "[\n    1\n]"):
        assert begun(grammars, wanted).consume_tokens(list(text.encode())), text
    for text in ("[  1]", "[\r1]"):
        assert not begun(grammars, wanted).consume_tokens(list(text.encode())), text


def test_tokens_that_the_tokenizer_lacks_are_never_allowed(tmp_path: Path) -> None:
    """A model may have more tokens than its tokenizer, and ends of more than one kind."""
    tokenizer = make_tokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    grammars = Grammars(model_vocabulary(tmp_path, VOCAB_SIZE + 40, (0, 1)))
    matcher = begun(grammars, Wanted(regex="(.|\n)*"))
    bits = int.from_bytes(matcher.compute_bitmask(), "little")
    known = tokenizer.get_vocab_size()
    assert bits >> known == 0
    assert bits & 3 == 3
    assert all(
        bits >> token & 1 for token in range(2, known) if tokenizer.decode([token]).isalpha()
    )


ROOT = {
    "definitions": {"a/b~": {"items": {"bad": 1}}},
    "properties": {"x": {"anyOf": [{"type": "string"}, {"$ref": "#/definitions/a~1b~0"}]}},
}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (ROOT, "/definitions/a~1b~0/items"),
        ({"properties": {"x": {"anyOf": [{}, {"bad": 1}]}}}, "/properties/x/anyOf/1"),
        ({"bad": 1, "properties": {"x": {}}}, ""),
        ([1], ""),
    ],
)
def test_the_place_of_an_error_is_the_innermost_schema(schema: object, place: str) -> None:
    assert find_place(json.dumps(schema), lambda text: '"bad"' in text) == place


def test_the_search_for_a_place_is_bounded() -> None:
    tried = []
    members = {str(number): {"bad": number} for number in range(2000)}

    def fails(schema: str) -> bool:
        tried.append(schema)
        return False

    assert find_place(json.dumps({"properties": members}), fails) == ""
    assert len(tried) == 200


def test_grammars_are_kept_by_size(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "LEAST_BYTES", 1 << 20)
    monkeypatch.setattr(grammar, "MOST_BYTES", 2 << 20)
    monkeypatch.setattr(grammar, "_MOST_KEPT_BYTES", 2 << 20)
    compiled = compilations_of(grammars)
    for regex, count in [("a", 1), ("b", 2), ("a", 2), ("c", 3), ("b", 4), ("c", 4)]:
        grammars.prepare(Wanted(regex=regex)).result()
        assert len(compiled) == count, regex


def test_a_deep_grammar_is_compiled_on_a_large_stack(grammars: Grammars) -> None:
    chain = "".join(f"r{i}:r{i + 1}\n" for i in range(4000))
    grammars.prepare(Wanted(grammar=f'start: r0\n{chain}r4000: "a"\n')).result()


def test_a_grammar_whose_masks_have_taken_much_is_compiled_anew(grammars: Grammars) -> None:
    compiled = compilations_of(grammars)
    held = grammars.prepare(Wanted(regex="a")).result()
    held.charge(1e-6)
    assert grammars.prepare(Wanted(regex="a")).result() is held
    held.charge(60.0)
    assert held.new_matcher() is None
    assert known(grammars.prepare(Wanted(regex="a")).result().new_matcher()).consume_token(ord("a"))
    assert len(compiled) == 2


def test_memory_of_a_large_grammar_goes_back_to_the_system(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    trimmed = threading.Event()
    monkeypatch.setattr(grammar, "_TRIM_SECONDS", 0.0)
    monkeypatch.setattr(grammar, "trim_heap", trimmed.set)
    grammars.prepare(Wanted(regex="a")).result().charge(60.0)
    assert trimmed.wait(60)


def test_what_a_step_waits_for_does_not_queue() -> None:
    grammars, begun, goes_on = Grammars(byte_vocabulary), threading.Event(), threading.Event()

    def hold(_: float) -> None:
        if not begun.is_set():
            begun.set()
            assert goes_on.wait(60)

    grammars.on_compiled = hold
    held = [grammars.prepare(StructuredOutput(regex="a"))]
    assert begun.wait(60)
    queued = grammars.prepare(StructuredOutput(regex="b"))
    for awaited in "bc":
        future = grammars.prepare(StructuredOutput(regex=awaited), is_awaited=True)
        assert future.result(60).new_matcher() is not None
    assert queued.done()
    assert not held[0].done()
    goes_on.set()
    assert held[0].result(60)
    grammars.close()


def test_an_error_of_lark_keeps_its_place(grammars: Grammars) -> None:
    with pytest.raises(GrammarError, match=r"3\(1\): "):
        grammars.prepare(StructuredOutput(grammar='start: "x" /[/]/\n')).result(60)


def test_a_number_beyond_floats_is_no_schema(grammars: Grammars) -> None:
    schema = '{"type": "number", "minimum": 0.5, "maximum": 1' + "0" * 400 + "}"
    with pytest.raises(GrammarError, match="is no JSON schema"):
        grammars.prepare(StructuredOutput(json_schema=schema)).result(60)
