"""From token ids to text, a token at a time.

Workers look for stop strings in this text and the router shows it. One
implementation serves both, so that both see a stop string at the same token.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """Incremental decoding that agrees with decoding everything at once.

    That agreement is the tokenizer's to give: a few (byte fallback after
    invalid UTF-8) change text that they have already rendered. What has been
    shown stays, and decoding goes on from there.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._token_ids: list[int] = []
        self._settled = 0  # of _token_ids: those whose text has been returned
        self._text = ""

    def push(self, token_id: int) -> str:
        """Takes the next token; returns text made of whole characters, often none."""
        self._token_ids.append(token_id)
        piece = self._step(token_id)
        if piece:
            self._text += piece
            self._settled = len(self._token_ids)
        return piece

    def finish(self) -> str:
        """What is left, unfinished bytes as U+FFFD."""
        whole = self._decode(self._token_ids)
        if whole.startswith(self._text):
            return whole[len(self._text) :]
        return self._decode(self._token_ids[self._settled :])

    def _step(self, token_id: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception as error:  # the library raises nothing narrower
            if "Invalid prefix" not in str(error):
                raise
            # A new stream, which needs a token of context to go on from.
            self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
            self._stream.step(self._tokenizer, token_id)
            return self._decode(self._token_ids[self._settled :])

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
