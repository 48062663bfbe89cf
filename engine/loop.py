"""The one loop that both roles run in.

::

    drain the inbox (a forward's end is one of the messages: role.settled())
    -> ledger.reclaim() -> role.admit() -> role.schedule() -> launch -> audit -> emit

The engine thread runs it and alone touches memory state. The forward runs on a
thread of its own, so that messages are answered while it computes. Whatever
changes the state arrives as a message, so a pass begins by waiting for one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from kvrelay.engine.commands import Attach, Cancel, Detach, Inbox, Stop, Submit, Wake
from kvrelay.engine.core import EngineCore
from kvrelay.engine.outputs import Load
from kvrelay.engine.step import Computer, ForwardThread, Scheduled, StepEnded, plan_step
from kvrelay.model_runner.sampler import SampledToken

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

    def settled(
        self, scheduled: Sequence[Scheduled], tokens: Sequence[SampledToken | None]
    ) -> None:
        """A forward has ended. Requests that ended meanwhile are the role's to skip."""
        ...

    def load(self) -> Load:
        """How much there is to do."""
        ...


class Engine:
    """Runs a role.

    Args:
        core: the memory, requests and outputs it works on.
        role: decides what to compute and what to make of it.
        computer: computes it.
        audit_pages: check every page after every pass, not the sums alone.
        on_failure: called once, on the engine thread, if the loop must give up.
    """

    def __init__(
        self,
        core: EngineCore,
        role: Role,
        computer: Computer,
        inbox: Inbox,
        *,
        audit_pages: bool,
        on_failure: Callable[[str], None],
    ) -> None:
        self._core = core
        self._role = role
        self._inbox = inbox
        self._audit = core.ledger.audit_pages if audit_pages else core.ledger.audit
        self._on_failure = on_failure
        self._forward = ForwardThread(computer, inbox.post)
        self._computing = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin the loop on its thread."""
        self._thread.start()

    def close(self) -> None:
        """End the loop: what runs is finished, what waits is given back."""
        self._inbox.post(Stop())
        self._thread.join()
        self._forward.close()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._pass()
        except Exception as error:
            logger.exception("the engine gives up")
            self._on_failure(f"{type(error).__name__}: {error}")

    def _pass(self) -> None:
        for message in self._inbox.drain():
            self._handle(message)
        self._core.ledger.reclaim()
        self._role.admit()
        if not self._computing:
            self._launch()
        self._audit()
        load = self._role.load()
        self._core.metrics.publish(load, self._core.ledger.quarantine_age())
        self._core.flush(load)

    def _launch(self) -> None:
        """Start the next forward, if there is anything to compute."""
        scheduled = self._role.schedule()
        if not scheduled:
            return
        step = plan_step(self._core.steps.launch(), scheduled, self._core.ledger)
        self._computing = True
        self._forward.launch(step)

    def _settle(self, ended: StepEnded) -> None:
        self._core.steps.settle()
        self._computing = False
        if ended.error is not None:
            raise ended.error
        self._core.metrics.count_step(len(ended.step.batch.input_ids), ended.seconds)
        self._role.settled(ended.step.scheduled, ended.tokens)

    def _handle(self, message: object) -> None:
        match message:
            case StepEnded():
                self._settle(message)
            case Submit():
                self._role.submit(message)
            case Cancel():
                self._role.cancel(message)
            case Attach():
                self._core.attach(message.link)
            case Detach():
                self._detach(message)
            case Stop():
                self._stopping = True
            case Wake():
                pass
            case _:
                self._role.handle(message)

    def _detach(self, message: Detach) -> None:
        self._core.links.remove(message.link)
        for request in [r for r in self._core.requests.values() if r.link is message.link]:
            self._role.cancel(Cancel(request.key))
