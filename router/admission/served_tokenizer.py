"""The served model's tokenizer, off the event loop: what both doors do with texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer

from kvrelay.router.admission.tokenizer_threads import TextThreads
from kvrelay.router.errors import InvalidField
from kvrelay.text.encoding import TooManyTokens, decode, encode
from kvrelay.text.token_texts import TokenTexts

MAX_TEXT_TOKENS: Final = 512 << 10
"""Of a text that is tokenized, or tokens that are made text, for nothing else; a million would
hold up the event loop for 45 ms."""


class Texts:
    """Tokenizes and detokenizes in threads.

    Args:
        tokenizer: the served model's.
        longest_token_bytes: no token stands for more bytes of text; None: there is no such bound.
        threads: in which that is done.
    """

    def __init__(
        self, tokenizer: Tokenizer, longest_token_bytes: int | None, threads: TextThreads
    ) -> None:
        self.tokenizer = tokenizer
        self.longest_token_bytes = longest_token_bytes
        self.threads = threads
        self.of_tokens = TokenTexts(tokenizer)
        """Of each token alone."""

    def encode(self, text: str, most_tokens: int) -> Sequence[int]:
        """A text's tokens, special ones included; call it in a thread.

        Raises:
            TooManyTokens: there are more than that.
        """
        return encode(self.tokenizer, text, most_tokens)

    def encode_plain(self, text: str, most_tokens: int) -> Sequence[int]:
        """As `encode`, without special tokens: what goes on with a text."""
        return encode(self.tokenizer, text, most_tokens, add_special_tokens=False)

    async def tokenize(
        self, field: str, text: str, num_bytes: int, *, add_special_tokens: bool
    ) -> Sequence[int]:
        """A text's tokens.

        Raises:
            InvalidField: names the field: there are more than `MAX_TEXT_TOKENS`.
            TextQueueFull: too many texts wait already.
        """
        try:
            return await self.threads.run(
                num_bytes,
                encode,
                self.tokenizer,
                text,
                MAX_TEXT_TOKENS,
                add_special_tokens=add_special_tokens,
            )
        except TooManyTokens as error:
            raise InvalidField(field, f"has {error}; the router takes {MAX_TEXT_TOKENS}") from error

    async def detokenize(
        self, input_ids: Sequence[int], num_bytes: int, *, skip_special_tokens: bool
    ) -> str:
        """The text of tokens, which are in the vocabulary."""
        return await self.threads.run(
            num_bytes, decode, self.tokenizer, input_ids, skip_special_tokens=skip_special_tokens
        )
