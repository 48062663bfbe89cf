"""The text and the bytes of single tokens, as answers with log-probabilities show them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from tokenizers import Tokenizer

from kvrelay.text.detokenizer import Detokenizer

_BYTE: Final = re.compile(r"<0x([0-9A-F]{2})>")
_CACHED: Final = 1 << 16


class TextLengths:
    """A counter of the characters that each token of an output adds to its text.

    A character of several tokens counts for the last one, so that all begin where it does.

    Args:
        tokenizer: only decodes here.
        skip_special_tokens: whether the text leaves special tokens out.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)

    def __call__(self, token_id: int) -> int:
        """Return the characters that the next token adds."""
        return len(self._detokenizer.push(token_id))


class LengthsInText:
    """The same for the tokens of a known text; special tokens that it does not have add nothing.

    Args:
        tokenizer: only decodes here.
        text: the text.
        special: the special tokens' texts by id.
    """

    def __init__(self, tokenizer: Tokenizer, text: str, special: Mapping[int, str]) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
        self._text = text
        self._special = special
        self._place = 0

    def __call__(self, token_id: int) -> int:
        """Return the characters that the next token adds."""
        name = self._special.get(token_id)
        if name is not None and not self._text.startswith(name, self._place):
            return 0
        length = len(self._detokenizer.push(token_id))
        length = min(length, len(self._text) - self._place)
        self._place += length
        return length


class TokenTexts:
    """Texts of single tokens; bytes that are no whole character become U+FFFD.

    Callable from any thread.

    Args:
        tokenizer: only decodes here.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder: Any = tokenizer.decoder
        described: str = "" if decoder is None else decoder.__getstate__().decode()
        self._byte_of = _byte_alphabet() if '"ByteLevel"' in described else {}
        added = tokenizer.get_added_tokens_decoder()
        self._added = added.keys()
        self._special = {token_id: one.content for token_id, one in added.items() if one.special}
        self.special_ids = {text: token_id for token_id, text in self._special.items()}
        """The ids of special tokens by their text."""
        bracketed = {
            one.content: token_id
            for token_id, one in added.items()
            if one.content[:1] + one.content[-1:] == "<>"
        }
        self.unspelled_ids = self.special_ids | bracketed
        """The ids of tokens that llguidance takes for no text: a grammar names them by their id."""
        self._anchor = tokenizer.token_to_id("a")
        self.bytes_of = lru_cache(_CACHED)(self._bytes_of)

    def text_of(self, token_id: int) -> str:
        """The token's text."""
        return self.bytes_of(token_id).decode(errors="replace")

    def lengths(self, *, skip_special_tokens: bool) -> TextLengths:
        """Make a counter of the characters that tokens add to a text."""
        return TextLengths(self._tokenizer, skip_special_tokens=skip_special_tokens)

    def lengths_in(self, text: str) -> LengthsInText:
        """Make a counter for the tokens of a text, to which the tokenizer may add special ones."""
        return LengthsInText(self._tokenizer, text, self._special)

    def _bytes_of(self, token_id: int) -> bytes:
        """The token's bytes; none for an id that the tokenizer does not know."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return str(token).encode()
        if self._byte_of:
            known = [self._byte_of.get(mark) for mark in token]
            return bytes([byte for byte in known if byte is not None])
        if found := _BYTE.fullmatch(token):
            return bytes([int(found[1], 16)])
        return self._decoded(token_id).encode()

    def _decoded(self, token_id: int) -> str:
        """The text of a token behind another one: tokenizers drop a space where a text begins."""
        if self._anchor is None:
            return str(self._tokenizer.decode([token_id], skip_special_tokens=False))
        before = self._tokenizer.decode([self._anchor], skip_special_tokens=False)
        both = self._tokenizer.decode([self._anchor, token_id], skip_special_tokens=False)
        return str(both.removeprefix(before))


@lru_cache(4)
def token_texts(tokenizer: Tokenizer) -> TokenTexts:
    """The texts of a tokenizer's tokens, which all outputs share."""
    return TokenTexts(tokenizer)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable bytes stand for themselves."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }
