"""Streamed text splits no character, loses nothing and has no part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kvrelay.engine.executor.stop import StopChecker
from kvrelay.router.requests.output_text import TextStream
from kvrelay.text.detokenizer import Detokenizer
from kvrelay.wire.output import EndReason, RequestEnd
from kvrelay.wire.submit import StopConditions
from tests.checkpoints import id_of

from .toy_tokenizers import byte_level_tokenizer, sentencepiece_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
SENTENCEPIECE = sentencepiece_tokenizer()
TEXTS = st.text(alphabet="ab é日😀🎉 the\n", max_size=30)


def pieces(stream: TextStream, token_ids: Sequence[int]) -> list[str]:
    return [stream.push(token_id) for token_id in token_ids]


def stop_at(
    tokenizer: Tokenizer, token_ids: Sequence[int], stop: Sequence[str], min_tokens: int = 0
) -> tuple[list[int], str | None]:
    """What the worker does: the tokens up to the one that completes a stop string, and which."""
    conditions = StopConditions(1_000, min_tokens=min_tokens, stop=tuple(stop))
    checker = StopChecker(conditions, tokenizer)
    for count, token_id in enumerate(token_ids, start=1):
        finish = checker.check(token_id)
        if finish is not None:
            assert not isinstance(finish.matched_stop, int)
            return list(token_ids[:count]), finish.matched_stop
    return list(token_ids), None


def text_before_stop(
    tokenizer: Tokenizer, token_ids: Sequence[int], stop: Sequence[str], min_tokens: int
) -> str | None:
    """The text up to where the first stop string that counts begins; None without one.

    One counts if it is whole, in whole characters, at `min_tokens` or later, and
    does not reach into text that an earlier one has made ordinary.
    """
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    text, ordinary = "", 0
    for count, token_id in enumerate(token_ids, start=1):
        text += detokenizer.push(token_id)
        starts = [text.find(one, ordinary) for one in stop if one in text[ordinary:]]
        if starts and count >= min_tokens:
            return text[: min(starts)]
        if starts:
            ordinary = len(text)
    return None


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=40), st.booleans())
@settings(deadline=None, max_examples=400)
def test_any_tokens_render_as_the_tokenizer_decodes_them(
    token_ids: list[int], skip_special_tokens: bool
) -> None:
    stream = TextStream(BYTE_LEVEL, skip_special_tokens=skip_special_tokens)
    shown = "".join(pieces(stream, token_ids)) + stream.finish()
    assert shown == BYTE_LEVEL.decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize(
    "mark",
    ["<|end|>", "Â", "ð", "ł", "\u00a1"],  # of the byte level's letters for bytes
)
def test_tokens_that_never_make_text_cost_no_more_each(
    mark: str, skip_special_tokens: bool
) -> None:
    """Only the last few are decoded with the next one; and what comes after is text again."""
    bad = [id_of(BYTE_LEVEL, mark)] * 500
    good = BYTE_LEVEL.encode(" héllo 🎉", add_special_tokens=False).ids
    detokenizer = Detokenizer(BYTE_LEVEL, skip_special_tokens=skip_special_tokens)
    shown = ""
    for token_id in [*bad, *good]:
        shown += detokenizer.push(token_id)
        assert detokenizer.num_pending < 20
    shown += detokenizer.finish()
    assert shown == BYTE_LEVEL.decode([*bad, *good], skip_special_tokens=skip_special_tokens)


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=200))
@settings(deadline=None, max_examples=100)
def test_bytes_of_a_character_between_tokens_without_text(token_ids: list[int]) -> None:
    """Special tokens are left out, and the bytes around them belong together."""
    special = id_of(BYTE_LEVEL, "<|tool|>")
    spread = [one for token_id in token_ids for one in (token_id, *[special] * 30)]
    stream = TextStream(BYTE_LEVEL)
    shown = "".join(pieces(stream, spread)) + stream.finish()
    assert shown == BYTE_LEVEL.decode(token_ids)


def test_bytes_that_are_no_text_end_where_text_goes_on(sentencepiece: Tokenizer) -> None:
    bad = [id_of(sentencepiece, "<0xC3>")] * 500
    good = sentencepiece.encode("the dog").ids
    stream = TextStream(sentencepiece)
    shown = "".join(pieces(stream, [*good, *bad, *good])) + stream.finish()
    assert shown == sentencepiece.decode([*good, *bad, *good])


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE])
@given(TEXTS, TEXTS, st.lists(st.text("ab é日😀t", min_size=1, max_size=4), min_size=1, max_size=3))
@settings(deadline=None, max_examples=100)
def test_a_stop_is_found_again_after_what_was_emitted(
    tokenizer: Tokenizer, before: str, after: str, stop: list[str]
) -> None:
    """A checker that goes on after much output decides as the one that saw all of it."""
    token_ids = tokenizer.encode(before * 10 + "日本語 and 🎉" * 20 + before + after).ids
    conditions = StopConditions(10_000, stop=tuple(stop))
    whole = StopChecker(conditions, tokenizer)
    ends = []
    for token_id in token_ids:
        ends.append(whole.check(token_id))
        if ends[-1] is not None:
            break
    for begin in {0, len(ends) // 2, max(0, len(ends) - 3), len(ends) - 1}:
        resumed = whole.again(token_ids[:begin])
        later = token_ids[begin : len(ends)]
        assert [resumed.check(token_id) for token_id in later] == ends[begin:]


@pytest.mark.parametrize("letter", ["a", "<|tool|>", "ð"])
def test_a_checker_goes_on_without_the_text_of_all_that_was_emitted(
    letter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[int] = []
    push = Detokenizer.push

    def recorded(detokenizer: Detokenizer, token_id: int) -> str:
        pushed.append(token_id)
        return push(detokenizer, token_id)

    monkeypatch.setattr(Detokenizer, "push", recorded)
    emitted = [id_of(BYTE_LEVEL, letter)] * 20_000
    checker = StopChecker(StopConditions(20_003, stop=("xy",)), BYTE_LEVEL, emitted)
    assert len(pushed) < 200
    ends = [checker.check(id_of(BYTE_LEVEL, letter)) for letter in "xa"]
    assert ends == [None, None]
    assert checker.check(emitted[0]) == RequestEnd(EndReason.LENGTH)


@given(TEXTS)
@settings(deadline=None, max_examples=300)
def test_a_leading_space_tokenizer_keeps_inner_spaces(text: str) -> None:
    token_ids = SENTENCEPIECE.encode(text, add_special_tokens=False).ids
    stream = TextStream(SENTENCEPIECE)
    shown = "".join(pieces(stream, token_ids)) + stream.finish()
    assert shown == SENTENCEPIECE.decode(token_ids)


@given(TEXTS)
@settings(deadline=None, max_examples=200)
def test_no_piece_holds_half_a_character(text: str) -> None:
    stream = TextStream(BYTE_LEVEL)
    assert not any("�" in piece for piece in pieces(stream, BYTE_LEVEL.encode(text).ids))


@given(
    TEXTS,
    st.lists(st.text("ab é日😀t", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 8),
)
@example("日", ["日"], 2)
@example(" 日", [" "], 2)  # the space comes with the character after it
@example("aaaa", ["aa"], 3)
@settings(deadline=None, max_examples=400)
def test_no_part_of_a_stop_string_is_ever_shown(
    text: str, stop: list[str], min_tokens: int
) -> None:
    """The worker says where it stops; what is shown ends where that stop string begins.

    sgl-project/sglang#31598, deepjavalibrary/djl#3085.
    """
    all_ids = BYTE_LEVEL.encode(text).ids
    token_ids, matched = stop_at(BYTE_LEVEL, all_ids, stop, min_tokens)
    before = text_before_stop(BYTE_LEVEL, all_ids, stop, min_tokens)
    assert (matched is None) == (before is None)
    expected = BYTE_LEVEL.decode(token_ids) if before is None else before
    stream = TextStream(BYTE_LEVEL, stop=stop, min_tokens=min_tokens)
    shown = ""
    for piece in pieces(stream, token_ids):
        shown += piece
        assert expected.startswith(shown)
    assert shown + stream.finish(matched) == expected


def test_a_character_comes_with_its_last_byte(tokenizer: Tokenizer) -> None:
    token_ids = [id_of(tokenizer, mark) for mark in "ðŁ¦Ħ"]  # the bytes of U+1F984
    stream = TextStream(tokenizer)
    assert pieces(stream, token_ids) == ["", "", "", "🦄"]


def test_unfinished_bytes_end_as_a_replacement_character(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    token_ids = [id_of(tokenizer, mark) for mark in "aðŁ"]
    assert pieces(stream, token_ids) == ["a", "", ""]
    assert stream.finish() == "�"


def test_text_once_shown_stays_when_the_tokenizer_changes_its_mind(
    sentencepiece: Tokenizer,
) -> None:
    """Byte fallback renders a whole run of bytes anew when it turns out invalid."""
    valid = [id_of(sentencepiece, f"<0x{byte:02X}>") for byte in "é".encode()]
    broken = id_of(sentencepiece, "<0xC3>")
    word = sentencepiece.encode("the dog").ids
    assert sentencepiece.decode([*valid, broken, *word]) == "��� the dog"
    stream = TextStream(sentencepiece)
    shown = "".join(pieces(stream, [*valid, broken, *word])) + stream.finish()
    assert shown == "é� the dog"


def test_text_that_may_become_a_stop_string_waits(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stop=["###"])
    hashes = id_of(tokenizer, "#")
    assert stream.push(id_of(tokenizer, "a")) == "a"
    assert stream.push(hashes) == ""
    assert stream.push(hashes) == ""
    assert stream.push(id_of(tokenizer, "b")) == "##b"
    assert pieces(stream, [hashes] * 3) == ["", "", ""]
    assert stream.finish("###") == ""


def test_held_text_comes_at_an_end_without_a_match(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stop=["END"])
    assert pieces(stream, [id_of(tokenizer, c) for c in "xEN"]) == ["x", "", ""]
    assert stream.finish() == "EN"


def test_the_longest_possible_beginning_is_held(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stop=["aab", "b!"])
    ids = [id_of(tokenizer, c) for c in "aaab"]
    assert pieces(stream, ids) == ["", "", "a", ""]
    assert stream.finish("aab") == ""


def test_a_stop_string_before_min_tokens_is_text(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stop=["ab"], min_tokens=4)
    ids = [id_of(tokenizer, c) for c in "abxab"]
    assert "".join(pieces(stream, ids)) == "abx"
    assert stream.finish("ab") == ""


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_show_only_when_asked(tokenizer: Tokenizer, skip: bool) -> None:
    stream = TextStream(tokenizer, skip_special_tokens=skip)
    ids = [id_of(tokenizer, "a"), id_of(tokenizer, "<|tool|>")]
    shown = "".join(pieces(stream, ids)) + stream.finish()
    assert shown == ("a" if skip else "a<|tool|>")
