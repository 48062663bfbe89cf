"""The requests that generate: plan their next step, and retract one if memory is short."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from kvrelay.engine.executor.step import Scheduled, StepOutput
from kvrelay.engine.executor.stop import StopChecker
from kvrelay.engine.phases import Phase
from kvrelay.engine.scheduler.attempt_trace import DECODE, PhaseSpan
from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.engine.scheduler.growth_reserve import GrowthReserve
from kvrelay.engine.scheduler.metrics import RETRACTIONS
from kvrelay.engine.scheduler.request import Request
from kvrelay.mem_cache.leases.lease import Batch
from kvrelay.mem_cache.release import Outcome
from kvrelay.mem_cache.shape import Ints
from kvrelay.wire.output import NO_TIMINGS, PhaseTimings, RequestEnd, SampledToken
from kvrelay.wire.request_progress import RequestPhase, RequestProgress


@dataclass(eq=False, slots=True, kw_only=True)
class GeneratingRequest(Request):
    """A request for which this worker generates."""

    SPANS: ClassVar[Sequence[PhaseSpan]] = (DECODE,)
    SHOWN: ClassVar[Mapping[Phase, RequestPhase]] = {
        **Request.SHOWN,
        Phase.DECODING: RequestPhase.DECODING,
    }

    checker: StopChecker
    num_drafts: int = 0
    """The most drafted tokens that a step verifies."""
    every_step: Scheduled[Any] | None = None
    """The item that every step computes for it, once it is in the running batch."""
    in_flight: int = 0
    """Steps that were launched for it and have not ended."""
    input_timings: PhaseTimings = NO_TIMINGS
    """Seconds of the phases before it was activated, as far as this worker saw them."""
    activated_at: float = 0.0
    """The moment when it began to generate; 0 until then."""

    def activate(self, input_timings: PhaseTimings) -> None:
        """Note that its input is complete and it generates from now on."""
        self.input_timings, self.activated_at = input_timings, time.monotonic()
        self.enter(Phase.DECODING)

    @property
    def pulled_pages(self) -> int:
        """Pages of the first pool that were read from another worker."""
        return 0

    def progress(self, pages: int, page_size: int) -> RequestProgress:
        """Report how far it has come.

        Args:
            pages: of its whole input.
            page_size: in tokens.
        """
        written = min(pages, self.kv_written_len // page_size)
        owned = 0 if self.lease is None else self.lease.num_protected_pages
        return RequestProgress(
            self.key.attempt,
            self.shown_phase,
            pages,
            written_pages=written,
            pulled_pages=self.pulled_pages,
            owned_pages=pages if self.activated_at else min(owned, pages),
            output_tokens=len(self.output_ids),
        )

    def timings(self) -> PhaseTimings:
        """Measure the seconds of the phases until now, as far as this worker saw them."""
        if not self.activated_at:
            return self.input_timings
        return replace(self.input_timings, decode_seconds=time.monotonic() - self.activated_at)


RequestT = TypeVar("RequestT", bound=GeneratingRequest)


class RunningBatch(Generic[RequestT]):
    """The running batch: plans a decode step for all its requests, and takes the tokens.

    A step may be planned while the previous one computes. This is known of a request then,
    and this is what the next step may add::

        0 ...... kv_written_len ........................... length after the step
        | surely | a step in flight adds 1 to 1 + num_drafts  | the next step adds
        | right  | tokens: how many is not known yet          | as many again

    So pages are allocated up to the largest length. Later steps use those that are left.

    Args:
        context: the requests' memory.
        growth: learns how long outputs are.
        release_retracted: called with a request that was removed to make room: frees
            its memory and lets it be computed again later, here or elsewhere.
        retract_every: if not 0, one request is retracted every so many steps, for tests.
    """

    def __init__(
        self,
        context: SchedulerContext[RequestT],
        growth: GrowthReserve,
        release_retracted: Callable[[RequestT], None],
        *,
        retract_every: int = 0,
    ) -> None:
        self._context = context
        self._growth = growth
        self._release_retracted = release_retracted
        self._retract_every = retract_every
        self._steps_until_retraction = retract_every
        self.waits_for_room = False
        """Whether pages are short until the steps in flight have ended, so that no other is
        launched."""
        self._requests: dict[RequestT, None] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestT]:
        return iter(self._requests)

    def add(self, request: RequestT) -> None:
        """Start to generate for a request. All its KV is here, except its last token's."""
        request.kv_written_len = request.num_tokens - 1
        request.check_lengths()
        token_state = request.make_token_state((request.key.choice,))
        request.every_step = Scheduled(request, token_state, 1, True, request.num_drafts)
        self._requests[request] = None

    def remove(self, request: RequestT) -> None:
        """Stop generating for a request; its memory stays. Does nothing if it is not here."""
        self._requests.pop(request, None)

    def retract(self, request: RequestT) -> None:
        """Remove a request because memory is short, and free its memory."""
        self.remove(request)
        self._context.metrics.count(RETRACTIONS)
        self._release_retracted(request)

    # Planning a step

    def schedule(self, *, alone: bool = False) -> list[Scheduled[RequestT]]:
        """Allocate pages for a step of every request that may need one.

        With `alone` only the first request that is computed alone is planned, else the others.

        If pages are short, idle sessions end, the oldest first. If that does not help, the request
        with the least to lose is retracted. This waits until no step is in flight, because its
        pages could not be used earlier.
        """
        self.waits_for_room = False
        self._force_retraction()
        while due := self._due(alone=alone):
            if self._allocate_step(due) or self._allocate_without_sessions(due):
                self._steps_until_retraction -= 1
                for request in due:
                    request.in_flight += 1
                return [request.every_step for request in due if request.every_step]
            if self._context.steps.running:
                self.waits_for_room = True
                break
            self.retract(choose_victim(self._requests))
            self._growth.learn_from_retraction()
        return []

    def _due(self, *, alone: bool) -> list[RequestT]:
        """Select the requests that the steps in flight may leave unfinished."""
        # A step yields one token at least, so as many tokens as steps in flight are sure to come.
        due = [
            request
            for request in self._requests
            if request.alone is alone
            and request.kv_written_len + request.in_flight < request.most_tokens
        ]
        return due[:1] if alone else due

    def _allocate_step(self, due: Sequence[RequestT]) -> bool:
        """Allocate pages for one more step of each request, as if every draft were accepted."""
        batch, first_read, lengths = _lengths_after_step(due)
        kv_cache = self._context.kv_cache
        kv_cache.lengths.slide(batch, first_read)
        return kv_cache.lengths.grow(batch, np.array(lengths))

    def _allocate_without_sessions(self, due: Sequence[RequestT]) -> bool:
        """Allocate the step with the memory of idle sessions.

        No session ends if that is too little: then a request must be retracted in any case.
        """
        sessions, (batch, _, lengths) = self._context.session_turns, _lengths_after_step(due)
        if not len(sessions):
            return False
        if not sessions.can_make_room(self._context.kv_cache.lengths.pages_to_grow(batch, lengths)):
            return False
        while self._context.session_turns.evict_oldest():
            if self._allocate_step(due):
                return True
        return False

    def _force_retraction(self) -> None:
        if self._retract_every and self._requests and self._steps_until_retraction <= 0:
            self._steps_until_retraction = self._retract_every
            self.retract(choose_victim(self._requests))

    # Taking its tokens

    def process_step_output(self, request: RequestT, output: StepOutput) -> None:
        """Take a request's tokens of a step, send them to its router, and release it at its end."""
        request.in_flight -= 1
        tokens, finish = _take_tokens(request, output.tokens)
        if finish is None:
            if output.num_drafts:
                self._commit_accepted(request)
            self._context.emit(request, tokens)
            return
        self.remove(request)
        self._growth.learn_from_finish(request)
        timings = request.timings()
        self._context.release(request, Outcome.FINISHED, finish, tokens=tokens, timings=timings)

    def _commit_accepted(self, request: RequestT) -> None:
        """Raise the committed length by the accepted drafts, whose KV is right."""
        lease = request.held
        # Planning a step commits its first token alone.
        sure = request.kv_written_len + request.in_flight
        self._context.kv_cache.commit(lease, max(sure, lease.kv_committed_len))
        assert request.kv_written_len < request.num_tokens, f"{request.key}: too much is written"


