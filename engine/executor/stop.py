"""Where a request stops. Decided here, on the worker, which sees every token."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from kvrelay.text.detokenizer import Detokenizer
from kvrelay.wire.output import EndReason, RequestEnd
from kvrelay.wire.request import StopConditions


class StopChecker:
    """Follows one request's output, token by token.

    Stop strings are looked for in the text as the router renders it, so both
    see one at the same token, also where it spans several.

    Args:
        conditions: what ends the request; end-of-sequence tokens are among their tokens.
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
        self._longest = max(map(len, conditions.stop), default=0)
        self._tail = ""
        self._num_output = 0
        for token_id in output_ids:
            self.check(token_id)

    def again(self, output_ids: Sequence[int]) -> StopChecker:
        """Another one by the same conditions, for an output that begins with these."""
        return StopChecker(self._conditions, self._tokenizer, output_ids)

    def check(self, token_id: int) -> RequestEnd | None:
        """Take the next output token; whether the request ends with it."""
        self._num_output += 1
        matched = self._match_text(token_id)
        if self._num_output >= self._conditions.min_tokens:
            if token_id in self._conditions.stop_token_ids:
                return RequestEnd(EndReason.STOP, token_id)
            if matched is not None:
                return RequestEnd(EndReason.STOP, matched)
        if self._num_output >= self._conditions.max_tokens:
            return RequestEnd(EndReason.LENGTH)
        return None

    def _match_text(self, token_id: int) -> str | None:
        """The stop string that `token_id` completed; the one that begins first, if several."""
        if not self._conditions.stop:
            return None
        piece = self._detokenizer.push(token_id)
        if not piece:
            return None
        text = self._tail + piece
        found = [(text.find(stop), stop) for stop in self._conditions.stop if stop in text]
        # A match that min_tokens overlooked must not be found again later.
        self._tail = "" if found else text[max(0, len(text) - self._longest + 1) :]
        return min(found)[1] if found else None
