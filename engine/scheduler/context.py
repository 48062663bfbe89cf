"""The state that loop and scheduler share: memory, live requests, and outputs to routers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Generic, TypeVar

import numpy as np

from kvrelay.engine.executor.step import StepEnded
from kvrelay.engine.faults import FaultPlan
from kvrelay.engine.scheduler.attempt_trace import QUEUE, AttemptTrace
from kvrelay.engine.scheduler.commands import Dropped, Submit
from kvrelay.engine.scheduler.metrics import RELEASES, WorkerMetrics
from kvrelay.engine.scheduler.outbox import Outbox, RouterLink
from kvrelay.engine.scheduler.prefix_reports import PrefixReports
from kvrelay.engine.scheduler.progress_reports import ProgressReports
from kvrelay.engine.scheduler.request import Request
from kvrelay.engine.scheduler.session_turns import SessionTurns
from kvrelay.engine.scheduler.speed_learner import SpeedLearner
from kvrelay.mem_cache.fence import Fence, StepClock, StepFence
from kvrelay.mem_cache.host.host_tier import HostTier
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager
from kvrelay.mem_cache.leases.publishing import PageCopy
from kvrelay.mem_cache.release import Outcome, release_kv_cache
from kvrelay.wire.load import PeerTransport, PoolCounts, QuarantineState, WorkerLoad, sum_by_size
from kvrelay.wire.output import (
    NO_TIMINGS,
    EndReason,
    EngineOutputs,
    FailureReason,
    PhaseTimings,
    RequestEnd,
    RequestOutput,
    SampledToken,
)
from kvrelay.wire.submit import RequestKey

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=Request)

_REUSE_FADES = 1 - 1 / 64
"""The factor by which each input lowers the largest share of an input that the prefix index had."""


_RETAINED: Final = {Outcome.FINISHED, Outcome.HANDED_OVER}
"""The outcomes after which a request's pages are retained, if it has asked so."""