def choose_victim(running: Iterable[RequestT]) -> RequestT:
    """Choose who is retracted when a step's tokens do not fit, although idle sessions have ended.

    The request with the fewest output tokens loses the least: prompt and output are computed anew,
    on another worker or here. Of several, the one with the longest prompt frees the
    most. The request whose turn is first is kept, if there is another. So each ends in bounded
    time, however often it has begun anew.
    """
    in_turn = sorted(running, key=lambda one: one.turn)
    others = in_turn[1:] or in_turn
    return min(others, key=lambda one: (len(one.output_ids), -len(one.prompt_ids)))


def _lengths_after_step(due: Sequence[GeneratingRequest]) -> tuple[Batch, Ints, list[int]]:
    """Compute the leases, the first token that each one's step reads, and its tokens after it."""
    leases, first_read, lengths = [], [], []
    for request in due:
        written, drafts = request.kv_written_len, request.num_drafts
        steps, most_tokens_a_step = request.in_flight + 1, 1 + drafts
        leases.append(request.held)
        # A draft model also computes the token before, so that one must be in the window.
        first_read.append(written - 1 if drafts else written)
        lengths.append(min(written + steps * most_tokens_a_step, request.most_tokens))
    return Batch(leases), np.array(first_read), lengths


def _take_tokens(
    request: GeneratingRequest, tokens: Sequence[SampledToken]
) -> tuple[Sequence[SampledToken], RequestEnd | None]:
    """Append sampled tokens to the output, up to the one that ends it. Returns the end or None."""
    if len(tokens) == 1:  # without drafts
        token_id = tokens[0].token_id
        request.output_ids.append(token_id)
        request.kv_written_len += 1
        return tokens, request.checker.check(token_id)
    finish = None
    for index, token in enumerate(tokens):
        request.output_ids.append(token.token_id)
        finish = request.checker.check(token.token_id)
        if finish is not None:
            tokens = tokens[: index + 1]
            break
    request.kv_written_len += len(tokens)
    return tokens, finish
