"""A request from its admission to its end, as its readers see it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Protocol

from kvrelay.router.errors import RequestError
from kvrelay.router.events import Completion, Delta, Event, FinishReason, PhaseTimings, Token
from kvrelay.router.generation import GenerationRequest
from kvrelay.router.merge import TokenMerge
from kvrelay.router.metrics import Stopwatch
from kvrelay.router.news import News
from kvrelay.router.text import TextStream
from kvrelay.router.worker_output import EndReason, WorkerEnd, WorkerOutput

_FINISH_REASONS = {EndReason.STOP: FinishReason.STOP, EndReason.LENGTH: FinishReason.LENGTH}


class Release(Protocol):
    """Whoever works for the request."""

    def release(self) -> None:
        """The request is over: nothing more is wanted."""
        ...


class LiveRequest:
    """Makes one ordered stream of events from what the workers say, for any number of readers.

    It has exactly one outcome, a completion or an error, which never changes
    again; every way out is `_end`. Each reader sees all events from the first.
    When the last reader leaves before the outcome, the outcome is an abort.

    Args:
        request: what was asked for.
        text: renders its output.
        stopwatch: runs since it arrived.
        on_end: called once, at the outcome.
    """

    def __init__(
        self,
        request: GenerationRequest,
        text: TextStream,
        stopwatch: Stopwatch,
        on_end: Callable[[LiveRequest], None],
    ) -> None:
        self.request = request
        self.outcome: Completion | RequestError | None = None
        self._text = text
        self._stopwatch = stopwatch
        self._on_end = on_end
        self._work: Release | None = None
        self._merge = TokenMerge()
        self._timings = PhaseTimings()
        self._cached_tokens = 0
        self._final: WorkerEnd | None = None  # kept until all tokens before it are here
        self._deltas: list[Delta] = []
        self._readers = 0
        self._news = News()

    # What the readers do.

    @contextlib.contextmanager
    def reader(self) -> Iterator[AsyncIterator[Event]]:
        """Attaches a reader for as long as the context lasts.

        The events are all deltas from the first, then the completion; if the
        outcome is an error it is raised in its place.
        """
        self._readers += 1
        try:
            yield self._events()
        finally:
            self._readers -= 1
            if self._readers == 0:
                self.abort()

    def abort(self) -> None:
        """Ends the request with what came so far; nothing if it has its outcome already."""
        if self.outcome is None:
            self._publish((), self._text.finish())
            self._complete(FinishReason.ABORT, None)

    async def _events(self) -> AsyncIterator[Event]:
        told = 0
        while self.outcome is None or told < len(self._deltas):
            if told == len(self._deltas):
                await self._news.next()
                continue
            yield self._deltas[told]
            told += 1
        if isinstance(self.outcome, RequestError):
            raise self.outcome
        yield self.outcome

    # What those who work for it do.

    @property
    def streaming(self) -> bool:
        """Its first token has come."""
        return self._merge.next_index > 0

    def assign(self, work: Release) -> None:
        """From now on `work` produces the output, and is released at the outcome."""
        self._work = work
        self._stopwatch.admitted(len(self.request.input_ids))

    def take(self, output: WorkerOutput, final: WorkerEnd | None) -> None:
        """Takes tokens in any order; `final` is the end that completes the request."""
        self._timings = self._timings.merged(output.timings)
        self._cached_tokens = self._cached_tokens or output.cached_tokens
        self._final = final or self._final
        self._merge.add(output.index, output.tokens)
        tokens = self._merge.take()
        if self._final is None or not self._merge.gapless:
            self._publish(tokens, self._render(tokens))
        else:
            self._finish(tokens, self._final)

    def fail(self, error: RequestError) -> None:
        """Ends the request without a completion; nothing if it has its outcome already."""
        if self.outcome is None:
            self._end(error, error.outcome)

    def _finish(self, tokens: tuple[Token, ...], final: WorkerEnd) -> None:
        by_token = isinstance(final.matched, int)
        rendered = self._render(tokens[:-1] if by_token else tokens)
        stop_string = final.matched if isinstance(final.matched, str) else None
        self._publish(tokens, rendered + self._text.finish(stop_string))
        self._complete(_FINISH_REASONS[final.reason], final.matched)

    def _render(self, tokens: tuple[Token, ...]) -> str:
        return "".join([self._text.push(token.token_id) for token in tokens])

    def _publish(self, tokens: tuple[Token, ...], text: str) -> None:
        if not tokens and not text:
            return
        self._deltas.append(Delta(self._merge.next_index - len(tokens), tokens, text))
        if tokens:
            self._stopwatch.delta(len(tokens))
        self._news.announce()

    def _complete(self, reason: FinishReason, matched: int | str | None) -> None:
        completion = Completion(
            finish_reason=reason,
            matched=matched,
            prompt_tokens=len(self.request.input_ids),
            completion_tokens=self._merge.next_index,
            cached_tokens=self._cached_tokens,
            timings=self._timings,
            seed=self.request.sampling.seed,
        )
        self._end(completion, reason)

    def _end(self, outcome: Completion | RequestError, label: str) -> None:
        self.outcome = outcome
        self._stopwatch.ended(label)
        if self._work is not None:
            self._work.release()
        self._on_end(self)
        self._news.announce()