class SchedulerContext(Generic[RequestT]):
    """Memory, live requests and outputs of one worker. Only the engine thread uses it.

    Args:
        kv_cache: manages the worker's KV memory.
        outbox: carries messages to the event loop.
        metrics: counts events.
        faults: injected faults; none by default.
        chunk_tokens: the most prompt tokens of a step; 0: any number.
        host_tier: keeps what the prefix index evicts; None: evicted pages are lost.
        wake_in: makes the loop run a pass after the given seconds.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        outbox: Outbox,
        metrics: WorkerMetrics,
        faults: FaultPlan | None = None,
        chunk_tokens: int = 0,
        host_tier: HostTier | None = None,
        wake_in: Callable[[float], object] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kv_cache = kv_cache
        self.outbox = outbox
        self.metrics = metrics
        self.faults = faults or FaultPlan()
        self.host_tier = host_tier
        self.wake_in = wake_in
        self.clock = clock
        self.steps = StepClock()
        self.speed_learner = SpeedLearner(chunk_tokens)
        """The measured cost of steps."""
        self.requests: dict[RequestKey, RequestT] = {}
        self.links: list[RouterLink] = []
        self.prefixes = PrefixReports(kv_cache.index, kv_cache.shape.page_size)
        """The reports to routers of what the prefix index has."""
        self.session_turns = SessionTurns(kv_cache, metrics)
        """The KV that sessions keep between their turns."""
        self.progress = ProgressReports()
        """The progress reports to routers that watch their requests."""
        self.draining = False
        """Whether the worker takes no more requests. The loop sets it and never unsets it."""
        self._on_release: list[Callable[[RequestT], object]] = []
        self._copies: list[PageCopy] = []
        self._outputs: dict[RouterLink, list[RequestOutput]] = {}
        self._last_load: WorkerLoad | None = None
        self._reused_share = 0.0

    def on_release(self, forget: Callable[[RequestT], object]) -> None:
        """Have every request that is released forgotten by whoever kept something for it."""
        self._on_release.append(forget)

    def attach(self, link: RouterLink) -> None:
        """Add a router's stream; the router is told the load after this pass."""
        self.links.append(link)
        self.prefixes.attach(link)
        self.tell_load()

    def detach(self, link: RouterLink) -> None:
        """Remove a router's stream that has ended."""
        self.links.remove(link)
        self.prefixes.detach(link)
        self.progress.watch(link, on=False)

    def count_step(self, ended: StepEnded[RequestT]) -> None:
        """Count a forward that has ended well."""
        self.metrics.count_step(ended)
        self.speed_learner.observe(ended.work, ended.seconds, ended.widening)

    def retract_new(self, command: Submit) -> None:
        """Retract a request that has just come: its router submits it to another worker."""
        submission, end = command.submission, RequestEnd(EndReason.RETRACTED)
        for choice in submission.choices:
            key = command.key.of_choice(choice)
            output = RequestOutput(key, submission.num_emitted, end=end)
            self._outputs.setdefault(command.link, []).append(output)

    def register(self, request: RequestT, most_tokens: int) -> bool:
        """Add a new request to the live ones; takes no memory.

        Args:
            request: dropped if its key is live: the submission came twice.
            most_tokens: tokens that it may come to hold on this worker. If no pool
                could ever hold so many, the request fails at once.

        Returns:
            Whether it was added.
        """
        if request.key in self.requests:
            logger.warning("request %r was submitted twice", request.key, extra=request.key.fields)
            self.metrics.count_dropped(Dropped.SUBMIT)
            return False
        capacity = self.kv_cache.max_lease_tokens
        if most_tokens > capacity:
            self.refuse(request, f"{most_tokens} tokens: one request can hold {capacity} here")
            return False
        self.requests[request.key] = request
        return True

    def refuse(self, request: RequestT, error: str) -> None:
        """Fail a new request, all choices of it, that can never run here."""
        for choice in request.choices:
            self.emit(request, end=RequestEnd(EndReason.FAILED, error=error), choice=choice)
        if request.trace is not None:
            request.trace.end_request(Outcome.FAILED.value, 0, error)

    def reserve(
        self,
        request: RequestT,
        known_tokens: int,
        headroom: Sequence[int] | None = None,
        *,
        fresh_boundary: bool = False,
    ) -> bool:
        """Open a lease with a promise of pages for the request's whole input, or take nothing.

        A request that waits for memory holds none, so a pair of workers cannot deadlock.

        Args:
            request: has no lease; has one if this returns `True`.
            known_tokens: tokens of its input that may come from the prefix index, or from its
                session.
            headroom: pages of each pool that must stay free for others.
            fresh_boundary: whether its session must lend whole pages only, because a read will
                write the next page from its start.
        """
        request.lease = self.session_turns.open(
            request, known_tokens, headroom, fresh_boundary=fresh_boundary
        )
        if request.lease is None:
            return False
        _trace_queue(request)
        share = request.lease.kv_committed_len / request.input_len
        self._reused_share = max(share, self._reused_share * _REUSE_FADES)
        return True

    def rekey_to_choice(self, request: RequestT, choice: int) -> None:
        """Make a request that stood for several choices stand for one of them."""
        del self.requests[request.key]
        request.key, request.choices = request.key.of_choice(choice), (choice,)
        self.requests[request.key] = request

    def fork(self, request: RequestT, others: Sequence[RequestT]) -> bool:
        """Give `others` leases that share the pages of the input of `request`.

        The next forward copies the input's last page if it is not full. Returns `False` if memory
        is short; then nothing changes.
        """
        copied = StepFence(self.steps, self.steps.launched + 1)
        holders = [str(other.key) for other in others]
        input_ids, length = request.input_ids, request.input_len
        fork = self.kv_cache.sharing.fork(request.held, holders, input_ids, length, copied=copied)
        can_help = fork is None and self._can_fork_without_sessions(length, len(others))
        while fork is None and can_help and self.session_turns.evict_oldest():
            fork = self.kv_cache.sharing.fork(
                request.held, holders, input_ids, length, copied=copied
            )
        if fork is None:
            return False
        for other, lease in zip(others, fork.leases, strict=True):
            other.lease = lease
        self._copies += fork.copies
        return True

    def _can_fork_without_sessions(self, length: int, number: int) -> bool:
        """Whether `number` more choices of `length` tokens would fit if all idle sessions ended."""
        if not len(self.session_turns):
            return False
        shape = self.kv_cache.shape
        own = shape.pages_for(length) - length // shape.page_size
        return self.session_turns.can_make_room([number * own] * len(shape.pools), number)

    def take_copies(self) -> list[PageCopy]:
        """Take the page copies that the next forward must make first."""
        copies, self._copies = self._copies, []
        return copies

    def choices_of(self, key: RequestKey) -> list[RequestT]:
        """Find the live requests of one submission, whichever choice `key` names."""
        first = key.of_choice(0)
        return [r for r in self.requests.values() if r.key.of_choice(0) == first]

    def emit(
        self,
        request: RequestT,
        tokens: Sequence[SampledToken] = (),
        end: RequestEnd | None = None,
        timings: PhaseTimings = NO_TIMINGS,
        *,
        cached_tokens: int = 0,
        prompt_logprobs: Sequence[SampledToken] = (),
        prompt_index: int = 0,
        choice: int | None = None,
        index: int | None = None,
    ) -> None:
        """Send the request's router its latest `tokens`, its end, or both, after this pass.

        Args:
            request: the last tokens of its output are `tokens`.
            tokens: may be empty.
            end: `None` if there is more to come.
            timings: seconds of the phases that this worker saw.
            cached_tokens: prompt tokens that the prefix index had.
            prompt_logprobs: of consecutive tokens of the prompt.
            prompt_index: the place of the first of these in the prompt.
            choice: the output that is meant, if the request stands for several.
            index: the first token's place in the output, if `tokens` are not in `output_ids`.
        """
        key = request.key if choice is None else request.key.of_choice(choice)
        index = len(request.output_ids) - len(tokens) if index is None else index
        output = RequestOutput(
            key,
            index,
            tuple(tokens),
            end,
            timings,
            cached_tokens,
            tuple(prompt_logprobs),
            prompt_index,
        )
        self._outputs.setdefault(request.link, []).append(output)

    def release(
        self,
        request: RequestT,
        outcome: Outcome,
        end: RequestEnd | None,
        *,
        tokens: Sequence[SampledToken] = (),
        timings: PhaseTimings = NO_TIMINGS,
        fences: Iterable[Fence] = (),
    ) -> None:
        """Free a request's memory, forget it, and tell its router. Every request ends here.

        Args:
            request: live on this worker.
            outcome: decides whether its pages go to the prefix index.
            end: `None` if the router knows already, or if the request begins again here.
            tokens: the last that were sampled, which the router was not told yet.
            timings: seconds of the phases that this worker saw.
            fences: transfers that still read or write its pages, besides its last forward.
        """
        self._release_kv_cache(request, outcome, fences)
        for forget in self._on_release:
            forget(request)
        request.has_ended = True
        del self.requests[request.key]
        if end is not None:
            for choice in request.choices:
                self.emit(request, tokens, end, timings, choice=choice)
        if request.trace is not None:
            _trace_end(request.trace, request, outcome, end)

    def _release_kv_cache(
        self, request: RequestT, outcome: Outcome, fences: Iterable[Fence]
    ) -> None:
        if request.lease is None:
            return
        fences = [StepFence(self.steps, request.last_step), *fences]
        # Only written tokens are published: what a forward still writes is not.
        tokens = np.asarray(request.token_ids(0, request.kv_written_len), np.int32)
        released = self.session_turns.end_turn(request, outcome, tokens, fences)
        if release_kv_cache(
            self.kv_cache, request.lease, released, token_ids=tokens, fences=fences
        ):
            why = released if outcome is Outcome.FINISHED else outcome
            self.metrics.count(RELEASES, outcome=why.value)
            seconds = request.command.submission.retain_seconds
            if seconds and released in _RETAINED:
                self.kv_cache.retain(tokens, seconds, request.namespace)

    def measure_load(
        self,
        *,
        waiting_requests: int,
        waiting_tokens: int,
        growth_tokens: int = 0,
        output_tokens: int = 0,
        prompts: Mapping[RequestT, int] | None = None,
        peers: Iterable[PeerTransport] = (),
    ) -> WorkerLoad:
        """Make a `WorkerLoad` of the scheduler's counts and of what this context knows.

        `prompts` has, for each request, the tokens of its input that are left to compute here.
        """
        return WorkerLoad(
            waiting_requests=waiting_requests,
            running_requests=len(self.requests) - waiting_requests,
            waiting_tokens=waiting_tokens,
            pools=self._pool_counts(),
            growth_tokens=growth_tokens,
            output_tokens=output_tokens,
            speeds=self.speed_learner.speeds,
            prompts_by_size=sum_by_size(
                [tokens for one, tokens in (prompts or {}).items() if one.priority <= 0]
            ),
            reused_share=self._reused_share,
            draining=self.draining,
            peers=tuple(peers),
            quarantine=self._quarantine(),
            session_locked_tokens=self.session_turns.locked_tokens,
            storage_error=self._storage_error(),
        )

    def _pool_counts(self) -> tuple[PoolCounts, ...]:
        """Count the pages of every pool, the host's after the device's, and last the rows."""
        if self.host_tier is None:
            return self.kv_cache.audit.counts()
        *device, rows = self.kv_cache.audit.counts()
        return (*self.host_tier.pool_counts(device), rows)

    def _storage_error(self) -> str:
        storage = None if self.host_tier is None else self.host_tier.storage
        return "" if storage is None else storage.state.write_error

    def _quarantine(self) -> tuple[QuarantineState, ...]:
        now = self.kv_cache.clock()
        return tuple(
            QuarantineState(kind.value, found.pages, int(now - found.since))
            for kind, found in self.kv_cache.allocator.quarantine_counts().items()
        )

    @property
    def load_can_wait(self) -> bool:
        """Whether a new load can wait: routers know that the worker is busy or drains."""
        load = self._last_load
        return load is not None and not load.is_idle and load.draining is self.draining

    def tell_load(self) -> None:
        """Make sure that the load is counted and sent after this pass, even if it is unchanged."""
        self._last_load = None

    def flush(self, load: WorkerLoad | None) -> None:
        """Send this pass's outputs to the routers, and load and prefixes if they have changed.

        `load` is None if it was not counted.
        """
        changed = load is not None and load != self._last_load
        self._last_load = load or self._last_load
        prefixes = self.prefixes.take()
        for link in self.links:
            outputs = tuple(self._outputs.pop(link, ()))
            first, *rest = prefixes.get(link, (None,))
            ended, progress = self.session_turns.take_ended(link), self.progress.of(link)
            if outputs or changed or first or ended or progress:
                news = EngineOutputs(
                    outputs,
                    load if changed else None,
                    first,
                    ended_sessions=ended,
                    progress=progress,
                )
                self.outbox.put(link, news)
            for update in rest:
                self.outbox.put(link, EngineOutputs((), prefixes=update))
        self._outputs.clear()
        self.progress.clear()
        self.outbox.flush()


def _trace_queue(request: Request) -> None:
    """Record that a request has memory now."""
    attributes = {
        "kvrelay.input_tokens": request.input_len,
        "kvrelay.cached_tokens": request.held.kv_committed_len,
    }
    request.record(QUEUE, request.received, time.monotonic(), attributes)


def _trace_end(
    trace: AttemptTrace, request: Request, outcome: Outcome, end: RequestEnd | None
) -> None:
    """Record the end of a request; `end` is `None` if its router was told before."""
    error = None
    if end is not None and end.reason is EndReason.FAILED:
        # A grammar's message may quote the output.
        error = "failed" if end.cause is FailureReason.GRAMMAR_FAILED else end.error
    elif outcome is Outcome.FAILED:
        error = "failed"
    brought = request.input_len - len(request.prompt_ids)
    trace.end_request(outcome.value, len(request.output_ids) - brought, error)
