"""One try at some choices of a request, on the workers that it was placed on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Set
from typing import Protocol

from kvrelay.router.discovery import WorkerEndpoint, WorkerRole
from kvrelay.router.errors import InternalFailure, Unavailable
from kvrelay.router.fleet import Placement
from kvrelay.router.generation import Submission
from kvrelay.router.live_request import LiveRequest
from kvrelay.router.worker_output import EndReason, FailureReason, WorkerEnd, WorkerOutput

_log = logging.getLogger(__name__)

_COMPLETING = {EndReason.STOP, EndReason.LENGTH}
_LEAVING = {
    FailureReason.WORKER_LOST,
    FailureReason.PEER_LOST,
    FailureReason.PEER_FAILED,
    FailureReason.ABORTED,
}
"""What may come of it that a worker drains."""


class Keeper(Protocol):
    """Whoever made an attempt, and makes others where it ends early."""

    def retracted(self, choices: Set[int], detail: str) -> None:
        """These gave way to others, or a worker drains; they are no part of the attempt any more.

        There is one at least.
        """
        ...

    def failed(
        self, choices: Set[int], error: Unavailable, reason: FailureReason, suspects: Set[str]
    ) -> None:
        """The attempt is over, and these choices, at least one, had not ended.

        The reason lies with one of the suspects, incarnations of workers.
        """
        ...

    def stale(self) -> None:
        """Tokens came for a choice that is no part of the attempt any more; they were dropped."""
        ...


class Attempt:
    """Carries what the workers say of one attempt to its request.

    For each choice:

    ========== =========== ==========================================
    from       end         means
    ========== =========== ==========================================
    any        stop,       the choice is complete once every token
               length      before the end is here
    prefill    handed over the decode side goes on
    decode     retracted   another attempt is to go on, once prefill
                           has had its word: its first token is kept
    prefill    retracted   another attempt is to go on, for every choice
    decode     aborted     prefill has the say: it may have completed
                           the choice and ended the hand-over, and
                           its word is still on the way
    any        aborted,    else the attempt is over, for every choice
               failed
    ========== =========== ==========================================

    An aggregated worker is a decode worker whose prefill has had its word. If a
    worker drains, it retracts what another attempt may complete, whoever was
    the first to say that this one is over; what no drain explains is a failure
    then, too. A request that has its outcome ignores the rest.
    """

    def __init__(
        self, submission: Submission, placement: Placement, live: LiveRequest, keeper: Keeper
    ) -> None:
        self._placement = placement
        self._submission = submission
        self._live = live
        self._keeper = keeper
        self._open = set(submission.choices)
        self._awaits_prefill = set(submission.choices if placement.prefill else ())
        self._decode_gave_up: dict[int, WorkerEnd] = {}

    @property
    def over(self) -> bool:
        """None of its choices is worked on any more."""
        return not self._open

    def submit(self) -> None:
        """Sends it to its workers."""
        decode, prefill = self._placement.decode, self._placement.prefill
        if prefill is None:
            decode.submit(self._submission, self)
        else:
            decode.submit(self._submission, self, prefill=prefill.endpoint)
            prefill.submit(self._submission, self)

    def release(self) -> None:
        """Cancels it wherever it has not ended."""
        self._open.clear()
        for link in self._placement.links:
            link.cancel(self._submission.request_id, self._submission.attempt)

    def on_output(self, role: WorkerRole, output: WorkerOutput) -> None:
        """See `Listener`."""
        if self._live.outcome is not None:
            return
        with self._failing_alone():
            if output.choice in self._open:
                self._take(role, output)
            elif output.tokens:
                self._keeper.stale()

    def on_lost(self, endpoint: WorkerEndpoint, detail: str) -> None:
        """See `Listener`."""
        lost = Unavailable(f"worker {endpoint.worker} was lost: {detail}")
        with self._failing_alone():
            self._fail(lost, FailureReason.WORKER_LOST, {endpoint.incarnation})

    @contextlib.contextmanager
    def _failing_alone(self) -> Iterator[None]:
        """Whatever goes wrong within fails this request and no other."""
        try:
            yield
        except Exception as error:
            _log.exception("request %s", self._submission.request_id)
            self._live.fail(InternalFailure(f"router: {error}"))

    def _take(self, role: WorkerRole, output: WorkerOutput) -> None:
        choice, end = output.choice, output.end
        self._live.take(output, end if end and end.reason in _COMPLETING else None)
        if self._live.choices[choice].ended is not None:
            self._leave(choice)
        elif end is not None:
            self._take_end(role, choice, end)

    def _take_end(self, role: WorkerRole, choice: int, end: WorkerEnd) -> None:
        if role is WorkerRole.PREFILL:
            self._awaits_prefill.discard(choice)
            if end.reason in (EndReason.ABORTED, EndReason.RETRACTED, EndReason.FAILED):
                self._fail_by(role, end)
                return
        elif end.reason is EndReason.FAILED:
            self._fail_by(role, end)
            return
        elif end.reason in (EndReason.ABORTED, EndReason.RETRACTED):
            self._decode_gave_up[choice] = end
        gave_up = self._decode_gave_up.get(choice)
        if gave_up is None:
            return
        if choice in self._awaits_prefill:
            self._hurry_prefill(gave_up)
        elif gave_up.reason is EndReason.RETRACTED:
            self._leave(choice)
            self._keeper.retracted({choice}, self._say(WorkerRole.DECODE, gave_up))
        else:
            self._fail_by(WorkerRole.DECODE, gave_up)

    def _hurry_prefill(self, gave_up: WorkerEnd) -> None:
        """A decode worker that drains may never take the prompt over: nothing else would end it."""
        prefill, decode = self._placement.prefill, self._placement.decode
        if prefill is not None and decode.draining and gave_up.reason is EndReason.RETRACTED:
            prefill.give_up(self._submission.request_id, self._submission.attempt)

    def _leave(self, choice: int) -> None:
        """The choice is no part of the attempt any more; without any, neither are the workers."""
        self._open.discard(choice)
        if not self._open:
            self.release()

    def _fail_by(self, role: WorkerRole, end: WorkerEnd) -> None:
        text = self._say(role, end)
        if end.reason is EndReason.RETRACTED:
            self._retract(text)
        elif end.retryable or end.reason is EndReason.ABORTED:
            suspects = {link.endpoint.incarnation for link in self._placement.links}
            said = FailureReason.ABORTED if end.reason is EndReason.ABORTED else end.cause
            self._fail(Unavailable(text), said or FailureReason.FAILED, suspects)
        else:
            self._live.fail(InternalFailure(text))

    def _fail(self, error: Unavailable, reason: FailureReason, suspects: Set[str]) -> None:
        """Over for every choice; nobody is to blame if that is because a worker is leaving."""
        if reason in _LEAVING and any(link.draining for link in self._placement.links):
            self._retract(str(error))
            return
        choices = self._end_all()
        if choices:
            self._keeper.failed(choices, error, reason, suspects)

    def _retract(self, detail: str) -> None:
        choices = self._end_all()
        if choices:
            self._keeper.retracted(choices, detail)

    def _end_all(self) -> frozenset[int]:
        """Give up all that is open; the choices that another attempt is to go on with."""
        choices = frozenset(self._open)
        self.release()
        return choices if self._live.outcome is None else frozenset()

    def _say(self, role: WorkerRole, end: WorkerEnd) -> str:
        prefill = self._placement.prefill
        link = prefill if prefill and role is WorkerRole.PREFILL else self._placement.decode
        return f"{link.endpoint.worker}: {end.error or end.reason}"
