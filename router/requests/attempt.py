"""One attempt at some choices of a request, on the workers that it was placed on.

An attempt sends commands to its workers and knows nobody else. Its owner, a `LiveRequest`, passes
it the workers' reports. It returns a verdict when a report ends the attempt for some choices.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from kvrelay.router.errors import InternalFailure, InvalidField, Unavailable
from kvrelay.router.generation import Submission
from kvrelay.router.placement.fleet import Placement
from kvrelay.router.placement.worker_link import FORWARD_FAILURES, AttemptListener, WorkerLink
from kvrelay.router.requests.attempt_transitions import (
    TRANSITIONS,
    AttemptAction,
    ChoicePhase,
    ChoiceReport,
)
from kvrelay.wire.output import EndReason, FailureReason, RequestEnd
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole

_EXPLAINED_BY_A_DRAIN = {
    FailureReason.WORKER_LOST,
    FailureReason.PEER_LOST,
    FailureReason.PEER_FAILED,
    FailureReason.ABORTED,
}
"""Reasons that are no failures if a worker of the attempt drains: the attempt is retracted."""


@dataclass(frozen=True, slots=True)
class AttemptRetracted:
    """An attempt that left these choices, at least one, to another attempt.

    Their memory went to other requests, or a worker drains. It does not count as a failure of the
    request.
    """

    choices: Set[int]
    detail: str
    """The worker that ended it, and why."""


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """An attempt that is over with these choices, at least one, incomplete."""

    choices: Set[int]
    error: Unavailable
    reason: FailureReason
    suspects: Set[str]
    """Incarnations of the workers, one of which is to blame."""
    culprit: WorkerRole | None = None
    """The role whose forward failed, or whose worker was lost, perhaps by a forward."""
    prompt_by: WorkerRole | None = None
    """The role that was to compute the prompt."""


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A verdict that the request fails: another attempt would fail the same way."""

    error: InternalFailure | InvalidField


Verdict = AttemptRetracted | AttemptFailed | RequestFailed


