"""Log-probabilities as the two endpoints show them, written token by token.

The chosen token is always among the alternatives, with the very number that it has beside them:
lm-eval compares the two for equality.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, Final, Protocol

from kvrelay.text.token_texts import TokenTexts
from kvrelay.wire.output import SampledToken, TokenLogprob

_LEAST: Final = -9999.0
"""In place of minus infinity, which is no JSON."""
_BYTES_OF_A_TOKEN: Final = 16
"""Beside its name and numbers, in the four lists: an offset and commas."""
_Written = tuple[str, int, str, str]
"""A token's name in JSON, its characters, its log-probability and its alternatives."""


class TokenNames:
    """What tokens are called in an answer.

    Args:
        texts: of tokens.
        as_ids: they are called ``token_id:7``, so that no two have one name.
    """

    def __init__(self, texts: TokenTexts, *, as_ids: bool) -> None:
        self._texts = texts
        self._as_ids = as_ids

    def of(self, token_id: int) -> str:
        """The token's name."""
        return f"token_id:{token_id}" if self._as_ids else self._texts.text_of(token_id)

    def bytes_of(self, token_id: int) -> str:
        """The token's bytes, as a JSON list."""
        return json.dumps(list(self._texts.bytes_of(token_id)))


class LogprobsWriter(Protocol):
    """Writes the `logprobs` of one choice."""

    def add_first(self, token_id: int) -> None:
        """Takes the first token of a prompt that is echoed, which has no probability."""

    def write(self, tokens: Sequence[SampledToken]) -> Sequence[Any]:
        """Writes tokens, for this choice or others of the same call to `add`."""

    def add(self, written: Sequence[Any]) -> int:
        """Takes the next tokens as they were written; returns their bytes in the answer, about."""

    def take(self) -> str:
        """The JSON of what was added since it was last taken."""


class CompletionLogprobs:
    """Those of /v1/completions: four lists.

    Args:
        names: of tokens.
        alternatives: shown of each position.
    """

    def __init__(self, names: TokenNames, alternatives: int) -> None:
        self._names = names
        self._alternatives = alternatives
        self._offset = 0
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._logprobs: list[str] = []
        self._top: list[str] = []
        self._offsets: list[str] = []

    def add_first(self, token_id: int) -> None:
        """Takes the first token of a prompt that is echoed, which has no probability."""
        name = self._names.of(token_id)
        self.add([(quoted(name), len(name), "null", "null")])

    def write(self, tokens: Sequence[SampledToken]) -> Sequence[_Written]:
        """Writes tokens, for this choice or others of the same call to `add`."""
        return [self._write(token, _number(token.logprob)) for token in tokens]

    def add(self, written: Sequence[_Written]) -> int:
        """Takes the next tokens as they were written; returns their bytes in the answer, about."""
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
        """The JSON of what was added since it was last taken."""
        lists = [
            ('"tokens"', self._tokens),
            ('"token_logprobs"', self._logprobs),
            ('"top_logprobs"', self._top),
            ('"text_offset"', self._offsets),
        ]
        written = _object([(name, f"[{','.join(values)}]") for name, values in lists])
        self._clear()
        return written

    def _write(self, token: SampledToken, logprob: str) -> _Written:
        name = self._names.of(token.token_id)
        return quoted(name), len(name), logprob, self._alternatives_of(token, logprob)

    def _alternatives_of(self, token: SampledToken, logprob: str) -> str:
        shown = {
            self._names.of(one.token_id): _number(one.logprob)
            for one in token.top[: self._alternatives]
        }
        shown[self._names.of(token.token_id)] = logprob
        return _object([(quoted(name), value) for name, value in shown.items()])


class ChatLogprobs:
    """Those of /v1/chat/completions: an object for each token.

    Args:
        names: of tokens.
        alternatives: shown of each position.
    """

    def __init__(self, names: TokenNames, alternatives: int) -> None:
        self._names = names
        self._alternatives = alternatives
        self._content: list[str] = []

    def add_first(self, token_id: int) -> None:
        """Nothing: no conversation is echoed."""

    def write(self, tokens: Sequence[SampledToken]) -> Sequence[str]:
        """Writes tokens, for this choice or others of the same call to `add`."""
        return [self._write(token) for token in tokens]

    def add(self, written: Sequence[str]) -> int:
        """Takes the next tokens as they were written; returns their bytes in the answer."""
        self._content += written
        return sum(map(len, written))

    def take(self) -> str:
        """The JSON of what was added since it was last taken."""
        written = f'{{"content":[{",".join(self._content)}]}}'
        self._content.clear()
        return written

    def _write(self, token: SampledToken) -> str:
        shown = token.top[: self._alternatives]
        top = ",".join([self._one(one.token_id, one.logprob) + "}" for one in shown])
        return f'{self._one(token.token_id, token.logprob)},"top_logprobs":[{top}]}}'

    def _one(self, token_id: int, logprob: float | None) -> str:
        """An object, which is not closed."""
        name, octets = quoted(self._names.of(token_id)), self._names.bytes_of(token_id)
        return f'{{"token":{name},"logprob":{_number(logprob)},"bytes":{octets}'


class PromptLogprobs:
    """vLLM's `prompt_logprobs`: an object by token id for each position of a prompt.

    Args:
        names: of tokens.
        alternatives: shown of each position.
    """

    def __init__(self, names: TokenNames, alternatives: int) -> None:
        self._names = names
        self._alternatives = alternatives
        self._positions = ["null"]  # the first token has no probability

    def add(self, tokens: Sequence[SampledToken]) -> int:
        """Takes the next tokens of the prompt; returns their bytes in the answer."""
        positions = [self._position(token) for token in tokens]
        self._positions += positions
        return sum(map(len, positions))

    def take(self) -> str:
        """The JSON of all positions."""
        return f"[{','.join(self._positions)}]"

    def _position(self, token: SampledToken) -> str:
        ranked = enumerate(token.top[: self._alternatives], start=1)
        shown = {one.token_id: self._one(one, str(rank)) for rank, one in ranked}
        if token.token_id not in shown:
            shown[token.token_id] = self._one(token, "null")
        return _object([(f'"{token_id}"', one) for token_id, one in shown.items()])

    def _one(self, one: SampledToken | TokenLogprob, rank: str) -> str:
        name = quoted(self._names.of(one.token_id))
        return f'{{"logprob":{_number(one.logprob)},"rank":{rank},"decoded_token":{name}}}'


def _object(members: Sequence[tuple[str, str]]) -> str:
    """A JSON object of names and values that are JSON already."""
    return "{" + ",".join([f"{name}:{value}" for name, value in members]) + "}"


def _number(logprob: float | None) -> str:
    if logprob is None:  # a worker has not told it
        return "null"
    return repr(max(logprob, _LEAST)) if logprob == logprob else str(_LEAST)
