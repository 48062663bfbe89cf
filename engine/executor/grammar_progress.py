"""The position of an output in its grammar."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final

from llguidance import LLMatcher

from kvrelay.text.grammar import CompiledGrammar

_OF_LEXER: Final = "lexer error"
_FULL: Final = "too many states"


class GrammarProgress:
    """The grammar of one output, advanced token by token wherever the tokens were sampled.

    Args:
        compiled: the grammar.
        matcher: a new matcher of it.
        is_alone: no other output has this lexer.
    """

    def __init__(self, compiled: CompiledGrammar, matcher: LLMatcher, *, is_alone: bool) -> None:
        self.compiled = compiled
        self._is_alone = is_alone
        self.matcher = matcher
        self.successor: Future[CompiledGrammar] | None = None
        """The same grammar while it is compiled anew, held so that it is there later."""
        self._num_tokens = 0

    @property
    def error(self) -> str:
        """The reason why it cannot go on; empty: it can."""
        return self.matcher.get_error()

    @property
    def is_spent(self) -> bool:
        """Whether its lexer has learnt so much that another one takes its place."""
        return self.compiled.is_spent and not self._is_alone

    @property
    def may_go_on_anew(self) -> bool:
        """Whether the error may go away with a lexer of its own that has learnt nothing yet.

        An error of a lexer shows in any of the outputs that share it.
        """
        is_shared = not self._is_alone and self.compiled.num_matchers > 1
        return _FULL in self.error or (is_shared and _OF_LEXER in self.error)

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
