"""The served model's tokenizer, off the event loop, for the gRPC and the HTTP door."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer

from kvrelay.router.admission.tokenizer_threads import TextThreads
from kvrelay.router.errors import InvalidField
from kvrelay.text.control_tokens import ControlTokens
from kvrelay.text.encoding import TooManyTokens, decode, encode
from kvrelay.text.token_texts import TokenTexts

MAX_TEXT_TOKENS: Final = 512 << 10
"""The most tokens of a call that only tokenizes or detokenizes.

A million would block the event loop for 45 ms.
"""


class Texts:
    """The served model's tokenizer, run in threads.

    Args:
        tokenizer: the served model's.
        longest_token_bytes: the most bytes of text that one token stands for; None: no such bound.
        threads: the threads for the work.
        control_tokens: makes text of control tokens that conversations spell; None: nothing does.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        longest_token_bytes: int | None,
        threads: TextThreads,
        control_tokens: ControlTokens | None = None,
    ) -> None:
        self.control_tokens = control_tokens
        self.tokenizer = tokenizer
        self.longest_token_bytes = longest_token_bytes
        self.threads = threads
        self.of_tokens = TokenTexts(tokenizer)
        """The text of each token alone."""

    def encode(self, text: str, most_tokens: int) -> Sequence[int]:
        """Tokenize a text, with special tokens; call it in a thread.

        Raises:
            TooManyTokens: there are more than `most_tokens`.
        """
        return encode(self.tokenizer, text, most_tokens)

    def encode_plain(self, text: str, most_tokens: int) -> Sequence[int]:
        """Tokenize a text that continues another one, like `encode` without special tokens."""
        return encode(self.tokenizer, text, most_tokens, add_special_tokens=False)

    async def tokenize(
        self, caller: str, field: str, text: str, num_bytes: int, *, add_special_tokens: bool
    ) -> Sequence[int]:
        """Tokenize a text in a thread, in the caller's turn.

        Raises:
            InvalidField: there are more than `MAX_TEXT_TOKENS`; the error names the field.
            TextQueueFull: too many texts wait already.
        """
        try:
            return await self.threads.run(
                caller,
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
        self, caller: str, input_ids: Sequence[int], num_bytes: int, *, skip_special_tokens: bool
    ) -> str:
        """Make the text of tokens that are in the vocabulary, in a thread, in the caller's turn."""
        return await self.threads.run(
            caller,
            num_bytes,
            decode,
            self.tokenizer,
            input_ids,
            skip_special_tokens=skip_special_tokens,
        )
