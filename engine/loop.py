"""The one loop that all roles run in.

::

    drain the inbox (a forward's end is one of the messages: role.settled())
    -> ledger.reclaim() -> role.admit() -> role.schedule() -> launch -> audit -> emit

The engine thread runs it and alone touches memory state. The forward runs on a
thread of its own, so that messages are answered while it computes. Whatever
changes the state arrives as a message, so a pass begins by waiting for one.

With overlap a step is planned and launched while the one before it computes, so
that the forward thread never waits for a plan. What the plan cannot know, which
tokens the step before has sampled, the forward thread reads from the `Tape`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from kvrelay.engine.commands import (
    Attach,
    Cancel,
    Detach,
    Drain,
    Dropped,
    GiveBack,
    Inbox,
    Inspect,
    Misdirected,
    Stop,
    Submit,
    Wake,
)
from kvrelay.engine.core import EngineCore
from kvrelay.engine.faults import Phase
from kvrelay.engine.outputs import Load
from kvrelay.engine.request import Request
from kvrelay.engine.step import Computed, Scheduled, Step, StepEnded, plan_step
from kvrelay.mem_cache.errors import ConservationError

logger = logging.getLogger(__name__)


class Role(Protocol):
    """What a worker does with its requests. Called on the engine thread, must not block."""

    def submit(self, command: Submit) -> None:
        """A new request."""
        ...

    def cancel(self, command: Cancel) -> None:
        """End a request, if it still lives."""
        ...

    def handle(self, message: object) -> None:
        """A message of the role's own kind."""
        ...

    def admit(self) -> None:
        """Let in what memory has room for; every pass, also while a forward runs."""
        ...

    def schedule(self) -> Sequence[Scheduled]:
        """What the next forward computes; room for it is reserved. Empty: nothing."""
        ...

    def settled(self, item: Scheduled, computed: Computed) -> None:
        """A request's part of a forward has ended."""
        ...

    def failed(self, request: Request, error: Exception) -> None:
        """A forward, or this request's part of one, has failed: it cannot go on."""
        ...

    def hand_back(self) -> None:
        """Retract every request that loses little by going on elsewhere: the worker drains."""
        ...

    def load(self) -> Load:
        """How much there is to do."""
        ...


class Launcher(Protocol):
    """Computes steps; each one's end comes back as a `StepEnded` message."""

    def launch(self, step: Step) -> None:
        """Compute a step after those launched before it. Does not block."""
        ...


class Engine:
    """Runs a role, pass by pass, without any thread of its own.

    Args:
        core: the memory, requests and outputs it works on.
        role: decides what to compute and what to make of it.
        launcher: computes it.
        overlap: plan a step while the one before it computes.
        audit_pages: check every page after every pass, not the sums alone.
    """

    def __init__(
        self,
        core: EngineCore,
        role: Role,
        launcher: Launcher,
        *,
        overlap: bool,
        audit_pages: bool,
    ) -> None:
        self._core = core
        self._role = role
        self._launcher = launcher
        self._audit = core.ledger.audit_pages if audit_pages else core.ledger.audit
        self._most_running = 2 if overlap else 1
        self._stopping = False
        self._on_drained: list[Callable[[], object]] = []

    @property
    def stopped(self) -> bool:
        """It was told to stop, every request has ended, and no forward runs."""
        return self._stopping and not self._core.steps.running

    def turn(self, messages: Iterable[object]) -> None:
        """One pass of the loop.

        Raises:
            ConservationError: memory was lost or is owned twice: the engine must stop.
        """
        try:
            self._pass(messages)
        except ConservationError:
            self._core.metrics.count_audit_failure()
            raise

    def _pass(self, messages: Iterable[object]) -> None:
        for message in messages:
            self._handle(message)
        self._core.ledger.reclaim()
        if not self._stopping:
            self._work()
        self._audit()
        load = replace(self._role.load(), draining=self._core.draining)
        ledger = self._core.ledger
        self._core.metrics.publish(load, ledger.quarantined_since, ledger.cache_counts)
        self._core.flush(load)
        self._tell_if_drained()

    def _tell_if_drained(self) -> None:
        """After the last outputs are on their way; memory may still be fenced by dead peers."""
        if self._on_drained and not self._core.requests and not self._core.steps.running:
            on_drained, self._on_drained = self._on_drained, []
            for tell in on_drained:
                tell()

    def _work(self) -> None:
        """Let requests in and launch what can be; again if that has made room for others."""
        ledger = self._core.ledger
        while True:
            self._role.admit()
            room = ledger.room_version
            while self._core.steps.running < self._most_running and self._launch():
                pass
            if ledger.room_version == room:
                return

    def _launch(self) -> bool:
        """Plan the next forward and hand it over; `False` if there is nothing to compute."""
        scheduled, copies = self._role.schedule(), self._core.take_copies()
        if not scheduled and not copies:
            return False
        step = plan_step(self._core.steps.launch(), scheduled, copies, self._core.ledger)
        self._launcher.launch(step)
        return True

    def _settle(self, ended: StepEnded) -> None:
        self._core.steps.settle()
        if ended.error is not None:
            self._core.metrics.count_failed_step()
            logger.error("a forward failed", exc_info=ended.error)
        elif ended.num_tokens:
            self._core.count_step(ended)
        scheduled = ended.step.scheduled
        failed = [Computed(error=ended.error)] * len(scheduled)
        for item, computed in zip(scheduled, ended.computed or failed, strict=True):
            if item.request.has_ended:
                continue
            if computed.error is None or computed.tokens:
                self._role.settled(item, computed)
            if computed.error is not None and not item.request.has_ended:
                self._role.failed(item.request, computed.error)

    def _handle(self, message: object) -> None:
        match message:
            case StepEnded():
                self._settle(message)
            case Submit():
                self._submit(message)
            case Cancel():
                self._abort(message)
            case Misdirected():
                self._core.metrics.count_dropped(Dropped.INCARNATION)
            case Attach():
                self._core.attach(message.link)
            case Detach():
                self._detach(message)
            case Wake():
                pass
            case Inspect():
                message.look(self._core.ledger)
            case Drain():
                self._core.draining = True
                self._on_drained.append(message.on_drained)
                self._core.faults.reach(Phase.DRAINING)
            case GiveBack():
                self._role.hand_back()
            case Stop():
                self._stopping = True
                self._cancel(list(self._core.requests.values()))
            case _:
                self._role.handle(message)

    def _submit(self, command: Submit) -> None:
        if self._core.draining:
            self._core.turn_away(command)
        else:
            self._role.submit(command)

    def _abort(self, command: Cancel) -> None:
        if not self._core.choices_of(command.key):
            self._core.metrics.count_dropped(Dropped.CANCEL)
        self._role.cancel(command)

    def _detach(self, message: Detach) -> None:
        self._core.links.remove(message.link)
        requests = self._core.requests.values()
        self._cancel([request for request in requests if request.link is message.link])

    def _cancel(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._role.cancel(Cancel(request.key))


class EngineThread:
    """The thread that runs an engine, and alone touches its memory state.

    Args:
        engine: what to run.
        inbox: where its messages come from.
        on_failure: called once, on the thread, if the engine must give up.
    """

    def __init__(self, engine: Engine, inbox: Inbox, on_failure: Callable[[str], None]) -> None:
        self._engine = engine
        self._inbox = inbox
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End every request, wait for the forward that runs, check the account and end."""
        self._inbox.post(Stop())
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._engine.stopped:
                self._engine.turn(self._inbox.drain())
        except Exception as error:
            logger.exception("the engine gives up")
            self._on_failure(f"{type(error).__name__}: {error}")
