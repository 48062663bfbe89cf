"""A grammar whose lexer has failed or is full: no other output of the same grammar notices."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from llguidance import LLTokenizer

from kvrelay.engine.executor.grammar_masks import GrammarMasks
from kvrelay.engine.executor.step import Scheduled
from kvrelay.engine.executor.token_state import TokenState
from kvrelay.text import grammar
from kvrelay.text.grammar import GrammarError, Grammars
from kvrelay.wire.submit import GenerationParams, SamplingParams, StopConditions, StructuredOutput
from tests.checkpoints import make_tokenizer
from tests.known import known

TOKENIZER = make_tokenizer()
VOCAB = TOKENIZER.get_vocab_size()


def vocabulary() -> LLTokenizer:
    return LLTokenizer(TOKENIZER.to_str(), n_vocab=VOCAB, eos_token=1)


def token_of(letter: str) -> int:
    token_id: int | None = TOKENIZER.token_to_id(letter)
    return known(token_id)


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(vocabulary)
    yield made
    made.close()


def output_of(wanted: StructuredOutput) -> TokenState:
    params = GenerationParams(
        SamplingParams(structured_output=wanted), StopConditions(max_tokens=999)
    )
    return TokenState(token_ids=[1], input_len=1, prompt_ids=[1], params=params, choices=(0,))


def masks_of(masks: GrammarMasks, *states: TokenState) -> list[GrammarError | set[str]]:
    """The tokens that each output allows next, or why it cannot go on."""
    items = [Scheduled(None, state, 1, sample=True) for state in states]
    allowed = masks.begin(items, [() for _ in items]).wait()
    found: list[GrammarError | set[str]] = []
    for index in range(len(items)):
        mask = allowed[index]
        if isinstance(mask, GrammarError):
            found.append(mask)
            continue
        bits = np.unpackbits(np.asarray(mask).view(np.uint8), bitorder="little")[:VOCAB]
        found.append({TOKENIZER.decode([int(token_id)]) for token_id in np.flatnonzero(bits)})
    return found


def test_a_failed_lexer_fails_no_other_output(grammars: Grammars) -> None:
    masks = GrammarMasks(grammars, VOCAB)
    wanted = StructuredOutput(regex="x{9}|b(a{1000}){1000}")
    bad, good = output_of(wanted), output_of(wanted)
    assert masks_of(masks, bad, good) == [{"b", "x"}] * 2
    errors = []
    for letter in "baaaa":
        bad.token_ids.append(token_of(letter))
        good.token_ids.append(token_of("x"))
        [error, allowed] = masks_of(masks, bad, good)
        errors.append(error)
        assert allowed == {"x"}
    assert "too much work" in str(errors[-1])
    assert masks_of(masks, output_of(wanted)) == [{"b", "x"}]


def test_an_output_whose_lexers_fail_is_alone_soon(grammars: Grammars) -> None:
    masks = GrammarMasks(grammars, VOCAB)
    wanted = StructuredOutput(regex="x{20}|b(a{1000}){1000}")
    outputs = [output_of(wanted) for _ in range(32)]
    masks_of(masks, *outputs)
    compiled: list[float] = []
    grammars.on_compiled = compiled.append
    *good, bad = outputs
    for letter in "baaaaaaaaaaa":
        bad.token_ids.append(token_of(letter))
        for one in good:
            one.token_ids.append(token_of("x"))
        *allowed, error = masks_of(masks, *outputs)
        assert allowed == [{"x"}] * len(good)
        if isinstance(error, GrammarError):
            break
    assert isinstance(error, GrammarError)
    assert len(compiled) <= 12


def test_an_output_that_fills_lexer_after_lexer_ends(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its steps would wait for a compilation."""
    monkeypatch.setattr(grammar, "_LEXER_STATES", 400)
    compiled: list[float] = []
    grammars = Grammars(vocabulary)
    grammars.on_compiled = compiled.append
    pairs = "|".join(letter * 2 for letter in "abcdefghijklmnopqrst")
    masks = GrammarMasks(grammars, VOCAB)
    wanted = StructuredOutput(regex=f"({pairs}){{300}}")
    state = output_of(wanted)
    was_spent = False
    while not isinstance(masks_of(masks, state)[0], GrammarError):
        state.token_ids.append(token_of("a"))
        filling = known(state.grammar)
        if filling.num_filled and not was_spent:  # what it learns is counted for it alone still
            filling.compiled.spend()
            masks_of(masks, state)
            was_spent = state.grammar is not filling
            assert was_spent
            assert known(state.grammar).num_filled == 1
            masks_of(masks, output_of(wanted))
            assert known(state.grammar).compiled.num_matchers == 1
    assert 64 < len(state.token_ids) < 200
    assert len(compiled) == 6
    grammars.close()


def test_an_output_goes_on_when_its_lexer_is_full(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lexer learns from masks, too; one that has learnt nothing else has room again."""
    monkeypatch.setattr(grammar, "_LEXER_STATES", 400)
    compiled: list[float] = []
    grammars = Grammars(vocabulary)
    grammars.on_compiled = compiled.append
    masks = GrammarMasks(grammars, VOCAB)
    wanted = StructuredOutput(regex="([ab]{300}|c[de]{300}|f[gh]{300})")
    for letters in ("a" * 250, "c" + "d" * 250, "f" + "g" * 250):
        state = output_of(wanted)
        for letter in letters:
            [allowed] = masks_of(masks, state)
            assert not isinstance(allowed, GrammarError)
            state.token_ids.append(token_of(letter))
    assert len(compiled) > 1
    grammars.close()
