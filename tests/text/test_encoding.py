"""Tokenizing lets other threads run, and stops early where a text is far too long."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kvrelay.text.encoding import TooManyTokens, decode, encode
from kvrelay.text.token_bytes import longest_token_bytes
from tests.router.toy_tokenizers import byte_level_tokenizer, sentencepiece_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
SENTENCEPIECE = sentencepiece_tokenizer()
LONG_TEXT = "Hello world, the quick brown fox. " * 15_000  # 0.5 MB


@pytest.mark.parametrize("text", ["", "Hello world, héllo 日本", LONG_TEXT[:300_000]])
def test_the_ids_are_the_tokenizers_own(text: str) -> None:
    expected = BYTE_LEVEL.encode(text).ids
    assert encode(BYTE_LEVEL, text, 1 << 20) == expected
    assert decode(BYTE_LEVEL, expected, skip_special_tokens=True) == text


def test_a_text_of_too_many_tokens_says_how_many() -> None:
    tokens = len(BYTE_LEVEL.encode("Hello world").ids)
    assert len(encode(BYTE_LEVEL, "Hello world", tokens)) == tokens
    with pytest.raises(TooManyTokens) as caught:
        encode(BYTE_LEVEL, "Hello world", tokens - 1)
    assert (caught.value.tokens, caught.value.is_exact) == (tokens, True)


class CountingTokenizer:
    """Passes encoding on to a tokenizer, and sums up the characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.characters = tokenizer, 0

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.characters += sum(map(len, texts))
        return self.tokenizer.encode_batch_fast(texts, **options)


def test_of_a_text_that_is_far_too_long_the_beginning_is_encoded() -> None:
    counting = CountingTokenizer(BYTE_LEVEL)
    with pytest.raises(TooManyTokens) as caught:
        encode(counting, 4 * LONG_TEXT, 1000)  # type: ignore[arg-type]
    assert (caught.value.tokens, caught.value.is_exact) == (1000, False)
    assert 0 < counting.characters <= 32 << 10, "a piece takes up to 270 times its length"


async def test_the_event_loop_runs_while_a_long_text_is_encoded_and_decoded() -> None:
    """Where the lock is held, the loop stands still for nearly the whole time."""
    ids = await without_a_gap(encode, BYTE_LEVEL, LONG_TEXT[:260_000], 1 << 24)
    await without_a_gap(decode, BYTE_LEVEL, 4 * ids, skip_special_tokens=True)


async def without_a_gap(work: Any, *args: Any, **kwargs: Any) -> Any:
    """What the work returns; checks that the loop turned all the time while it ran in a thread.

    In one of a few tries: where the lock is held it does in none, and a neighbour on the machine
    can stop this process in one.
    """
    gaps = []
    for _ in range(3):
        result, gap = await with_gap(work, *args, **kwargs)
        gaps.append(gap)
        if gap < 1 / 2:
            return result
    raise AssertionError(f"the loop stood still for these shares of the time: {gaps}")


async def with_gap(work: Any, *args: Any, **kwargs: Any) -> tuple[Any, float]:
    """What the work returns, and the longest share of its time in which the loop stood still."""
    turns = []

    def timed() -> tuple[Any, float, float]:
        begin = time.perf_counter()
        return work(*args, **kwargs), begin, time.perf_counter()

    task = asyncio.create_task(asyncio.to_thread(timed))
    while not task.done():
        await asyncio.sleep(0)
        turns.append(time.perf_counter())
    result, begin, end = await task
    moments = [begin, *(turn for turn in turns if begin < turn < end), end]
    longest = max(after - before for before, after in itertools.pairwise(moments))
    return result, longest / (end - begin)


@given(st.text(max_size=40))
@settings(deadline=None, max_examples=200)
def test_no_token_stands_for_more_bytes_than_the_longest(text: str) -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        longest = longest_token_bytes(tokenizer)
        assert longest is not None
        tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
        assert len(text.encode()) <= tokens * longest


def changed(tokenizer: Tokenizer, **parts: Any) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(json.loads(tokenizer.to_str()) | parts))


@pytest.mark.parametrize(
    "tokenizer",
    [
        changed(BYTE_LEVEL, normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
        changed(
            BYTE_LEVEL,
            normalizer={"type": "Replace", "pattern": {"String": "aa"}, "content": "a"},
        ),
        changed(BYTE_LEVEL, pre_tokenizer={"type": "WhitespaceSplit"}),
        changed(SENTENCEPIECE, pre_tokenizer={"type": "BertPreTokenizer"}),
    ],
)
def test_there_is_no_longest_where_text_may_be_dropped(tokenizer: Tokenizer) -> None:
    assert longest_token_bytes(tokenizer) is None


def test_there_is_no_longest_where_a_token_takes_in_spaces() -> None:
    tokenizer = byte_level_tokenizer()
    described = json.loads(tokenizer.to_str())
    described["added_tokens"][0]["lstrip"] = True
    assert longest_token_bytes(Tokenizer.from_str(json.dumps(described))) is None
