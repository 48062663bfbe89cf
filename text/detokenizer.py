"""Turns token ids into text, a token at a time.

Workers look for stop strings in this text and the router streams it. Both use
this one implementation, so that both see a stop string at the same token.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """Decodes incrementally, with the same result as decoding all tokens at once.

    Except with a few tokenizers (byte fallback after invalid UTF-8), which change text
    of earlier tokens. Text that was returned stays, and decoding goes on from there.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._token_ids: list[int] = []
        self._num_returned = 0  # tokens at the start of _token_ids whose text was returned
        self._text = ""

    def push(self, token_id: int) -> str:
        """Adds a token; returns new text of whole characters, often none."""
        self._token_ids.append(token_id)
        piece = self._step(token_id)
        if piece:
            self._text += piece
            self._num_returned = len(self._token_ids)
        return piece

    def finish(self) -> str:
        """The text that was not returned yet; bytes of an incomplete character as U+FFFD."""
        whole = self._decode(self._token_ids)
        if whole.startswith(self._text):
            return whole[len(self._text) :]
        return self._decode(self._token_ids[self._num_returned :])

    def _step(self, token_id: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception as error:  # the library raises nothing narrower
            if "Invalid prefix" not in str(error):
                raise
            # A new stream, which needs a token of context to go on from.
            self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
            self._stream.step(self._tokenizer, token_id)
            return self._decode(self._token_ids[self._num_returned :])

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
