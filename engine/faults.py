"""Faults on demand, for tests and drills: `kvrelay serve --debug-faults`. Off unless asked for.

::

    [WORKER/]ACTION:WHERE[@REQUEST][:N][:SECONDSs][:always]

    delay:pull:3:0.5s             the third read of pages begins half a second late
    drop:done                     the first `Done` is never sent
    corrupt:pull                  a bit of the first read flips: see `--verify-pages`
    prefill-0/kill:announced:2    that worker dies when it announces its second request
    decode-1/stop:pulling:5s      that worker stands still for five seconds
    hang:forward                  the first forward never ends
    fail:forward@mine:always      every forward that computes the request `mine` fails
    lose:decoding                 a page is lost when the first request begins to generate
    poison:forward                the first forward fails as if the device were broken
    crash:forward                 the first forward ends the process by a segmentation fault

Each fault happens once, or always from the N-th time on, in a worker's first life.

The hooks are few: the outbox (hand-over messages), the transfer agent (reads), the copies between
device and host, and the executor (forwards). `engine.worker.faulty` has them. The roles call
`FaultPlan.reach` where a request enters a phase.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvrelay.engine.phases import Phase

logger = logging.getLogger(__name__)


class FaultAction(StrEnum):
    """The kinds of fault."""

    DELAY = "delay"
    """The event comes late, and everything behind it on its stream."""
    DROP = "drop"
    """The event never comes; for a read: its end is never reported."""
    DUPLICATE = "duplicate"
    """The event comes twice; for a read: its end."""
    FAIL = "fail"
    """The event's stream breaks instead; a read or a forward ends in an error."""
    CORRUPT = "corrupt"
    """For reads only: one bit of the data is flipped."""
    HANG = "hang"
    """For forwards only: it never ends, unless other faults are armed."""
    POISON = "poison"
    """For forwards only: it ends in the error of a broken device."""
    CRASH = "crash"
    """For forwards only: a segmentation fault ends the process."""
    STOP = "stop"
    """The process stands still, for good if no time is given."""
    KILL = "kill"
    """The process dies."""
    LOSE = "lose"
    """A free page is lost: the account of memory is wrong from then on."""


class FaultEvent(StrEnum):
    """Events that a fault can delay, drop, duplicate, corrupt or fail."""

    ASK = "ask"
    GRANT = "grant"
    ANNOUNCE = "announce"
    DONE = "done"
    RELEASED = "released"
    ENDED = "ended"
    HELD = "held"
    BEGUN = "begun"
    PULL = "pull"
    """A read of pages."""
    FORWARD = "forward"
    """A step that computes anything."""


_TO_WORKERS = frozenset({FaultAction.STOP, FaultAction.KILL, FaultAction.LOSE})
_TIMED = frozenset({FaultAction.DELAY, FaultAction.STOP})
_TO_FORWARDS_ALONE = frozenset({FaultAction.HANG, FaultAction.POISON, FaultAction.CRASH})
_TO_FORWARDS = _TO_FORWARDS_ALONE | {FaultAction.DELAY, FaultAction.FAIL}


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong, once or always."""

    action: FaultAction
    where: FaultEvent | Phase
    nth: int = 1
    """The occurrence that fails, counted from 1 on each worker by itself."""
    seconds: float = 0.0
    worker: str = ""
    """The worker that the fault is for; empty: every worker."""
    peer: str = ""
    """For phases: only requests shared with this incarnation count; empty: all."""
    request: str = ""
    """For forwards: only those that compute this request count; empty: all."""
    always: bool = False
    """For forwards: every one from the n-th on fails."""
    pid: int = 0
    """The process that is stopped or killed; 0: the worker's own."""


_SPEC = re.compile(
    r"(?:(?P<worker>[\w-]+)/)?(?P<action>\w+):(?P<where>\w+)(?:@(?P<request>[\w.-]+))?"
    r"(?::(?P<nth>\d+))?(?::(?P<seconds>\d+(?:\.\d*)?)s)?(?P<always>:always)?"
)


def parse_faults(specs: str) -> tuple[Fault, ...]:
    """Parse fault specs that are separated by commas.

    Raises:
        ValueError: a spec is wrong; the message is one line that names it.
    """
    return tuple(_parse_fault(one.strip()) for one in specs.split(",") if one.strip())


