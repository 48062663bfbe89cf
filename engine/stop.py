"""Where a request stops. Decided here, on the worker, which sees every token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tokenizers import Tokenizer

from kvrelay.text.detokenizer import Detokenizer


class FinishReason(StrEnum):
    """Why a request ended by itself."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Finish:
    """A request's end and what matched, if anything did."""

    reason: FinishReason
    matched_token_id: int | None = None
    matched_stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class StopConditions:
    """What ends a request besides its client."""

    max_tokens: int
    min_tokens: int = 0
    """No stop condition but `max_tokens` counts before as many output tokens."""
    stop_token_ids: frozenset[int] = frozenset()
    """End-of-sequence tokens included, unless the client ignores them."""
    stop_strings: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    """Whether the text that stop strings are looked for in leaves special tokens out."""


class StopChecker:
    """Follows one request's output, token by token.

    Stop strings are looked for in the text as the router renders it, so both
    see one at the same token, also where it spans several.

    Args:
        conditions: what ends the request.
        tokenizer: only used where there are stop strings.
        output_ids: what it has said already, which did not end it.
    """

    def __init__(
        self, conditions: StopConditions, tokenizer: Tokenizer, output_ids: Sequence[int] = ()
    ) -> None:
        self._conditions = conditions
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=conditions.skip_special_tokens
        )
        self._longest = max(map(len, conditions.stop_strings), default=0)
        self._tail = ""
        self._num_output = 0
        for token_id in output_ids:
            self.check(token_id)

    def again(self, output_ids: Sequence[int]) -> StopChecker:
        """Another one by the same conditions, for an output that begins with these."""
        return StopChecker(self._conditions, self._tokenizer, output_ids)

    def check(self, token_id: int) -> Finish | None:
        """Take the next output token; whether the request ends with it."""
        self._num_output += 1
        matched = self._match_text(token_id)
        if self._num_output >= self._conditions.min_tokens:
            if token_id in self._conditions.stop_token_ids:
                return Finish(FinishReason.STOP, matched_token_id=token_id)
            if matched is not None:
                return Finish(FinishReason.STOP, matched_stop_string=matched)
        if self._num_output >= self._conditions.max_tokens:
            return Finish(FinishReason.LENGTH)
        return None

    def _match_text(self, token_id: int) -> str | None:
        """The stop string that `token_id` completed; the one that begins first, if several."""
        if not self._conditions.stop_strings:
            return None
        piece = self._detokenizer.push(token_id)
        if not piece:
            return None
        text = self._tail + piece
        found = [(text.find(stop), stop) for stop in self._conditions.stop_strings if stop in text]
        # A match that min_tokens overlooked must not be found again later.
        self._tail = "" if found else text[max(0, len(text) - self._longest + 1) :]
        return min(found)[1] if found else None
