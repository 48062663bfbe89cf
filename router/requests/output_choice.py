"""One of a request's outputs: its tokens in order, their text, its end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvrelay.router.requests.events import ChoiceEnd, Delta, FinishReason
from kvrelay.router.requests.output_text import TextStream
from kvrelay.wire.output import (
    NO_TIMINGS,
    EndReason,
    PhaseTimings,
    RequestEnd,
    RequestOutput,
    SampledToken,
)
from kvrelay.wire.submit import StopConditions

_FINISH_REASONS = {EndReason.STOP: FinishReason.STOP, EndReason.LENGTH: FinishReason.LENGTH}


class TokenMerge:
    """A merge of tokens by their index; the first token that comes for an index stays.

    Tokens at ``[0, len(taken_ids))`` were taken. Later ones wait for a token before them.
    """

    def __init__(self) -> None:
        self.taken_ids = array("i")
        """The ids of the tokens that were taken; it grows with them."""
        self._early: dict[int, SampledToken] = {}

    def add(self, index: int, tokens: Sequence[SampledToken]) -> int:
        """Add tokens whose first is at `index`; indexes that have a token keep it.

        Returns how many of the tokens differ from the one that stays.
        """
        contradicted = 0
        for position, token in enumerate(tokens, start=index):
            if position < len(self.taken_ids):
                known = self.taken_ids[position]
            else:
                known = self._early.setdefault(position, token).token_id
            contradicted += known != token.token_id
        return contradicted

    def take(self) -> tuple[SampledToken, ...]:
        """Take and return the next tokens, up to the first that is missing."""
        ready = []
        while (token := self._early.pop(len(self.taken_ids), None)) is not None:
            ready.append(token)
            self.taken_ids.append(token.token_id)
        return tuple(ready)

    def take_next(self, index: int, token_id: int) -> bool:
        """Take a token if it is the next and no other waits; return whether it was taken."""
        if self._early or index != len(self.taken_ids):
            return False
        self.taken_ids.append(token_id)
        return True

    def forget_early(self) -> None:
        """Drop the tokens that wait for a token before them."""
        self._early.clear()

    @property
    def gapless(self) -> bool:
        """Whether at least one token was taken, and none waits for a token before it."""
        return bool(self.taken_ids) and not self._early


class Choice:
    """One output of a request: ordered deltas from the workers' reports, until it ends.

    Args:
        index: its number among the request's outputs.
        text: decodes its tokens to text.
        rules: its stop conditions.
    """

    def __init__(self, index: int, text: TextStream, rules: StopConditions) -> None:
        self.index = index
        self.ended: ChoiceEnd | None = None
        self._text = text
        self._rules = rules
        self._merge = TokenMerge()
        self._final: RequestEnd | None = None  # kept until all tokens before it are here
        self._earlier = PhaseTimings()  # timings of its attempts that are over
        self._current = PhaseTimings()

    @property
    def emitted(self) -> Sequence[int]:
        """The token ids that were put into deltas, in order."""
        return self._merge.taken_ids

    @property
    def timings(self) -> PhaseTimings:
        """Seconds in each phase, over all attempts."""
        return self._earlier.plus(self._current)

    def take(self, output: RequestOutput) -> tuple[Delta | None, int]:
        """Add tokens, which may come in any order, and the end if it completes the choice.

        Returns the delta that is new to readers, and how many tokens contradicted one that was
        known already; the known one stays.
        """
        if output.timings is not NO_TIMINGS:
            self._current = self._current.merged(output.timings)
        if output.end is not None and output.end.reason in _FINISH_REASONS:
            self._final = output.end
        contradicted = self._merge.add(output.index, output.tokens)
        tokens = self._merge.take()
        if self._final is None or not self._merge.gapless:
            return self._delta(tokens, self._render(tokens)), contradicted
        return self._finish(tokens, self._final), contradicted

    def take_next(self, index: int, token_id: int) -> str | None:
        """Add one token without an end, as `take` does; return its text.

        Return None and add nothing if it is not the next token, or if the end or later tokens wait.
        """
        if self._final is not None or not self._merge.take_next(index, token_id):
            return None
        return self._text.push(token_id)

    def abort(self) -> Delta | None:
        """End the choice with the tokens that came so far; return None if it has ended."""
        if self.ended is not None:
            return None
        self.ended = ChoiceEnd(FinishReason.ABORT, None)
        return self._delta((), self._text.finish())

    def interrupt(self) -> Delta | None:
        """Drop early tokens of an attempt that is over: the ones before them will not come.

        If the emitted tokens are complete, and only the worker's report of it was lost, the choice
        ends here. Otherwise another attempt goes on after `emitted`.
        """
        self._earlier, self._current = self.timings, PhaseTimings()
        self._merge.forget_early()
        self._final = None
        complete = self._complete()
        return self._finish((), complete) if complete else None

    def _complete(self) -> RequestEnd | None:
        """The end that a worker would report with the last emitted token, if any."""
        count, rules = len(self.emitted), self._rules
        if count and count >= rules.min_tokens:
            if self.emitted[-1] in rules.stop_token_ids:
                return RequestEnd(EndReason.STOP, self.emitted[-1])
            if (stop_string := self._text.matched) is not None:
                return RequestEnd(EndReason.STOP, stop_string)
        return RequestEnd(EndReason.LENGTH) if count >= rules.max_tokens else None

    def _finish(self, tokens: tuple[SampledToken, ...], final: RequestEnd) -> Delta | None:
        shows_stop = self._rules.include_stop_str_in_output
        by_token = isinstance(final.matched_stop, int) and not shows_stop
        rendered = self._render(tokens[:-1] if by_token else tokens)
        stop_string = final.matched_stop if isinstance(final.matched_stop, str) else None
        self.ended = ChoiceEnd(_FINISH_REASONS[final.reason], final.matched_stop)
        rest = self._text.finish(stop_string)
        return self._delta(tokens, rendered + rest + (stop_string or "" if shows_stop else ""))

    def _render(self, tokens: tuple[SampledToken, ...]) -> str:
        return "".join([self._text.push(token.token_id) for token in tokens])

    def _delta(self, tokens: tuple[SampledToken, ...], text: str) -> Delta | None:
        if not tokens and not text:
            return None
        return Delta(len(self.emitted) - len(tokens), tokens, text, self.index)
