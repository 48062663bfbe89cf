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
from kvrelay.wire.submit import (
    GenerationParams,
    Reasoning,
    SamplingParams,
    StopConditions,
    StructuredOutput,
)
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


def output_of(
    wanted: StructuredOutput | None,
    reasoning: Reasoning | None = None,
    budget: int | None = None,
) -> TokenState:
    params = GenerationParams(
        SamplingParams(structured_output=wanted, thinking_token_budget=budget),
        StopConditions(max_tokens=999, reasoning=reasoning),
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


def say(state: TokenState, text: str) -> None:
    state.token_ids += TOKENIZER.encode(text, add_special_tokens=False).ids


TEXTS = [TOKENIZER.decode([token_id]) for token_id in range(VOCAB)]
YES = StructuredOutput(choice=("yes",))


def test_an_output_begins_with_its_form_or_its_reasoning(grammars: Grammars) -> None:
    masks = GrammarMasks(grammars, VOCAB)
    state = output_of(YES, Reasoning(begins=("<a>",), ends=("!",)))
    assert masks_of(masks, state) == [{"y", "ye", "<", "\n"} & {*TEXTS}]
    for said, allowed in [("<", {"a"}), ("a", {">"})]:
        say(state, said)
        assert masks_of(masks, state) == [allowed]
    say(state, ">")
    assert not masks.begin([Scheduled(None, state, 1, sample=True)], [()]).wait()
    say(state, "!")
    assert masks_of(masks, state) == [{"y", "ye", "\n"} & {*TEXTS}]
    say(state, "\n\n")
    assert masks_of(masks, state) == [{"y", "ye"} & {*TEXTS}]
    say(state, "y")
    assert masks_of(masks, state) == [{"es"}]


@pytest.mark.parametrize("said", ["a", " qu"])
def test_a_token_that_would_end_the_reasoning_and_say_more_is_forbidden(
    grammars: Grammars, said: str
) -> None:
    masks = GrammarMasks(grammars, VOCAB)
    state = output_of(YES, Reasoning(begun=True, ends=("ui",)))
    say(state, said)
    [allowed] = masks_of(masks, state)
    assert isinstance(allowed, set)
    forbidden = {text for text in TEXTS if (said[-1] + text).partition("ui")[2].strip()}
    assert {" quick", *(["ill"] if said == " qu" else [])} <= forbidden
    assert {*TEXTS} - allowed == forbidden


def test_drafts_up_to_the_end_of_the_reasoning_and_behind_it(grammars: Grammars) -> None:
    """Each of the masks behind drafts is that of an output with these tokens."""
    masks = GrammarMasks(grammars, VOCAB)
    reasoning = Reasoning(begun=True, ends=("fox!",))
    state = output_of(YES, reasoning, 3)
    item = Scheduled(None, state, 1, sample=True, num_drafts=9)
    for drafted, kept in [("a fox!yes", "a fox!yes"), ("a fox!yen", "a fox!ye"), ("aaab", "aaa")]:
        ids = TOKENIZER.encode(drafted, add_special_tokens=False).ids
        [draft] = masks.cut([item], [ids])
        assert TOKENIZER.decode(list(draft)) == kept
        found = masks.begin([item], [draft]).wait()[0]
        assert not isinstance(found, GrammarError)
        for count in range(len(draft) + 1):
            alone = output_of(YES, reasoning, 3)
            alone.token_ids += draft[:count]
            other = masks.begin([Scheduled(None, alone, 1, sample=True)], [()]).wait().get(0)
            assert not isinstance(other, GrammarError)
            whole = np.full_like(found[count], -1) if other is None else other[0]
            assert np.array_equal(whole, found[count]), (drafted, count)
