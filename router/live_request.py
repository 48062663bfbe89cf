"""A request from its admission to its end, as its readers see it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from kvrelay.router.choice import Choice
from kvrelay.router.errors import RequestError
from kvrelay.router.events import (
    Completion,
    Delta,
    Event,
    FinishReason,
    PhaseTimings,
    TokenLogprobs,
)
from kvrelay.router.generation import GenerationRequest
from kvrelay.router.metrics import Stopwatch
from kvrelay.router.news import News
from kvrelay.router.worker_output import WorkerEnd, WorkerOutput


class Release(Protocol):
    """Whoever works for the request."""

    def release(self) -> None:
        """The request is over: nothing more is wanted."""
        ...


class LiveRequest:
    """Makes one stream of events from what the workers say, for any number of readers.

    The stream is ordered in each choice. A request has exactly one outcome, a
    completion or an error, which never changes again; every way out is `_end`.
    Each reader sees all events from the first. When the last reader leaves
    before the outcome, the outcome is an abort.

    Args:
        request: what was asked for.
        choices: its outputs, in order.
        stopwatch: runs since it arrived.
        on_end: called once, at the outcome.
    """

    def __init__(
        self,
        request: GenerationRequest,
        choices: Sequence[Choice],
        stopwatch: Stopwatch,
        on_end: Callable[[LiveRequest], None],
    ) -> None:
        self.request = request
        self.choices = tuple(choices)
        self.outcome: Completion | RequestError | None = None
        self._stopwatch = stopwatch
        self._on_end = on_end
        self._work: Release | None = None
        self._first_attempt: int | None = None  # the one that brought the first token
        self._cached_tokens = 0
        self._prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
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
            for choice in self.choices:
                self._publish(choice.abort())
            self._complete(FinishReason.ABORT)

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
        """Its first token has come, of whichever choice."""
        return any(choice.emitted for choice in self.choices)

    @property
    def age_seconds(self) -> float:
        """Since it arrived."""
        return self._stopwatch.seconds

    @property
    def prompt_logprobs_due(self) -> int | None:
        """How many are still wanted at each place of the prompt; None: none at all."""
        return self.request.sampling.prompt_logprobs if self._prompt_logprobs is None else None

    def assign(self, work: Release) -> None:
        """From now on `work` produces the output, and is released at the outcome."""
        self._work = work
        self._stopwatch.admitted(len(self.request.input_ids))

    def take(self, output: WorkerOutput, final: WorkerEnd | None) -> None:
        """Takes tokens in any order; `final` is the end that completes their choice."""
        if output.tokens and self._first_attempt is None:
            self._first_attempt = output.attempt
        if output.attempt == self._first_attempt:  # a later one finds its own pages cached
            self._cached_tokens = max(self._cached_tokens, output.cached_tokens)
        if output.prompt_logprobs and self._prompt_logprobs is None:
            self._prompt_logprobs = output.prompt_logprobs
        delta, contradicted = self.choices[output.choice].take(output, final)
        self._stopwatch.contradicted(contradicted)
        self._publish(delta)
        self._complete_if_ended()

    def interrupt(self, choice: int) -> None:
        """An attempt at this choice is over before its end; see `Choice.interrupt`."""
        self._publish(self.choices[choice].interrupt())
        self._complete_if_ended()

    def fail(self, error: RequestError) -> None:
        """Ends the request without a completion; nothing if it has its outcome already."""
        if self.outcome is None:
            self._end(error, error.outcome)

    def _publish(self, delta: Delta | None) -> None:
        if delta is None:
            return
        if not self._deltas and self._prompt_logprobs is not None:
            delta = replace(delta, prompt_logprobs=self._prompt_logprobs)
        self._deltas.append(delta)
        if delta.tokens:
            self._stopwatch.delta(delta.choice, len(delta.tokens))
        self._news.announce()

    def _complete_if_ended(self) -> None:
        ends = [choice.ended for choice in self.choices]
        if self.outcome is None and ends[0] is not None and None not in ends:
            self._complete(ends[0].finish_reason)

    def _complete(self, label: FinishReason) -> None:
        timings = PhaseTimings()
        for choice in self.choices:
            timings = timings.merged(choice.timings)
        completion = Completion(
            choices=tuple(choice.ended for choice in self.choices if choice.ended is not None),
            prompt_tokens=len(self.request.input_ids),
            completion_tokens=sum(len(choice.emitted) for choice in self.choices),
            cached_tokens=self._cached_tokens,
            timings=timings,
            seed=self.request.sampling.seed,
        )
        self._end(completion, label)

    def _end(self, outcome: Completion | RequestError, label: str) -> None:
        self.outcome = outcome
        self._stopwatch.ended(label)
        if self._work is not None:
            self._work.release()
        self._on_end(self)
        self._news.announce()
