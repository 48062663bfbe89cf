"""Single tokens have the bytes that they add to a text."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from kvrelay.text.token_texts import TokenTexts
from tests.router.toy_tokenizers import CORPUS, byte_level_tokenizer, sentencepiece_tokenizer


@pytest.mark.parametrize("tokenizer", [byte_level_tokenizer(), sentencepiece_tokenizer()])
@pytest.mark.parametrize("text", [*CORPUS, "a<|end|>b", " two  spaces", "\n\n"])
def test_the_bytes_of_a_text(tokenizer: Tokenizer, text: str) -> None:
    texts, ids = TokenTexts(tokenizer), tokenizer.encode(text).ids
    whole = b"".join(texts.bytes_of(one) for one in ids).decode()
    assert whole.removeprefix(" ") == text.removeprefix(" ")


def test_part_of_a_character_and_an_unknown_token() -> None:
    tokenizer = byte_level_tokenizer()
    texts, first = TokenTexts(tokenizer), tokenizer.encode("𝄞").ids[0]
    assert texts.text_of(first) == "\N{REPLACEMENT CHARACTER}"
    assert texts.bytes_of(first) == "𝄞".encode()[: len(texts.bytes_of(first))]
    assert texts.bytes_of(tokenizer.get_vocab_size()) == b""
