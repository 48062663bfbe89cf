"""The engine's loop, the same for all workers; the scheduler decides what is computed.

::

    take the inbox's messages (a forward's end is one: scheduler.process_step_output())
    -> kv_cache.allocator.reclaim() -> scheduler.watch_peers() -> scheduler.admit()
    -> scheduler.schedule() -> launch -> audit -> send outputs

The engine thread runs it, and no other thread touches memory state. The forward runs on a thread of
its own, so that messages are answered while it computes. Every change of the state arrives as a
message, so a pass begins by waiting for one.

With overlap a step is planned and launched while the previous one computes, so that the forward
thread never waits for a plan. The plan cannot know which tokens the previous step samples. The
forward thread reads them from the `TokenState`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, assert_never

from kvrelay.device.thread_end import CLOSE_SECONDS, ended_within
from kvrelay.engine.executor.failures import ForwardFailedError, WorkerBrokenError
from kvrelay.engine.executor.step import Scheduled, Step, StepEnded, StepOutput
from kvrelay.engine.phases import Phase
from kvrelay.engine.scheduler.attempt_trace import CHUNK
from kvrelay.engine.scheduler.build_step import build_step
from kvrelay.engine.scheduler.commands import (
    Attach,
    Command,
    Detach,
    Drain,
    Dropped,
    FindHistory,
    FromRouter,
    GiveUp,
    Inbox,
    Inspect,
    Misdirected,
    PeerDied,
    RetractForDrain,
    RouterCommand,
    Stop,
    Submit,
    Wake,
)
from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.engine.scheduler.metrics import AUDIT_FAILURES, FAILED_STEPS
from kvrelay.engine.scheduler.outbox import RouterLink
from kvrelay.engine.scheduler.request import Request
from kvrelay.mem_cache.errors import ConservationError
from kvrelay.mem_cache.host.tier_copies import CopyEnded
from kvrelay.mem_cache.storage.storage_orders import StorageEnded
from kvrelay.wire.load import WorkerLoad
from kvrelay.wire.request_progress import RequestProgress
from kvrelay.wire.submit import (
    CancelRequest,
    ForgetSessionRequest,
    TellPrefixesRequest,
    WatchRequests,
)

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=Request)
RequestT_contra = TypeVar("RequestT_contra", bound=Request, contravariant=True)
MessageT = TypeVar("MessageT")
MessageT_contra = TypeVar("MessageT_contra", contravariant=True)

EngineMessage: TypeAlias = Command | CopyEnded | StorageEnded | StepEnded[RequestT] | MessageT
"""The messages in an engine's inbox; `MessageT` are its scheduler's own."""


class Scheduler(Protocol[RequestT, MessageT_contra]):
    """An interface that decides what a worker computes. On the engine thread; must not block."""

    def submit(self, command: Submit) -> None:
        """Take a new request."""
        ...

    def cancel(self, command: CancelRequest) -> None:
        """End a request, if it still lives, and free its memory."""
        ...

    def peer_died(self, incarnation: str) -> None:
        """End the requests that depended on another worker, whose death is confirmed."""
        ...

    def handle(self, message: MessageT_contra) -> None:
        """Take a message of the scheduler's own kind."""
        ...

    def watch_peers(self) -> None:
        """Send due heartbeats, and end requests of peers that are silent too long; each pass."""
        ...

    def admit(self) -> None:
        """Reserve memory for waiting requests, as far as it fits, and ask peers to do the same.

        Called every pass, also while a forward runs.
        """
        ...

    def schedule(self) -> Sequence[Scheduled[RequestT]]:
        """Choose what the next forward computes, and allocate its pages. Empty: nothing.

        The implementations are ``PrefillScheduler.schedule`` (by ``ComputingPrompts.schedule``),
        ``DecodeScheduler.schedule`` and ``AggregatedScheduler.schedule``. The latter two use
        ``MixedSteps.schedule``, which adds prompts to ``RunningBatch.schedule``.
        """
        ...

    def process_step_output(self, item: Scheduled[RequestT], output: StepOutput) -> None:
        """Take what a forward has computed for one request."""
        ...

    def fail(self, request: RequestT, error: Exception) -> None:
        """End a request because a forward, or the request's part of one, has failed."""
        ...

    def retract_for_drain(self) -> None:
        """Retract requests that lose little by going on elsewhere, because the worker drains."""
        ...

    def load(self) -> WorkerLoad:
        """Count how much there is to do."""
        ...

    def progress(self) -> Iterable[tuple[RequestT, RequestProgress]]:
        """Yield how far each request has come; called while a router watches."""
        ...


