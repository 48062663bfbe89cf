"""The log-probabilities in the forms of the two endpoints, written token by token.

The chosen token is always among the alternatives, with exactly its own log-probability: lm-eval
compares the two for equality.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, Final, Protocol

from kvrelay.text.token_texts import TokenTexts
from kvrelay.wire.output import SampledToken, TokenLogprob

_LEAST: Final = -9999.0
"""The value shown for minus infinity, which JSON does not have."""
_BYTES_OF_A_TOKEN: Final = 16
"""The bytes of a token in the four lists beside its name and numbers: an offset and commas."""
_Written = tuple[str, int, str, str]
"""A token's name in JSON, the characters that it adds, its log-probability and alternatives."""
Lengths = Callable[[int], int]
"""A function that returns the characters that the next token adds to the text."""


class TokenNames:
    """The names of tokens in an answer.

    Args:
        texts: the texts of tokens.
        as_ids: whether names are ``token_id:7``, so that no two tokens share one.
    """

    def __init__(self, texts: TokenTexts, *, as_ids: bool) -> None:
        self._texts = texts
        self._as_ids = as_ids

    def of(self, token_id: int) -> str:
        """Return the token's name."""
        return f"token_id:{token_id}" if self._as_ids else self._texts.text_of(token_id)

    def lengths(self, *, skip_special_tokens: bool) -> Lengths:
        """Return a counter of the characters of an output's tokens."""
        return self._texts.lengths(skip_special_tokens=skip_special_tokens)

    def lengths_in(self, text: str) -> Lengths:
        """Return a counter of the characters of a text's tokens."""
        return self._texts.lengths_in(text)

    def bytes_of(self, token_id: int) -> str:
        """Return the token's bytes, as a JSON list."""
        return json.dumps(list(self._texts.bytes_of(token_id)))


class LogprobsWriter(Protocol):
    """A writer of the `logprobs` of one choice."""

    def add_first(self, token_id: int) -> None:
        """Take the first token of an echoed prompt, which has no probability."""

    def write(self, tokens: Sequence[SampledToken]) -> Sequence[Any]:
        """Write output tokens in the form that `add` takes."""

    def write_prompt(self, tokens: Sequence[SampledToken]) -> Sequence[Any]:
        """Write tokens of the prompt in the form that `add` of all its choices takes."""

    def add(self, written: Sequence[Any]) -> int:
        """Take the next tokens, as written; return their approximate bytes in the answer."""

    def take(self) -> str:
        """Return the JSON of the tokens that were added since the last call."""


class CompletionLogprobs:
    """The log-probabilities of /v1/completions: four lists.

    Args:
        names: the names of tokens.
        alternatives: the number of alternatives that each position shows.
        lengths: counts the characters that output tokens add to the text.
        lengths_of_prompt: the same for the tokens of an echoed prompt.
    """

    def __init__(
        self, names: TokenNames, alternatives: int, lengths: Lengths, lengths_of_prompt: Lengths
    ) -> None:
        self._names = names
        self._alternatives = alternatives
        self._lengths = lengths
        self._lengths_of_prompt = lengths_of_prompt
        self._offset = 0
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._logprobs: list[str] = []
        self._top: list[str] = []
        self._offsets: list[str] = []

    def add_first(self, token_id: int) -> None:
        """Take the first token of an echoed prompt, which has no probability."""
        length = self._lengths_of_prompt(token_id)
        self.add([(quoted(self._names.of(token_id)), length, "null", "null")])

    def write(self, tokens: Sequence[SampledToken]) -> Sequence[_Written]:
        """Write output tokens in the form that `add` takes."""
        return [self._write(token, self._lengths(token.token_id)) for token in tokens]

    def write_prompt(self, tokens: Sequence[SampledToken]) -> Sequence[_Written]:
        """Write tokens of the prompt in the form that `add` of all its choices takes."""
        return [self._write(token, self._lengths_of_prompt(token.token_id)) for token in tokens]

    def add(self, written: Sequence[_Written]) -> int:
        """Take the next tokens, as written; return their approximate bytes in the answer."""
        num_bytes = 0
        for name, num_characters, logprob, top in written:
            self._tokens.append(name)
            self._logprobs.append(logprob)
            self._top.append(top)
            self._offsets.append(str(self._offset))
            self._offset += num_characters
            num_bytes += len(name) + len(logprob) + len(top) + _BYTES_OF_A_TOKEN
        return num_bytes

    def take(self) -> str:
        """Return the JSON of the tokens that were added since the last call."""
        lists = [
            ('"tokens"', self._tokens),
            ('"token_logprobs"', self._logprobs),
            ('"top_logprobs"', self._top),
            ('"text_offset"', self._offsets),
        ]
        written = _object([(name, f"[{','.join(values)}]") for name, values in lists])
        self._clear()
        return written

    def _write(self, token: SampledToken, length: int) -> _Written:
        logprob = _number(token.logprob)
        name = quoted(self._names.of(token.token_id))
        return name, length, logprob, self._alternatives_of(token, logprob)

    def _alternatives_of(self, token: SampledToken, logprob: str) -> str:
        shown = {
            self._names.of(one.token_id): _number(one.logprob)
            for one in token.top[: self._alternatives]
        }
        shown[self._names.of(token.token_id)] = logprob
        return _object([(quoted(name), value) for name, value in shown.items()])


