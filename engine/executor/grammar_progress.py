"""The position of an output in its grammar."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher


class GrammarProgress:
    """The grammar of one output, advanced token by token wherever the tokens were sampled.

    Args:
        compiled: the grammar at its beginning; it is not changed.
    """

    def __init__(self, compiled: LLMatcher) -> None:
        self.matcher = compiled.deep_copy()
        self._num_tokens = 0

    @property
    def error(self) -> str:
        """The reason why it cannot go on; empty: it can."""
        return self.matcher.get_error()

    def follow(self, output_ids: Sequence[int]) -> None:
        """Consume the tokens that are new. Tokens after the grammar's end do not count."""
        for token_id in output_ids[self._num_tokens :]:
            if self.matcher.is_stopped():  # at its end, or in error
                break
            self.matcher.consume_token(token_id)
        self._num_tokens = len(output_ids)

    def num_allowed(self, draft_ids: Sequence[int]) -> int:
        """Count the draft tokens that are allowed, up to the first that is not."""
        if self.matcher.is_stopped():
            return 0
        return self.matcher.validate_tokens(list(draft_ids))