class Launcher(Protocol[RequestT_contra]):
    """An interface that computes steps; each one's end comes back as a `StepEnded` message."""

    def launch(self, step: Step[RequestT_contra]) -> None:
        """Compute a step after those launched before it. Does not block."""
        ...


class SharedCores(Protocol):
    """An interface by which the machine's other workers see whether this one computes."""

    busy: bool
    """Whether this worker computes now."""


class Engine(Generic[RequestT, MessageT]):
    """The loop of a scheduler, run pass by pass; it has no thread of its own.

    Args:
        context: the memory, requests and outputs that it works on.
        scheduler: decides what to compute, and takes the results.
        launcher: computes it.
        failed_forwards_limit: the number of failed forwards in a row that ends it.
        overlap: plan a step while the previous one computes.
        audit_pages: check every page after every pass, not the sums alone.
        load_seconds: the shortest time between two counts of the load. Only while a forward runs
            that takes less, and whose end brings the next pass.
        cores: where it marks its cores as busy, from a step's launch until nothing is launched or
            in flight; None: no other worker looks.
    """

    def __init__(
        self,
        context: SchedulerContext[RequestT],
        scheduler: Scheduler[RequestT, MessageT],
        launcher: Launcher[RequestT],
        *,
        failed_forwards_limit: int,
        overlap: bool,
        audit_pages: bool,
        load_seconds: float = 0.0,
        cores: SharedCores | None = None,
    ) -> None:
        self._context = context
        self._scheduler = scheduler
        self._launcher = launcher
        audit, tier = context.kv_cache.audit, context.host_tier
        self._audits = [audit.check_pages if audit_pages else audit.check]
        if tier is not None:
            self._audits.append(tier.pages.check_pages if audit_pages else tier.pages.check)
        self._most_running = 2 if overlap else 1
        self._launched: deque[Step[RequestT]] = deque()
        self._failed_forwards_limit = failed_forwards_limit
        self._failed_in_a_row = 0
        self._gives_up = ""
        self._load_seconds = load_seconds
        self._cores = cores
        self._load_counted_at = -math.inf
        self._stopping = False
        self._on_drained: list[Callable[[], object]] = []

    @property
    def stopped(self) -> bool:
        """Whether it was told to stop, every request has ended, and no forward runs."""
        return self._stopping and not self._context.steps.running

    def run_pass(self, messages: Iterable[EngineMessage[RequestT, MessageT]]) -> None:
        """Run one pass of the loop.

        Raises:
            ConservationError: memory was lost or is owned twice: the engine must stop.
            WorkerBrokenError: forwards fail, or one hangs. Routers are told, and the engine must
                stop.
        """
        try:
            self._run_pass(messages)
        except ConservationError:
            self._context.metrics.count(AUDIT_FAILURES)
            raise

    def _run_pass(self, messages: Iterable[EngineMessage[RequestT, MessageT]]) -> None:
        for message in messages:
            self._handle(message)
        self._context.kv_cache.allocator.reclaim()
        if not self._stopping and not self._gives_up:
            self._admit_and_launch()
        if self._cores is not None:
            self._cores.busy = self._context.steps.running > 0
        tier = self._context.host_tier
        if tier is not None:
            tier.write_back()
        for audit in self._audits:
            audit()
        now = time.monotonic()
        load = None if self._load_can_wait(now) else self._count_load(now)
        if self._context.progress.is_due():
            self._context.progress.take(self._scheduler.progress())
        self._context.flush(load)
        if self._gives_up:
            raise WorkerBrokenError(self._gives_up)
        self._tell_if_drained()

    def _load_can_wait(self, now: float) -> bool:
        """Whether the load was counted a moment ago, and a pass is sure to follow soon.

        Most passes of a busy worker take one message of one request, which does not change where
        routers place others. Counting the load and exporting the memory's state would be half of
        their work.
        """
        return (
            now < self._load_counted_at + self._load_seconds
            and self._context.steps.running > 0
            and self._context.speed_learner.last_seconds < self._load_seconds
            and self._context.load_can_wait
        )

    def _count_load(self, now: float) -> WorkerLoad:
        """Count the load, and publish it with the memory's state."""
        self._load_counted_at = now
        self._context.metrics.retained_tokens = self._context.kv_cache.index.retained_tokens()
        load, kv_cache, tier = (
            self._scheduler.load(),
            self._context.kv_cache,
            self._context.host_tier,
        )
        self._context.metrics.publish(
            load,
            kv_cache.allocator.quarantined_since,
            kv_cache.cache_counts,
            kv_cache.allocator.quarantine_counts(),
            {} if tier is None else {name: replace(one) for name, one in tier.tier_counts()},
        )
        return load

    def _tell_if_drained(self) -> None:
        """Report that the worker is drained, after the last outputs were sent.

        Pages may still be fenced by transfers of dead peers.
        """
        if self._on_drained and not self._context.requests and not self._context.steps.running:
            on_drained, self._on_drained = self._on_drained, []
            for tell in on_drained:
                tell()

    def _admit_and_launch(self) -> None:
        """Admit requests and launch steps; repeat if a launch has made room for other requests."""
        kv_cache = self._context.kv_cache
        self._scheduler.watch_peers()
        while True:
            self._scheduler.admit()
            room = kv_cache.room_version
            while self._context.steps.running < self._most_running and self._launch():
                pass
            if kv_cache.room_version == room:
                return

    def _launch(self) -> bool:
        """Plan the next forward and launch it. Returns `False` if there is nothing to compute."""
        scheduled, copies = self._scheduler.schedule(), self._context.take_copies()
        if not scheduled and not copies:
            return False
        step = build_step(self._context.steps.launch(), scheduled, copies, self._context.kv_cache)
        self._launched.append(step)
        if self._cores is not None:
            self._cores.busy = True  # before the forward sees whose cores it may borrow
        self._launcher.launch(step)
        return True

    def _process_step(self, ended: StepEnded[RequestT]) -> None:
        self._context.steps.end()
        self._launched.popleft()
        if ended.error is None and ended.num_tokens:
            self._context.count_step(ended)
        if ended.failure is not None:
            self._count_failure(ended.failure)
        elif ended.num_tokens:
            self._failed_in_a_row = 0
        for item, output in zip(ended.step.scheduled, ended.outputs, strict=True):
            if item.request.has_ended:
                continue
            _trace_chunk(item, output, ended)
            if output.error is None or output.tokens:
                self._scheduler.process_step_output(item, output)
            if output.error is not None and not item.request.has_ended:
                self._scheduler.fail(item.request, output.error)

    def _count_failure(self, error: Exception) -> None:
        """Count a forward that failed for all its requests, and give up if it is one too many."""
        self._context.metrics.count(FAILED_STEPS)
        self._failed_in_a_row += 1
        if isinstance(error, ForwardFailedError) and error.breaks_device:
            self._give_up(f"the device is broken: {error}")
        elif self._failed_in_a_row >= self._failed_forwards_limit:
            self._give_up(f"{self._failed_in_a_row} forwards in a row have failed: {error}")

    def _give_up(self, reason: str) -> None:
        """End after this pass. Routers see a worker that drains, so its requests go on elsewhere.

        The requests of the failed forward have ended already, and the router knows the cause.
        """
        self._gives_up = reason
        self._context.draining = True

    def _fail_step(self, number: int, reason: str) -> None:
        """End the requests of a forward that hangs, unless it has ended by now."""
        scheduled = [
            item for step in self._launched if step.number == number for item in step.scheduled
        ]
        live = [item.request for item in scheduled if not item.request.has_ended]
        for request in live:
            self._scheduler.fail(request, ForwardFailedError(reason, alone=len(live) == 1))

    def _handle(self, message: EngineMessage[RequestT, MessageT]) -> None:
        match message:
            case StepEnded() | CopyEnded() | StorageEnded():
                self._process_end(message)
            case Attach() | Detach() | Submit() | CancelRequest() | FromRouter():
                self._handle_router(message)
            case PeerDied():
                self._scheduler.peer_died(message.incarnation)
            case Misdirected():
                self._context.metrics.count_dropped(Dropped.INCARNATION)
            case Wake():
                pass
            case Inspect() | FindHistory():
                self._answer(message)
            case Drain():
                self._context.draining = True
                self._on_drained.append(message.on_drained)
                self._context.faults.reach(Phase.DRAINING)
            case RetractForDrain():
                self._scheduler.retract_for_drain()
            case GiveUp():
                if message.hanging_step is not None:
                    self._fail_step(message.hanging_step, message.reason)
                self._give_up(message.reason)
            case Stop():
                self._stopping = True
                self._cancel_all(list(self._context.requests.values()))
                self._context.session_turns.end_all()
            case _:
                self._scheduler.handle(message)

    def _answer(self, question: Inspect | FindHistory) -> None:
        if isinstance(question, Inspect):
            question.look(self._context.kv_cache)
            self._load_counted_at = -math.inf  # the answer is what this pass publishes
        elif question.is_wanted():
            question.answer(self._context.session_turns.adopt(question.owner, question.digest))

    def _process_end(self, ended: StepEnded[RequestT] | CopyEnded | StorageEnded) -> None:
        if isinstance(ended, StepEnded):
            self._process_step(ended)
            return
        tier = self._context.host_tier
        assert tier is not None, "a copy has ended that nobody ordered"
        if isinstance(ended, CopyEnded):
            tier.finish(ended)
        else:
            assert tier.storage is not None, "nobody has ordered anything of storage"
            tier.storage.finish(ended)

    def _handle_router(self, command: RouterCommand) -> None:
        match command:
            case Submit():
                self._submit(command)
            case CancelRequest():
                self._cancel(command)
            case Attach():
                self._context.attach(command.link)
            case Detach():
                self._detach(command)
            case FromRouter():
                self._do(command.link, command.command)
            case _:
                assert_never(command)

    def _do(
        self, link: RouterLink, command: TellPrefixesRequest | ForgetSessionRequest | WatchRequests
    ) -> None:
        match command:
            case TellPrefixesRequest():
                self._context.prefixes.begin_anew(link)
            case ForgetSessionRequest():
                self._context.session_turns.end(link, command.session)
            case WatchRequests():
                self._context.progress.watch(link, on=command.on)
            case _:
                assert_never(command)

    def _submit(self, command: Submit) -> None:
        if self._context.draining:
            self._context.retract_new(command)
        else:
            self._scheduler.submit(command)

    def _cancel(self, command: CancelRequest) -> None:
        if not self._context.choices_of(command.key):
            self._context.metrics.count_dropped(Dropped.CANCEL)
        self._scheduler.cancel(command)

    def _detach(self, message: Detach) -> None:
        self._context.detach(message.link)
        requests = self._context.requests.values()
        self._cancel_all([request for request in requests if request.link is message.link])
        self._context.session_turns.end_all(message.link)

    def _cancel_all(self, requests: Iterable[RequestT]) -> None:
        for request in requests:
            self._scheduler.cancel(CancelRequest(request.key))


