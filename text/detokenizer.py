"""The detokenizer, which turns token ids into text, a token at a time.

Workers look for stop strings in this text and the router streams it. Both use
this one implementation, so that both see a stop string at the same token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_MAX_PENDING: Final = 16
"""The most tokens that wait without text.

A character has four bytes at most. More tokens without text are no text at all, or no UTF-8, and
decoding them again and again takes ever longer.
"""
_MAX_UNFINISHED: Final = 4
"""Tokens at the end that may still be part of a character."""


class Detokenizer:
    """An incremental decoder, with the same result as decoding all tokens at once.

    The result differs with a few tokenizers (byte fallback after invalid UTF-8), which change text
    of earlier tokens. Text that was returned stays, and decoding goes on from there.

    A token costs the same however many came before it::

        ... | context | pending
            | those of the text that was returned last | no text of them was returned
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._context: list[int] = []
        self._pending: list[int] = []

    @property
    def num_pending(self) -> int:
        """The number of tokens whose text was not returned yet."""
        return len(self._pending)

    def push(self, token_id: int) -> str:
        """Add a token; return new text of whole characters, often none."""
        self._pending.append(token_id)
        piece = self._step(token_id)
        if piece:
            self._context, self._pending = self._pending, []
        elif len(self._pending) > _MAX_PENDING:
            piece = self._give_up_pending()
        return piece

    def finish(self) -> str:
        """The text that was not returned yet; an incomplete character becomes U+FFFD."""
        if not self._pending:
            return ""
        before, whole = self._decode(self._context), self._decode(self._context + self._pending)
        return whole[len(before) :] if whole.startswith(before) else self._decode(self._pending)

    def _step(self, token_id: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception as error:  # the library raises nothing narrower
            if "Invalid prefix" not in str(error):
                raise
            self._restart([token_id])  # which needs a token of context to go on from
            return self._decode(self._pending)

    def _give_up_pending(self) -> str:
        """Give up pending tokens that no later token can complete; return their text."""
        kept = [token_id for token_id in self._pending if self._decode([token_id] * 2)]
        if len(kept) <= _MAX_PENDING:  # the others have no text
            self._pending = kept
            self._restart(self._context + kept)
            return ""
        whole, last = self._decode(kept), len(kept) - _MAX_UNFINISHED
        for cut in range(last, last - _MAX_UNFINISHED, -1):
            if self._decode(kept[:cut]) + self._decode(kept[cut:]) == whole:
                break
        else:
            cut = last
        self._context, self._pending = kept[:cut], kept[cut:]
        self._restart(self._pending)
        return self._decode(self._context)

    def _restart(self, token_ids: Sequence[int]) -> None:
        """Decode with a new stream from now on, which starts with these tokens."""
        self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
        for token_id in token_ids:
            self._stream.step(self._tokenizer, token_id)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
