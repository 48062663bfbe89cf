"""What the loop and the role share: the account, the requests and the way out."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import numpy as np

from kvrelay.engine.commands import Dropped, Submit
from kvrelay.engine.faults import FaultPlan
from kvrelay.engine.metrics import WorkerMetrics
from kvrelay.engine.outbox import Outbox
from kvrelay.engine.outputs import (
    NO_TIMINGS,
    End,
    EndReason,
    Load,
    Output,
    RequestKey,
    RouterLink,
    StepOutputs,
    Timings,
)
from kvrelay.engine.request import Request
from kvrelay.engine.step import StepEnded
from kvrelay.mem_cache.fence import Fence, StepClock, StepFence
from kvrelay.mem_cache.ledger import Ledger
from kvrelay.mem_cache.release import Outcome, release_kv_cache
from kvrelay.mem_cache.sharing import PageCopy
from kvrelay.model_runner.sampler import SampledToken

logger = logging.getLogger(__name__)

_STEP_WEIGHT = 1 / 16
"""Of the latest forward in their mean."""


class EngineCore:
    """Memory, live requests and outputs of one worker. The engine thread's own.

    Args:
        ledger: the account of the worker's memory.
        outbox: carries messages to the event loop.
        metrics: what is counted on the way.
        faults: what is to go wrong on the way; nothing by default.
    """

    def __init__(
        self,
        ledger: Ledger,
        outbox: Outbox,
        metrics: WorkerMetrics,
        faults: FaultPlan | None = None,
    ) -> None:
        self.ledger = ledger
        self.outbox = outbox
        self.metrics = metrics
        self.faults = faults or FaultPlan()
        self.steps = StepClock()
        self.step_seconds = 0.0
        """Of the last forwards, a moving mean."""
        self.requests: dict[RequestKey, Request] = {}
        self.links: list[RouterLink] = []
        self.draining = False
        """No more requests are taken. Set by the loop, and never unset."""
        self._copies: list[PageCopy] = []
        self._outputs: dict[RouterLink, list[Output]] = {}
        self._last_load: Load | None = None

    def attach(self, link: RouterLink) -> None:
        """A router has come: it hears of the load at once."""
        self.links.append(link)
        self._last_load = None

    def count_step(self, ended: StepEnded) -> None:
        """A forward has ended well."""
        self.metrics.count_step(ended)
        weight = 1.0 if self.step_seconds == 0 else _STEP_WEIGHT
        self.step_seconds += weight * (ended.seconds - self.step_seconds)

    def turn_away(self, command: Submit) -> None:
        """Give a new request back to its router at once: other workers may take it."""
        emitted = len(command.input_ids) - command.prompt_len
        for choice in command.choices:
            key = command.key.of_choice(choice)
            output = Output(key, emitted, end=End(EndReason.RETRACTED))
            self._outputs.setdefault(command.link, []).append(output)

    def admit(self, request: Request, most_tokens: int) -> bool:
        """Enter a new request; one that could never be completed here is refused with the reason.

        Args:
            request: dropped if its key is live: a message came twice.
            most_tokens: tokens that it may come to hold on this worker.
        """
        if request.key in self.requests:
            logger.warning("request %s was submitted twice", request.key)
            self.metrics.count_dropped(Dropped.SUBMIT)
            return False
        capacity = self.ledger.max_lease_tokens
        if most_tokens > capacity:
            error = f"{most_tokens} tokens: one request can hold {capacity} here"
            for choice in request.choices:
                self.emit(request, end=End(EndReason.FAILED, error=error), choice=choice)
            return False
        self.requests[request.key] = request
        return True

    def reserve(
        self, request: Request, known_tokens: int, leaving: Sequence[int] | None = None
    ) -> bool:
        """Take the promise of memory for all that the request came with, or nothing.

        Whoever waits for memory holds none: that keeps a pair of workers free of deadlock.

        Args:
            request: waits; it has a lease afterwards.
            known_tokens: of its input that may be taken from the prefix index.
            leaving: pages of each pool that are to be left for others.
        """
        token_ids = np.asarray(request.token_ids(0, known_tokens), np.int32)
        request.lease = self.ledger.open(
            str(request.key), request.input_len, token_ids=token_ids, leaving=leaving
        )
        return request.lease is not None

    def become_choice(self, request: Request, choice: int) -> None:
        """A request that stood for several choices is only one of them from now on."""
        del self.requests[request.key]
        request.key, request.choices = request.key.of_choice(choice), (choice,)
        self.requests[request.key] = request

    def fork(self, request: Request, others: Sequence[Request]) -> bool:
        """Let `others` share the pages of the input of `request`; `False` if memory is short.

        The page at its unaligned end is copied by the next forward.
        """
        token_ids = np.asarray(request.token_ids(0, request.input_len), np.int32)
        copied = StepFence(self.steps, self.steps.launched + 1)
        holders = [str(other.key) for other in others]
        fork = self.ledger.fork(request.held, holders, token_ids, request.input_len, copied=copied)
        if fork is None:
            return False
        for other, lease in zip(others, fork.leases, strict=True):
            other.lease = lease
        self._copies += fork.copies
        return True

    def take_copies(self) -> list[PageCopy]:
        """What the next forward has to copy first."""
        copies, self._copies = self._copies, []
        return copies

    def choices_of(self, key: RequestKey) -> list[Request]:
        """The live requests of one submission."""
        first = key.of_choice(0)
        return [r for r in self.requests.values() if r.key.of_choice(0) == first]

    def emit(
        self,
        request: Request,
        tokens: Sequence[SampledToken] = (),
        end: End | None = None,
        timings: Timings = NO_TIMINGS,
        *,
        cached_tokens: int = 0,
        prompt_logprobs: Sequence[SampledToken] = (),
        choice: int | None = None,
        index: int | None = None,
    ) -> None:
        """Tell the request's router of its latest `tokens`, or of its end, or of both.

        Args:
            request: whose output they are the last of.
            tokens: may be empty.
            end: `None` if there is more to come.
            timings: see `Output`.
            cached_tokens: see `Output`.
            prompt_logprobs: see `Output`.
            choice: which output of its prompt, where the request stands for several.
            index: of the first token, where the request does not know the tokens as its own.
        """
        key = request.key if choice is None else request.key.of_choice(choice)
        index = len(request.output_ids) - len(tokens) if index is None else index
        output = Output(
            key, index, tuple(tokens), end, timings, cached_tokens, tuple(prompt_logprobs)
        )
        self._outputs.setdefault(request.link, []).append(output)

    def end(
        self,
        request: Request,
        outcome: Outcome,
        end: End | None,
        *,
        tokens: Sequence[SampledToken] = (),
        timings: Timings = NO_TIMINGS,
        fences: Iterable[Fence] = (),
    ) -> None:
        """A request's one way out: its memory, its entry, and its last word to the router.

        Args:
            request: live on this worker.
            outcome: what becomes of its memory.
            end: `None` if the router has had the last word already.
            tokens: sampled last, not yet told.
            timings: of the phases that this worker saw.
            fences: transfers that still read or write its pages, besides its last forward.
        """
        self._release(request, outcome, fences)
        request.has_ended = True
        del self.requests[request.key]
        if end is not None:
            for choice in request.choices:
                self.emit(request, tokens, end, timings, choice=choice)

    def _release(self, request: Request, outcome: Outcome, fences: Iterable[Fence]) -> None:
        if request.lease is None:
            return
        fences = [StepFence(self.steps, request.last_step), *fences]
        # Not more than is settled: of what a forward still writes, nothing is published.
        tokens = np.asarray(request.token_ids(0, request.settled_len), np.int32)
        if release_kv_cache(self.ledger, request.lease, outcome, token_ids=tokens, fences=fences):
            self.metrics.count_release(outcome)

    def flush(self, load: Load) -> None:
        """Send what this pass produced; routers hear of the load when it has changed."""
        changed = load != self._last_load
        self._last_load = load
        for link in self.links:
            outputs = tuple(self._outputs.pop(link, ()))
            if outputs or changed:
                self.outbox.put(link, StepOutputs(outputs, load if changed else None))
        self._outputs.clear()
        self.outbox.flush()