def _trace_chunk(item: Scheduled[Request], output: StepOutput, ended: StepEnded[Any]) -> None:
    """Record a forward that computed part of a prompt; the tokens that follow get no spans."""
    request = item.request
    if request.trace is None or request.kv_written_len >= request.input_len:
        return
    attributes = {
        "kvrelay.tokens": item.num_tokens,
        "kvrelay.context_tokens": request.kv_written_len,
        "kvrelay.requests_in_step": len(ended.step.scheduled),
    }
    # Not the message: a grammar's may quote the output.
    error = None if output.error is None else type(output.error).__name__
    request.record(CHUNK, ended.begun, ended.begun + ended.seconds, attributes, error)


class EngineThread(Generic[RequestT, MessageT]):
    """The thread that runs an engine; no other thread touches its memory state.

    Args:
        engine: what to run.
        inbox: where its messages come from.
        on_failure: called once, on the thread, if the engine must give up.
    """

    def __init__(
        self,
        engine: Engine[RequestT, MessageT],
        inbox: Inbox[EngineMessage[RequestT, MessageT]],
        on_failure: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._inbox = inbox
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """End every request, wait for the running forward, audit the memory, and end the thread.

        Gives up a forward that has not ended after `seconds`: its pages stay as they are.
        """
        self._inbox.post(Stop())
        if not ended_within(self._thread, seconds):
            logger.error("the engine has waited for the forward that runs for %g s", seconds)

    def _run(self) -> None:
        try:
            while not self._engine.stopped:
                self._engine.run_pass(self._inbox.take_all())
        except Exception as error:
            logger.exception("the engine gives up")
            self._on_failure(f"{type(error).__name__}: {error}")
