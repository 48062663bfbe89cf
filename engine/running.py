"""The requests that generate: who gets its next token, and who has to make room for it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from kvrelay.engine.core import EngineCore
from kvrelay.engine.growth import GrowthReserve
from kvrelay.engine.outputs import End, EndReason, Timings
from kvrelay.engine.request import Request
from kvrelay.engine.step import Computed, Scheduled
from kvrelay.engine.stop import Finish, StopChecker
from kvrelay.mem_cache.lease import Batch
from kvrelay.mem_cache.release import Outcome
from kvrelay.model_runner.sampler import SampledToken


@dataclass(eq=False, slots=True, kw_only=True)
class GeneratingRequest(Request):
    """A request that this worker generates for."""

    checker: StopChecker
    num_drafts: int = 0
    """Drafted tokens that a step verifies at most."""
    every_step: Scheduled | None = None
    """What is computed of it in every step; once it runs."""
    in_flight: int = 0
    """Steps that were launched for it and have not ended."""

    @abstractmethod
    def timings(self) -> Timings:
        """What it took until now, as far as this worker saw it."""


RequestT = TypeVar("RequestT", bound=GeneratingRequest)


class RunningBatch(Generic[RequestT]):
    """Plans a decode step for all of them, and makes of its results what they mean.

    A step may be planned while the one before it computes. Then its requests
    have more pages than they will keep: the lengths in their leases say so.

    Args:
        core: their memory.
        growth: learns how long outputs are.
        retract: called for a request that has left the batch to make room: it is to give back
            its memory, and to be computed again later.
        retract_every: if not 0, one is retracted every so many steps, for tests.
    """

    def __init__(
        self,
        core: EngineCore,
        growth: GrowthReserve,
        retract: Callable[[RequestT], None],
        *,
        retract_every: int = 0,
    ) -> None:
        self._core = core
        self._growth = growth
        self._retract = retract
        self._retract_every = retract_every
        self._until_retraction = retract_every
        self.waits_for_room = False
        """Short of pages, until the steps in flight have ended: better not launch others."""
        self._requests: dict[RequestT, None] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestT]:
        return iter(self._requests)

    def begin(self, request: RequestT, firsts: Sequence[tuple[int, int]]) -> None:
        """Its input's KV is here: from now on its choices gain tokens, each for itself.

        A choice that there is no memory for is retracted at once.

        Args:
            request: stands for all of them until now, and for the first of them from now on.
            firsts: each choice and its first token, which did not end it.
        """
        choices = [choice for choice, _ in firsts]
        others = [self._fork(request, choice) for choice in choices[1:]]
        self._core.become_choice(request, choices[0])
        request.settled_len = request.input_len
        has_memory = not others or self._core.fork(request, others)
        for one, (_, token_id) in zip([request, *others], firsts, strict=True):
            one.output_ids.append(token_id)
            one.checker.check(token_id)
            if one is request or has_memory:
                self._join(one)
            else:
                self._core.metrics.count_retraction()
                self._growth.retracted()
                self._retract(one)

    def _fork(self, request: RequestT, choice: int) -> RequestT:
        one = replace(
            request,
            key=request.key.of_choice(choice),
            choices=(choice,),
            output_ids=list(request.output_ids),
            checker=request.checker.again(request.output_ids),
            lease=None,
        )
        self._core.requests[one.key] = one
        return one

    def _join(self, request: RequestT) -> None:
        request.settled_len = request.num_tokens - 1
        tape = request.make_tape((request.key.choice,))
        request.every_step = Scheduled(request, tape, 1, True, request.num_drafts)
        self._requests[request] = None

    def leave(self, request: RequestT) -> None:
        """It is over; nothing if it is not, or not yet, among them."""
        self._requests.pop(request, None)

    def schedule(self) -> list[Scheduled]:
        """A step for every request that may need one, with room for what it may write.

        Short of pages, the request with the least to lose is retracted, once no
        step is in flight: until then its pages could not be used anyway.
        """
        self.waits_for_room = False
        self._force_retraction()
        while due := self._due():
            if self._grow(due):
                self._until_retraction -= 1
                for request in due:
                    request.in_flight += 1
                return [request.every_step for request in due if request.every_step]
            if self._core.steps.running:
                self.waits_for_room = True
                break
            self._make_room()
            self._growth.retracted()
        return []

    def _due(self) -> list[RequestT]:
        """Those for whom a step more may be of use: the steps in flight may not have ended them."""
        # Every step yields a token at least, and `settled_len` is all tokens but the last.
        return [
            request
            for request in self._requests
            if request.settled_len + request.in_flight < request.most_tokens
        ]

    def _grow(self, due: Sequence[RequestT]) -> bool:
        """Room for a step more of each of them, should every draft be accepted."""
        leases, seen_from, goals = [], [], []
        for request in due:
            settled, drafts = request.settled_len, request.num_drafts
            leases.append(request.held)
            # A draft model may look back from the token before.
            seen_from.append(settled - 1 if drafts else settled)
            goals.append(min(settled + (request.in_flight + 1) * (1 + drafts), request.most_tokens))
        ledger, batch = self._core.ledger, Batch(leases)
        ledger.slide_all(batch, np.array(seen_from))
        return ledger.grow_all(batch, np.array(goals))

    def settled(self, request: RequestT, computed: Computed) -> None:
        """A step has ended for it: say its new tokens, none after the one that ends it."""
        tokens, finish = self._take(request, computed)
        if finish is None:
            self._core.emit(request, tokens)
            return
        self.leave(request)
        self._growth.finished(request)
        end, timings = End(EndReason.FINISHED, finish), request.timings()
        self._core.end(request, Outcome.FINISHED, end, tokens=tokens, timings=timings)

    def _take(
        self, request: RequestT, computed: Computed
    ) -> tuple[Sequence[SampledToken], Finish | None]:
        request.in_flight -= 1
        tokens, finish = computed.tokens, None
        for index, token in enumerate(tokens):
            request.output_ids.append(token.token_id)
            finish = request.checker.check(token.token_id)
            if finish is not None:
                tokens = tokens[: index + 1]
                break
        request.settled_len += len(tokens)
        if computed.num_drafts and finish is None:
            # What the step wrote for the drafts that were accepted is right.
            sure = request.settled_len + request.in_flight
            self._core.ledger.commit(request.held, max(sure, request.held.kv_committed_len))
        return tokens, finish

    def _force_retraction(self) -> None:
        if self._retract_every and self._requests and self._until_retraction <= 0:
            self._until_retraction = self._retract_every
            self._make_room()

    def _make_room(self) -> None:
        """Retract the one with the fewest tokens generated; of several, the longest prompt."""
        victim = min(self._requests, key=lambda r: (len(r.output_ids), -len(r.prompt_ids)))
        self.leave(victim)
        self._core.metrics.count_retraction()
        self._retract(victim)