def _parse_fault(spec: str) -> Fault:
    match = _SPEC.fullmatch(spec)
    if match is None:
        form = "[WORKER/]ACTION:WHERE[@REQUEST][:N][:SECONDSs][:always]"
        raise ValueError(f"{spec!r} is not {form}")
    action = _choose(spec, match["action"], FaultAction)
    where: type[FaultEvent] | type[Phase] = Phase if action in _TO_WORKERS else FaultEvent
    fault = Fault(
        action,
        _choose(spec, match["where"], where),
        nth=int(match["nth"] or 1),
        seconds=float(match["seconds"] or 0),
        worker=match["worker"] or "",
        request=match["request"] or "",
        always=match["always"] is not None,
    )
    _check(spec, fault)
    return fault


def _check(spec: str, fault: Fault) -> None:
    """Raise ValueError unless the parts of a fault go together."""
    action, forward = fault.action, fault.where is FaultEvent.FORWARD
    if fault.nth < 1:
        raise ValueError(f"{spec!r}: they are counted from 1")
    if fault.seconds and action not in _TIMED:
        raise ValueError(f"{spec!r}: {action} takes no time")
    if action is FaultAction.CORRUPT and fault.where is not FaultEvent.PULL:
        raise ValueError(f"{spec!r}: only a pull can be corrupted")
    if action is FaultAction.DELAY and not fault.seconds:
        raise ValueError(f"{spec!r}: by how much? e.g. {spec}:0.5s")
    if forward and action not in _TO_FORWARDS:
        raise ValueError(f"{spec!r}: a forward can {', '.join(sorted(_TO_FORWARDS))}")
    if not forward and (action in _TO_FORWARDS_ALONE or fault.request or fault.always):
        raise ValueError(f"{spec!r}: only a forward can {action}, be of a request, or fail always")


def _choose(spec: str, value: str, kind: type[Any]) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise ValueError(
            f"{spec!r}: {value} is none of {', '.join(one.value for one in kind)}"
        ) from None


class FaultPlan:
    """The faults that are yet to happen on one worker; without any it does nothing.

    Its methods may be called from any thread.
    """

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self.fired = 0
        """Faults that have happened."""
        self.lose_page: Callable[[], object] = lambda: None
        """Loses one of the worker's pages; called on the engine thread."""
        self._armed: tuple[Fault, ...] = tuple(faults)
        self._lock = threading.Lock()
        self._rearmed = threading.Event()

    def arm(self, faults: Sequence[Fault]) -> None:
        """Replace whatever has not happened yet."""
        with self._lock:
            self.fired = 0
            self._armed = tuple(faults)
            self._rearmed.set()
            self._rearmed = threading.Event()

    def hang(self) -> None:
        """Do not return before other faults are armed."""
        with self._lock:
            rearmed = self._rearmed
        rearmed.wait()

    def reach(self, phase: Phase, peer: str = "") -> None:
        """Note that a request, shared with `peer`, enters `phase` here. May not return."""
        if not self._armed:
            return
        fault = self.take(phase, peer)
        if fault is None:
            return
        if fault.action is FaultAction.LOSE:
            self.lose_page()
        else:
            _strike(fault)

    def take(
        self, where: FaultEvent | Phase, peer: str = "", requests: Container[str] = ()
    ) -> Fault | None:
        """Count one more event or phase, and return the fault that strikes it, if any.

        Args:
            where: the event or phase.
            peer: the incarnation that a phase's request is shared with.
            requests: the ids of those that a forward computes.
        """
        with self._lock:
            due = self._take(where, peer, requests)
        if due is not None:
            logger.warning("fault: %s", due)
        return due

    def _take(self, where: FaultEvent | Phase, peer: str, requests: Container[str]) -> Fault | None:
        left: list[Fault] = []
        due: Fault | None = None
        for fault in self._armed:
            if (
                fault.where is not where
                or fault.peer not in ("", peer)
                or (fault.request and fault.request not in requests)
            ):
                left.append(fault)
            elif fault.nth > 1:
                left.append(dataclasses.replace(fault, nth=fault.nth - 1))
            elif due is not None:
                left.append(fault)
            else:
                due = fault
                left += [fault] * fault.always
        self._armed = tuple(left)
        if due is not None:
            self.fired += 1
        return due


def _strike(fault: Fault) -> None:
    """Stop or kill the process that the fault is for."""
    own = os.getpid()
    pid = fault.pid or own
    stop = fault.action is FaultAction.STOP
    if stop and fault.seconds and pid == own:
        # A stopped process cannot wake itself up.
        wake = f"import os, time; time.sleep({fault.seconds}); os.kill({own}, {signal.SIGCONT:d})"
        subprocess.Popen([sys.executable, "-S", "-c", wake])  # noqa: S603 (nothing from outside)
    elif stop and fault.seconds:
        threading.Timer(fault.seconds, _signal, (pid, signal.SIGCONT)).start()
    _signal(pid, signal.SIGSTOP if stop else signal.SIGKILL)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        logger.warning("fault: process %d is gone already", pid)
