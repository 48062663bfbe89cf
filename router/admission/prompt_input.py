"""Prompts of clients' messages, as a door reads them and a validator tokenizes them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Protocol

from kvrelay.router.errors import InvalidField
from kvrelay.router.placement.limits import RequestLimits
from kvrelay.text.encoding import TooManyTokens
from kvrelay.v1 import inference_pb2

Encode = Callable[[str, int], Sequence[int]]
"""A tokenizer of a text; it raises `TooManyTokens` if there are more than the number."""


class BegunReasoning(Enum):
    """The state of the answer's reasoning where a prompt ends."""

    AS_ASKED = auto()
    """The request says whether it has begun."""
    BEGUN = auto()
    OVER = auto()
    """The prompt ends behind it, or in words of the answer."""


class Prompt(Protocol):
    """One prompt of a request."""

    @property
    def reasoning(self) -> BegunReasoning:
        """The state of the answer's reasoning, known once `input_ids` was called."""

    @property
    def field(self) -> str:
        """The field that the client has sent it in, for errors."""

    @property
    def num_tokens(self) -> int | None:
        """The prompt's length, where it is known without work; None: a thread must tokenize it."""

    def input_ids(self, limits: RequestLimits) -> Sequence[int]:
        """The prompt's tokens, 4 bytes each; empty: it has none. Safe to call from any thread.

        Raises:
            InvalidField: the prompt can never be served.
        """


class TokenPrompt:
    """A prompt of token ids.

    Args:
        field: the field that has them.
        ids: each fits four bytes.
    """

    reasoning = BegunReasoning.AS_ASKED

    def __init__(self, field: str, ids: Sequence[int]) -> None:
        self.field = field
        self._ids = ids

    @property
    def num_tokens(self) -> int | None:
        """The number of token ids."""
        return len(self._ids)

    def input_ids(self, limits: RequestLimits) -> Sequence[int]:
        """The token ids themselves."""
        return array("I", self._ids)


class TextPrompt:
    """A prompt of text.

    Args:
        field: the field that has it.
        text: an empty one is no prompt, though the tokenizer may add a special token.
        encode: tokenizes it.
    """

    num_tokens: int | None = None
    reasoning = BegunReasoning.AS_ASKED

    def __init__(self, field: str, text: str, encode: Encode) -> None:
        self.field = field
        self._text = text
        self._encode = encode

    def input_ids(self, limits: RequestLimits) -> Sequence[int]:
        """The text's tokens; raises `InvalidField` if it leaves no room for output."""
        return encoded(self.field, self._text, self._encode, limits)


@dataclass(frozen=True, slots=True)
class Truncation:
    """The way in which prompts are cut to a number of tokens."""

    most_tokens: int | None
    """The most tokens; None: as many as the output leaves room for."""
    output_tokens: int
    """The output's tokens, for which room is left."""
    keeps_end: bool
    """Whether the end of a prompt is kept, and not its beginning."""


class TruncatedPrompt:
    """A prompt of which a part is left out.

    Args:
        prompt: the whole prompt.
        truncation: the way in which it is cut.
        longest: the longest prompt that is tokenized, to be cut.
    """

    def __init__(self, prompt: Prompt, truncation: Truncation, longest: int) -> None:
        self.field = prompt.field
        self._prompt = prompt
        self._truncation = truncation
        self._longest = longest

    @property
    def reasoning(self) -> BegunReasoning:
        """The state of the answer's reasoning behind the whole prompt."""
        return self._prompt.reasoning

    @property
    def num_tokens(self) -> int | None:
        """The number of tokens that are left, where it is known."""
        whole, most = self._prompt.num_tokens, self._truncation.most_tokens
        return None if whole is None or most is None else min(whole, most)

    def input_ids(self, limits: RequestLimits) -> Sequence[int]:
        """The tokens that are left; raises `InvalidField` for a prompt longer than the longest."""
        longest = self._longest
        wide = replace(
            limits,
            max_model_len=longest,
            prefill_pool_tokens=longest,
            decode_pool_tokens=longest,
        )
        ids = self._prompt.input_ids(wide)
        most = self._truncation.most_tokens
        if most is None:
            most = max(1, limits.most_tokens - self._truncation.output_tokens)
        return ids[-most:] if self._truncation.keeps_end else ids[:most]


class TurnPrompt:
    """A session's history, and the new prompt of a turn.

    Args:
        history: token ids.
        new: the turn's own prompt; must not be empty.
    """

    reasoning = BegunReasoning.AS_ASKED

    def __init__(self, history: Sequence[int], new: Prompt) -> None:
        self.field = new.field
        self._history = history
        self._new = new

    @property
    def num_tokens(self) -> int | None:
        """The length of both together."""
        new = self._new.num_tokens
        return None if new is None else len(self._history) + new

    def input_ids(self, limits: RequestLimits) -> Sequence[int]:
        """The tokens of both; raises `InvalidField` if nothing is new, or no room is left."""
        new = self._new.input_ids(limits)
        if not new:
            raise InvalidField(self.field, "the turn is empty")
        limits.check_prompt(self.field, len(self._history) + len(new))
        return array("I", [*self._history, *new])


def encoded(field: str, text: str, encode: Encode, limits: RequestLimits) -> Sequence[int]:
    """Tokenize a text; raise `InvalidField` for the field if no room for output is left."""
    if not text:
        return array("I")
    try:
        return array("I", encode(text, limits.most_tokens))
    except TooManyTokens as error:
        limits.check_prompt(field, error.tokens, is_exact=error.is_exact)
        raise


def prompt_of(message: inference_pb2.GenerateRequest, encode: Encode) -> Prompt:
    """The prompt of a message; raises `InvalidField` if it has none."""
    field: str | None = message.WhichOneof("prompt")
    if field is None:
        raise InvalidField("text", "the request has no prompt: set text or input_ids")
    if field == "input_ids":
        return TokenPrompt(field, message.input_ids.ids)
    return TextPrompt(field, message.text, encode)