class ChatLogprobs:
    """The log-probabilities of /v1/chat/completions: an object for each token.

    Args:
        names: the names of tokens.
        alternatives: the number of alternatives that each position shows.
    """

    def __init__(self, names: TokenNames, alternatives: int) -> None:
        self._names = names
        self._alternatives = alternatives
        self._content: list[str] = []

    def add_first(self, token_id: int) -> None:
        """Do nothing: no conversation is echoed."""

    def write(self, tokens: Sequence[SampledToken]) -> Sequence[str]:
        """Write tokens in the form that `add` takes."""
        return [self._write(token) for token in tokens]

    def write_prompt(self, tokens: Sequence[SampledToken]) -> Sequence[str]:
        """Write tokens as `write` does."""
        return self.write(tokens)

    def add(self, written: Sequence[str]) -> int:
        """Take the next tokens, as written; return their bytes in the answer."""
        self._content += written
        return sum(map(len, written))

    def take(self) -> str:
        """Return the JSON of the tokens that were added since the last call."""
        written = f'{{"content":[{",".join(self._content)}]}}'
        self._content.clear()
        return written

    def _write(self, token: SampledToken) -> str:
        shown = token.top[: self._alternatives]
        top = ",".join([self._one(one.token_id, one.logprob) + "}" for one in shown])
        return f'{self._one(token.token_id, token.logprob)},"top_logprobs":[{top}]}}'

    def _one(self, token_id: int, logprob: float | None) -> str:
        """Return an object that is not closed yet."""
        name, octets = quoted(self._names.of(token_id)), self._names.bytes_of(token_id)
        return f'{{"token":{name},"logprob":{_number(logprob)},"bytes":{octets}'


class PromptLogprobs:
    """The writer of vLLM's `prompt_logprobs`: for each position an object by token id.

    Args:
        names: the names of tokens.
        alternatives: the number of alternatives that each position shows.
    """

    def __init__(self, names: TokenNames, alternatives: int) -> None:
        self._names = names
        self._alternatives = alternatives
        self._positions = ["null"]  # the first token has no probability

    def add(self, tokens: Sequence[SampledToken]) -> int:
        """Take the next tokens of the prompt; return their bytes in the answer."""
        positions = [self._position(token) for token in tokens]
        self._positions += positions
        return sum(map(len, positions))

    def take(self) -> str:
        """Return the JSON of all positions."""
        return f"[{','.join(self._positions)}]"

    def _position(self, token: SampledToken) -> str:
        ranked = enumerate(token.top[: self._alternatives], start=1)
        shown = {one.token_id: self._one(one, str(rank)) for rank, one in ranked}
        if token.token_id not in shown:
            rank = "null" if token.rank is None else str(token.rank)
            shown[token.token_id] = self._one(token, rank)
        return _object([(f'"{token_id}"', one) for token_id, one in shown.items()])

    def _one(self, one: SampledToken | TokenLogprob, rank: str) -> str:
        name = quoted(self._names.of(one.token_id))
        return f'{{"logprob":{_number(one.logprob)},"rank":{rank},"decoded_token":{name}}}'


def _object(members: Sequence[tuple[str, str]]) -> str:
    """Return a JSON object of names and values that are JSON already."""
    return "{" + ",".join([f"{name}:{value}" for name, value in members]) + "}"


def _number(logprob: float | None) -> str:
    if logprob is None:  # a worker has not told it
        return "null"
    return repr(max(logprob, _LEAST)) if logprob == logprob else str(_LEAST)
