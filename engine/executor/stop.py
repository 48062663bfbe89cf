"""The decision where a request stops. The worker makes it, because it sees every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer

from kvrelay.text.detokenizer import Detokenizer
from kvrelay.text.reasoning_progress import ReasoningProgress
from kvrelay.text.token_texts import token_texts
from kvrelay.wire.output import EndReason, RequestEnd
from kvrelay.wire.submit import StopConditions

_FEW_TOKENS: Final = 32
_MAX_BYTES_A_CHARACTER: Final = 4
_MAX_TOKENS_A_CHARACTER: Final = 8
"""The most tokens searched for each character of a stop string: twice a character's bytes."""


class StopChecker:
    """The stop conditions of one request, checked token by token.

    Stop strings count behind the output's reasoning, unless they are to end that, too. They are
    searched for in the text as the router renders it. So both find one at the same token, even
    where it spans several.

    Args:
        conditions: what ends the request; end-of-sequence tokens are among their tokens.
        tokenizer: only used where there are stop strings.
        output_ids: the output so far, which did not end the request. Only its end is decoded.
    """

    def __init__(
        self, conditions: StopConditions, tokenizer: Tokenizer, output_ids: Sequence[int] = ()
    ) -> None:
        self._conditions = conditions
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=conditions.skip_special_tokens
        )
        self._longest = max(map(len, conditions.stop), default=0)
        self._tail = ""
        self._thinking: ReasoningProgress | None = None
        if (reasoning := conditions.reasoning_without_stops) is not None:
            self._thinking = ReasoningProgress(reasoning, token_texts(tokenizer).bytes_of)
        begin = self._first_that_matters(output_ids)
        if self._thinking is not None:
            self._thinking.follow(output_ids[:begin])
        self._num_output = begin
        for token_id in output_ids[begin:]:
            self.check(token_id)

    def again(self, output_ids: Sequence[int]) -> StopChecker:
        """Make another checker with the same conditions, for an output that begins like this."""
        return StopChecker(self._conditions, self._tokenizer, output_ids)

    def _first_that_matters(self, output_ids: Sequence[int]) -> int:
        """Find the first token whose text may hold, or begin, a stop string.

        The text from there is twice as long as the longest stop string: stop strings that
        `min_tokens` suppresses reach back that far.
        """
        if not self._longest:
            return len(output_ids)
        count = _FEW_TOKENS
        while count < len(output_ids):
            begin = len(output_ids) - count
            text = self._decode(output_ids[begin:])
            # Tokens without text, and bytes that are no text, may have no end.
            if len(text) >= 2 * self._longest or count > _MAX_TOKENS_A_CHARACTER * self._longest:
                return self._next_character(output_ids, begin)
            count *= 2
        return 0

    def _next_character(self, output_ids: Sequence[int], begin: int) -> int:
        """Find the first token at `begin` or soon after it that begins a character."""
        for start in range(begin, min(begin + _FEW_TOKENS // 2, len(output_ids))):
            ends = range(start + 1, start + 1 + _MAX_BYTES_A_CHARACTER)
            if any("\ufffd" not in self._decode(output_ids[start:end]) for end in ends):
                return start
        return begin

    def _decode(self, token_ids: Sequence[int]) -> str:
        skip = self._conditions.skip_special_tokens
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip)

    def check(self, token_id: int) -> RequestEnd | None:
        """Take the next output token. Returns how the request ends with it, or None."""
        self._num_output += 1
        matched = self._match_text(token_id) if self._conditions.stop else None
        if self._num_output >= self._conditions.min_tokens:
            if token_id in self._conditions.stop_token_ids:
                return RequestEnd(EndReason.STOP, token_id)
            if matched is not None:
                return RequestEnd(EndReason.STOP, matched)
        if self._num_output >= self._conditions.max_tokens:
            return RequestEnd(EndReason.LENGTH)
        return None

    def _match_text(self, token_id: int) -> str | None:
        """Find the stop string that `token_id` completed; if several, the one that begins first."""
        piece = self._detokenizer.push(token_id)
        if self._thinking is not None and not self._thinking.push(token_id):
            self._tail = ""
            return None
        if not piece:
            return None
        text = self._tail + piece
        found = [(text.find(stop), stop) for stop in self._conditions.stop if stop in text]
        # A match that min_tokens overlooked must not be found again later.
        self._tail = "" if found else text[max(0, len(text) - self._longest + 1) :]
        return min(found)[1] if found else None
