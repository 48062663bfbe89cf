"""The position of an output in its grammar."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final

from llguidance import LLMatcher

from kvrelay.text.grammar import CompiledGrammar

_OF_LEXER: Final = "lexer error"
_FULL: Final = "too many states"
_FULL_AT_ONCE: Final = 2
_TOKENS_A_LEXER: Final = 64
"""The tokens of an output for each lexer of its own that it fills beyond the first few.

Less would have a step wait for a compilation again and again.
"""


class GrammarProgress:
    """The grammar of one output, advanced token by token wherever the tokens were sampled.

    Args:
        compiled: the grammar.
        matcher: a new matcher of it.
        before: the same output's before, whose lexer has failed or learnt too much; None: none.
    """

    def __init__(
        self, compiled: CompiledGrammar, matcher: LLMatcher, before: GrammarProgress | None = None
    ) -> None:
        self.compiled = compiled
        self.num_filled: int = 0 if before is None else before.num_filled
        """The lexers of its own that the output has filled."""
        if before is not None and before.error and not before._is_shared:
            self.num_filled += 1
        self.matcher = matcher
        self.successor: Future[CompiledGrammar] | None = None
        """The same grammar while it is compiled anew, held so that it is there later."""
        self.num_tokens = 0
        """The tokens of the output that it has followed."""

    @property
    def error(self) -> str:
        """The reason why it cannot go on; empty: it can."""
        return self.matcher.get_error()

    @property
    def is_spent(self) -> bool:
        """Whether its lexer has learnt so much that another one takes its place."""
        return self.compiled.is_spent

    @property
    def may_go_on_anew(self) -> bool:
        """Whether the error may go away with another lexer, which has learnt nothing yet.

        An error of a lexer shows in any of the outputs that share it.
        """
        if self._is_shared:
            return _FULL in self.error or _OF_LEXER in self.error
        most = _FULL_AT_ONCE + self.num_tokens // _TOKENS_A_LEXER
        return _FULL in self.error and self.num_filled < most

    @property
    def _is_shared(self) -> bool:
        """Whether other outputs have, or had, the same lexer."""
        return self.compiled.num_matchers > 1

    def follow(self, token_ids: Sequence[int]) -> None:
        """Consume the next tokens. Those after the grammar's end do not count."""
        for token_id in token_ids:
            if self.matcher.is_stopped():  # at its end, or in error
                break
            self.matcher.consume_token(token_id)
        self.num_tokens += len(token_ids)

    def num_allowed(self, draft_ids: Sequence[int]) -> int:
        """Count the draft tokens that are allowed, up to the first that is not."""
        if self.matcher.is_stopped():
            return 0
        return self.matcher.validate_tokens(list(draft_ids))
