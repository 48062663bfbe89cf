"""Text to token ids and back, without keeping the interpreter's lock.

`Tokenizer.encode` and `decode` hold that lock for as long as they take. For 16 MiB these are
seconds, in which no other thread runs. The batch calls release the lock. The caller runs both
functions in a thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

_ENCODED_AT_ONCE_CHARACTERS = 256 << 10
_PIECE_CHARACTERS = 32 << 10
"""A text that is looked at in vain takes 9 MB so, not 70 MB for each caller."""
_CERTAINLY_TOO_MANY = 2
"""A multiple of the bound: in pieces, a text has a few more tokens, but not twice as many."""


class TooManyTokens(Exception):  # noqa: N818
    """The text has more tokens than the caller accepts."""

    def __init__(self, tokens: int, *, is_exact: bool) -> None:
        super().__init__(f"{tokens} tokens{'' if is_exact else ' or more'}")
        self.tokens = tokens
        self.is_exact = is_exact


def encode(
    tokenizer: Tokenizer, text: str, most_tokens: int, *, add_special_tokens: bool = True
) -> Sequence[int]:
    """The text's token ids, `most_tokens` or fewer.

    A text that is far too long is not encoded as a whole: each byte of it takes up to 270 bytes of
    memory.

    Raises:
        TooManyTokens: the text has more.
    """
    if len(text) > _ENCODED_AT_ONCE_CHARACTERS:
        _refuse_far_too_long(tokenizer, text, most_tokens)
    # The fast call leaves out offsets; with them, the result takes a hundred times as long
    # to free, under the lock.
    [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    if len(encoding) > most_tokens:
        raise TooManyTokens(len(encoding), is_exact=True)
    ids: Sequence[int] = encoding.ids
    return ids


def decode(tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """The text of token ids."""
    [text] = tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
    return str(text)


def _refuse_far_too_long(tokenizer: Tokenizer, text: str, most_tokens: int) -> None:
    """Raise `TooManyTokens` as soon as the text's first pieces have far too many."""
    tokens = 0
    for start in range(0, len(text), _PIECE_CHARACTERS):
        piece = text[start : start + _PIECE_CHARACTERS]
        [encoding] = tokenizer.encode_batch_fast([piece], add_special_tokens=False)
        tokens += len(encoding)
        if tokens > _CERTAINLY_TOO_MANY * most_tokens:
            raise TooManyTokens(most_tokens, is_exact=False)
