"""The text and the bytes of single tokens, as answers with log-probabilities show them."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Final

from tokenizers import Tokenizer

_BYTE: Final = re.compile(r"<0x([0-9A-F]{2})>")
_CACHED: Final = 1 << 16


class TokenTexts:
    """Texts of single tokens; bytes that are no whole character become U+FFFD.

    Callable from any thread.

    Args:
        tokenizer: only decodes here.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        described = json.loads(tokenizer.to_str())
        self._byte_of = (
            _byte_alphabet() if '"ByteLevel"' in json.dumps(described["decoder"]) else {}
        )
        self._added = {one["id"] for one in described.get("added_tokens") or []}
        self._anchor = tokenizer.token_to_id("a")
        self.bytes_of = lru_cache(_CACHED)(self._bytes_of)

    def text_of(self, token_id: int) -> str:
        """The token's text."""
        return self.bytes_of(token_id).decode(errors="replace")

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


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable bytes stand for themselves."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }
