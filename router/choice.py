"""One of a request's outputs: its tokens in order, their text, its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.router.events import ChoiceEnd, Delta, FinishReason, PhaseTimings, Token
from kvrelay.router.merge import TokenMerge
from kvrelay.router.text import TextStream
from kvrelay.router.worker_output import EndReason, WorkerEnd, WorkerOutput

_FINISH_REASONS = {EndReason.STOP: FinishReason.STOP, EndReason.LENGTH: FinishReason.LENGTH}


@dataclass(frozen=True, slots=True)
class StopRules:
    """By which a worker ends an output, stop strings aside."""

    max_tokens: int
    min_tokens: int
    stop_token_ids: frozenset[int]
    """End-of-sequence tokens included, unless the client ignores them."""


class Choice:
    """Makes ordered deltas of what workers say of one output, until it ends.

    Args:
        index: which of the request's outputs it is.
        text: renders it.
        rules: what ends it.
    """

    def __init__(self, index: int, text: TextStream, rules: StopRules) -> None:
        self.index = index
        self.ended: ChoiceEnd | None = None
        self._text = text
        self._rules = rules
        self._merge = TokenMerge()
        self._final: WorkerEnd | None = None  # kept until all tokens before it are here
        self._earlier = PhaseTimings()  # of attempts that are over
        self._current = PhaseTimings()

    @property
    def emitted(self) -> Sequence[int]:
        """The token ids that readers have been told of, or will be."""
        return self._merge.taken_ids

    @property
    def timings(self) -> PhaseTimings:
        """Seconds in each phase, over all attempts."""
        return self._earlier.plus(self._current)

    def take(self, output: WorkerOutput, final: WorkerEnd | None) -> tuple[Delta | None, int]:
        """Takes tokens in any order; `final` is the end that completes the choice.

        Returns what is new to readers, and how many tokens contradicted one that
        was known already, which stays.
        """
        self._current = self._current.merged(output.timings)
        self._final = final or self._final
        contradicted = self._merge.add(output.index, output.tokens)
        tokens = self._merge.take()
        if self._final is None or not self._merge.gapless:
            return self._delta(tokens, self._render(tokens)), contradicted
        return self._finish(tokens, self._final), contradicted

    def abort(self) -> Delta | None:
        """Ends the choice with what came so far; nothing if it has ended."""
        if self.ended is not None:
            return None
        self.ended = ChoiceEnd(FinishReason.ABORT, None)
        return self._delta((), self._text.finish())

    def interrupt(self) -> Delta | None:
        """Its attempt is over: forgets what waited for tokens that will not come.

        If what was emitted is complete, though the word of it was lost, the
        choice ends here; else another attempt is to go on after `emitted`.
        """
        self._earlier, self._current = self.timings, PhaseTimings()
        self._merge.forget_early()
        self._final = None
        complete = self._complete()
        return self._finish((), complete) if complete else None

    def _complete(self) -> WorkerEnd | None:
        """The end that a worker would have said with the last token that was emitted."""
        count, rules = len(self.emitted), self._rules
        if count and count >= rules.min_tokens:
            if self.emitted[-1] in rules.stop_token_ids:
                return WorkerEnd(EndReason.STOP, self.emitted[-1])
            if (stop_string := self._text.matched) is not None:
                return WorkerEnd(EndReason.STOP, stop_string)
        return WorkerEnd(EndReason.LENGTH) if count >= rules.max_tokens else None

    def _finish(self, tokens: tuple[Token, ...], final: WorkerEnd) -> Delta | None:
        by_token = isinstance(final.matched, int)
        rendered = self._render(tokens[:-1] if by_token else tokens)
        stop_string = final.matched if isinstance(final.matched, str) else None
        self.ended = ChoiceEnd(_FINISH_REASONS[final.reason], final.matched)
        return self._delta(tokens, rendered + self._text.finish(stop_string))

    def _render(self, tokens: tuple[Token, ...]) -> str:
        return "".join([self._text.push(token.token_id) for token in tokens])

    def _delta(self, tokens: tuple[Token, ...], text: str) -> Delta | None:
        if not tokens and not text:
            return None
        return Delta(len(self.emitted) - len(tokens), tokens, text, self.index)