class Attempt:
    """One attempt on its workers, and the verdicts on their reports, by `TRANSITIONS`."""

    def __init__(self, submission: Submission, placement: Placement) -> None:
        self._submission = submission
        self._placement = placement
        first = ChoicePhase.DECODING if placement.prefill is None else ChoicePhase.PREFILLING
        self._phases = dict.fromkeys(submission.choices, first)
        self._decode_gave_up: dict[int, RequestEnd] = {}  # while prefill's end is awaited

    @property
    def number(self) -> int:
        """The attempt's number among all attempts of the router."""
        return self._submission.attempt

    @property
    def open_choices(self) -> frozenset[int]:
        """The choices that the attempt still works on."""
        return frozenset(c for c, phase in self._phases.items() if phase is not ChoicePhase.ENDED)

    def works_on(self, choice: int) -> bool:
        """Whether this choice is part of the attempt, and has not ended in it."""
        return self._phases.get(choice, ChoicePhase.ENDED) is not ChoicePhase.ENDED

    def submit(self, listener: AttemptListener) -> None:
        """Submit the attempt to its workers; `listener` hears their reports."""
        decode, prefill = self._placement.decode, self._placement.prefill
        if prefill is None:
            decode.submit(self._submission, listener)
        else:
            decode.submit(self._submission, listener, prefill=prefill.endpoint)
            prefill.submit(self._submission, listener, lent_tokens=self._placement.lent_tokens)

    def cancel(self) -> None:
        """End the attempt for all choices, on every worker where it has not ended."""
        self._phases = dict.fromkeys(self._phases, ChoicePhase.ENDED)
        for link in self._placement.links:
            link.cancel(self._submission.request_id, self._submission.attempt)

    def end_choice(self, choice: int) -> None:
        """End a choice that is complete or leaves the attempt; with the last, tell the workers."""
        self._phases[choice] = ChoicePhase.ENDED
        if not self.open_choices:
            self.cancel()

    def on_end(self, role: WorkerRole, choice: int, end: RequestEnd) -> Verdict | None:
        """Take a worker's end of an incomplete open choice; None: the attempt goes on."""
        side = WorkerRole.PREFILL if role is WorkerRole.PREFILL else WorkerRole.DECODE
        report = ChoiceReport.of(end)
        action, phase = TRANSITIONS[self._phases[choice]][side, report]
        if report in (ChoiceReport.COMPLETE, ChoiceReport.HANDED_OVER):
            earlier = self._decode_gave_up.get(choice)
            if earlier is not None:  # decode's earlier end is the cause
                side, end = WorkerRole.DECODE, earlier
        elif side is WorkerRole.DECODE:
            self._decode_gave_up[choice] = end
        return self._act(action, phase, side, choice, end)

    def on_lost(self, endpoint: WorkerInfo, detail: str) -> Verdict | None:
        """Take the loss of a worker, whose link has dropped the attempt; None: it was over."""
        if not self.open_choices:
            return None
        lost = Unavailable(f"worker {endpoint.name} was lost: {detail}")
        reason = FailureReason.WORKER_LOST
        return self._fail(lost, reason, {endpoint.incarnation}, endpoint.role)

    def _act(
        self,
        action: AttemptAction,
        phase: ChoicePhase,
        side: WorkerRole,
        choice: int,
        end: RequestEnd,
    ) -> Verdict | None:
        """Do what the table says; `end`, reported by `side`, is the reason."""
        detail = self._describe(side, end)
        match action:
            case AttemptAction.RETRACT_CHOICE:
                self.end_choice(choice)
                return AttemptRetracted({choice}, detail)
            case AttemptAction.RETRACT_ATTEMPT:
                return AttemptRetracted(self._end_all(), detail)
            case AttemptAction.FAIL_ATTEMPT:
                return self._fail_with(side, end, detail)
            case AttemptAction.FAIL_REQUEST:
                self.cancel()
                if end.cause is FailureReason.GRAMMAR_FAILED:
                    sampling = self._submission.request.params.sampling
                    field = "structured_output"
                    if sampling.structured_output is None:
                        has_rules = sampling.has_token_rules
                        field = "allowed_token_ids" if has_rules else "thinking_token_budget"
                    return RequestFailed(InvalidField(field, end.error))
                return RequestFailed(InternalFailure(detail))
            case AttemptAction.AWAIT_PREFILL:
                self._hurry_prefill(end)
        self._phases[choice] = phase
        return None

    def _hurry_prefill(self, end: RequestEnd) -> None:
        """Ask prefill to end if decode drains, because decode will never take over the prompt."""
        prefill, decode = self._placement.prefill, self._placement.decode
        if prefill is not None and decode.draining and end.reason is EndReason.RETRACTED:
            prefill.ask_to_end(self._submission.request_id, self._submission.attempt)

    def _fail_with(self, side: WorkerRole, end: RequestEnd, detail: str) -> Verdict:
        aborted = end.reason is EndReason.ABORTED
        reason = FailureReason.ABORTED if aborted else end.cause or FailureReason.FAILED
        if reason in FORWARD_FAILURES:  # no other worker can cause these
            own = self._link_of(side).endpoint
            return self._fail(Unavailable(detail), reason, {own.incarnation}, own.role)
        suspects = {link.endpoint.incarnation for link in self._placement.links}
        return self._fail(Unavailable(detail), reason, suspects)

    def _fail(
        self,
        error: Unavailable,
        reason: FailureReason,
        suspects: Set[str],
        culprit: WorkerRole | None = None,
    ) -> Verdict:
        draining = any(link.draining for link in self._placement.links)
        choices = self._end_all()
        if draining and reason in _EXPLAINED_BY_A_DRAIN:
            return AttemptRetracted(choices, str(error))
        prompt_by = self._placement.computes_prompt.endpoint.role
        return AttemptFailed(choices, error, reason, suspects, culprit, prompt_by)

    def _end_all(self) -> frozenset[int]:
        """Cancel the attempt; return the choices that were open."""
        choices = self.open_choices
        self.cancel()
        return choices

    def _describe(self, side: WorkerRole, end: RequestEnd) -> str:
        return f"{self._link_of(side).endpoint.name}: {end.error or end.reason}"

    def _link_of(self, side: WorkerRole) -> WorkerLink:
        prefill = self._placement.prefill
        return prefill if prefill and side is WorkerRole.PREFILL else self._placement.decode
