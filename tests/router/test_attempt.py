"""What an attempt does about every end that a worker can report: the whole table."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kvrelay.router.admission.seeds import Seeds
from kvrelay.router.admission.validation import Validator
from kvrelay.router.errors import InvalidField
from kvrelay.router.generation import Submission
from kvrelay.router.placement.fleet import Placement
from kvrelay.router.placement.limits import RequestLimits
from kvrelay.router.requests.attempt import (
    Attempt,
    AttemptFailed,
    AttemptRetracted,
    RequestFailed,
    Verdict,
)
from kvrelay.router.requests.attempt_transitions import (
    TRANSITIONS,
    AttemptAction,
    ChoicePhase,
    ChoiceReport,
)
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.wire.output import EndReason, FailureReason, RequestEnd
from kvrelay.wire.worker_info import WorkerRole
from tests.pairwise import whole

from .recorded_link import RecordedLink

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
SIDES = (PREFILL, DECODE)
OPEN_PHASES = [phase for phase in ChoicePhase if phase is not ChoicePhase.ENDED]
EVERY_ROW = whole(phase=OPEN_PHASES, side=SIDES, report=ChoiceReport)
"""Of `TRANSITIONS`."""
ENDS = {
    ChoiceReport.COMPLETE: RequestEnd(EndReason.STOP),
    ChoiceReport.HANDED_OVER: RequestEnd(EndReason.HANDED_OVER),
    ChoiceReport.RETRACTED: RequestEnd(EndReason.RETRACTED),
    ChoiceReport.ABORTED: RequestEnd(EndReason.ABORTED),
    ChoiceReport.FAILED: RequestEnd(EndReason.FAILED, error="x", cause=FailureReason.READ_FAILED),
    ChoiceReport.FAILED_FOR_GOOD: RequestEnd(EndReason.FAILED, error="x"),
}
PATHS: dict[ChoicePhase, list[tuple[WorkerRole, ChoiceReport]]] = {
    ChoicePhase.PREFILLING: [],
    ChoicePhase.DECODING: [(PREFILL, ChoiceReport.HANDED_OVER)],
    ChoicePhase.DECODE_RETRACTED: [(DECODE, ChoiceReport.RETRACTED)],
    ChoicePhase.DECODE_ABORTED: [(DECODE, ChoiceReport.ABORTED)],
}
"""How a choice gets into each phase."""


class Tried:
    """An attempt at three choices on two recorded links; the first choice is what ends."""

    def __init__(
        self,
        phase: ChoicePhase = ChoicePhase.PREFILLING,
        *,
        draining: bool = False,
        **params: Any,
    ) -> None:
        self.prefill, self.decode = RecordedLink(PREFILL), RecordedLink(DECODE)
        self.decode.draining = draining
        message = pb.GenerateRequest(
            request_id="r", sampling_params=pb.SamplingParams(n=3, **params)
        )
        message.input_ids.ids.extend([1, 2, 3])
        validator = Validator("m", lambda text, most_tokens: [], 16, Seeds(b"key"))
        request = validator.validate(message, RequestLimits(402, 512, 512, 512))
        links: Any = (self.decode, self.prefill)
        self.attempt = Attempt(Submission.of(request, 7, range(3), 0.0), Placement(*links))
        for side, report in PATHS[phase]:
            assert self.report(side, report) is None
        self.prefill.asked_to_end.clear()

    def report(self, side: WorkerRole, report: ChoiceReport) -> Verdict | None:
        return self.attempt.on_end(side, 0, ENDS[report])

    @property
    def cancelled(self) -> bool:
        assert self.prefill.cancels == self.decode.cancels
        return bool(self.prefill.cancels)


def test_the_table_has_an_answer_to_everything() -> None:
    assert set(TRANSITIONS) == set(ChoicePhase)
    for phase in OPEN_PHASES:
        assert set(TRANSITIONS[phase]) == set(itertools.product(SIDES, ChoiceReport)), phase
    assert TRANSITIONS[ChoicePhase.ENDED] == {}


@pytest.mark.parametrize("reason", EndReason)
def test_every_end_is_a_report(reason: EndReason) -> None:
    assert ChoiceReport.of(RequestEnd(reason)) in ChoiceReport


@EVERY_ROW
def test_each_row_does_what_its_action_says(
    phase: ChoicePhase, side: WorkerRole, report: ChoiceReport
) -> None:
    action, after = TRANSITIONS[phase][side, report]
    tried = Tried(phase)
    verdict = tried.report(side, report)
    everything, first = {0, 1, 2}, {0}
    left = tried.attempt.open_choices
    match action:
        case AttemptAction.CONTINUE | AttemptAction.AWAIT_PREFILL:
            assert verdict is None
            assert after is not ChoicePhase.ENDED
            assert left == everything
        case AttemptAction.RETRACT_CHOICE:
            assert isinstance(verdict, AttemptRetracted)
            assert verdict.choices == first
            assert left == {1, 2}
        case AttemptAction.RETRACT_ATTEMPT:
            assert isinstance(verdict, AttemptRetracted)
            assert verdict.choices == everything
            assert not left
        case AttemptAction.FAIL_ATTEMPT:
            assert isinstance(verdict, AttemptFailed)
            assert verdict.choices == everything
            assert not left
            assert verdict.suspects == {"prefill-0-1", "decode-0-1"}
        case AttemptAction.FAIL_REQUEST:
            assert isinstance(verdict, RequestFailed)
            assert str(verdict.error) == f"{side}-0: x"
            assert left == set()
    assert tried.cancelled == (not left)
    assert (after is ChoicePhase.ENDED) == (verdict is not None)
    assert tried.prefill.asked_to_end == []


@EVERY_ROW
def test_each_row_leads_to_its_phase(
    phase: ChoicePhase, side: WorkerRole, report: ChoiceReport
) -> None:
    """Whatever comes next means the same as in an attempt that is in that phase already."""
    _, after = TRANSITIONS[phase][side, report]
    if after is ChoicePhase.ENDED:
        return
    for next_side, next_report in itertools.product(SIDES, ChoiceReport):
        tried, other = Tried(phase), Tried(after)
        tried.report(side, report)
        assert type(tried.report(next_side, next_report)) is type(
            other.report(next_side, next_report)
        )
        assert tried.attempt.open_choices == other.attempt.open_choices


@EVERY_ROW
def test_a_decode_worker_that_drains_ends_prefill_and_explains_an_abort(
    phase: ChoicePhase, side: WorkerRole, report: ChoiceReport
) -> None:
    """What it cannot explain is a failure none the less."""
    action, after = TRANSITIONS[phase][side, report]
    tried = Tried(phase, draining=True)
    verdict = tried.report(side, report)
    hurried = action is AttemptAction.AWAIT_PREFILL and after is ChoicePhase.DECODE_RETRACTED
    assert tried.prefill.asked_to_end == ([7] if hurried else [])
    if action is AttemptAction.FAIL_ATTEMPT:
        assert isinstance(verdict, AttemptFailed) == (report is ChoiceReport.FAILED)


@whole(
    order=[SIDES, SIDES[::-1]],
    prefill=ChoiceReport,
    decode=[
        ChoiceReport.RETRACTED,
        ChoiceReport.ABORTED,
        ChoiceReport.FAILED,
        ChoiceReport.FAILED_FOR_GOOD,
    ],
)
def test_no_choice_waits_once_both_sides_gave_their_ends(
    order: tuple[WorkerRole, ...], prefill: ChoiceReport, decode: ChoiceReport
) -> None:
    tried, ends = Tried(), {PREFILL: prefill, DECODE: decode}
    verdict = tried.report(order[0], ends[order[0]]) or tried.report(order[1], ends[order[1]])
    assert verdict is not None
    assert not tried.attempt.works_on(0)


@pytest.mark.parametrize("decode", [ChoiceReport.RETRACTED, ChoiceReport.ABORTED])
@pytest.mark.parametrize("prefill", [ChoiceReport.COMPLETE, ChoiceReport.HANDED_OVER])
def test_the_order_of_two_ends_changes_nothing(prefill: ChoiceReport, decode: ChoiceReport) -> None:
    """Also not who is named: decode's end is the reason."""
    verdicts = []
    for order in ([PREFILL, DECODE], [DECODE, PREFILL]):
        tried, said = Tried(), {PREFILL: prefill, DECODE: decode}
        for side in order:
            verdict = tried.report(side, said[side])
        verdicts.append(verdict)
    if isinstance(verdicts[0], AttemptRetracted):
        assert verdicts[0].detail == "decode-0: retracted"
        assert verdicts[0] == verdicts[1]
    else:
        one, other = verdicts
        assert isinstance(one, AttemptFailed)
        assert isinstance(other, AttemptFailed)
        assert str(one.error) == str(other.error) == "decode-0: aborted"
        assert one.reason is other.reason is FailureReason.ABORTED


@pytest.mark.parametrize(
    "cause", [FailureReason.FORWARD_FAILED, FailureReason.FORWARD_FAILED_ALONE]
)
@pytest.mark.parametrize("side", SIDES)
def test_a_failed_forward_puts_its_own_worker_alone_under_suspicion(
    side: WorkerRole, cause: FailureReason
) -> None:
    tried = Tried()
    verdict = tried.attempt.on_end(side, 0, RequestEnd(EndReason.FAILED, error="x", cause=cause))
    assert isinstance(verdict, AttemptFailed)
    assert verdict.reason is cause
    assert verdict.suspects == {f"{side}-0-1"}


@pytest.mark.parametrize("side", SIDES)
def test_a_grammar_that_fails_is_the_clients_error(side: WorkerRole) -> None:
    end = RequestEnd(EndReason.FAILED, error="too wide", cause=FailureReason.GRAMMAR_FAILED)
    reasoning = {"reasoning": pb.Reasoning(ends=["</think>"]), "thinking_token_budget": 1}
    asked: dict[str, dict[str, Any]] = {
        "structured_output": {"structured_output": pb.StructuredOutput(choice=["a"])},
        "allowed_token_ids": {"allowed_token_ids": [7]},
        "thinking_token_budget": reasoning,
    }
    for field, params in asked.items():
        verdict = Tried(**params).attempt.on_end(side, 0, end)
        assert isinstance(verdict, RequestFailed)
        assert isinstance(verdict.error, InvalidField)
        assert str(verdict.error) == f"{field}: too wide"


def test_the_worker_that_failed_says_why_however_late() -> None:
    """The decode worker hears of it, too, and may be faster."""
    tried = Tried()
    peer_failed = RequestEnd(EndReason.FAILED, error="x", cause=FailureReason.PEER_FAILED)
    assert tried.attempt.on_end(DECODE, 0, peer_failed) is None
    cause = FailureReason.FORWARD_FAILED
    verdict = tried.attempt.on_end(PREFILL, 0, RequestEnd(EndReason.FAILED, cause=cause))
    assert isinstance(verdict, AttemptFailed)
    assert verdict.reason is cause
    assert verdict.suspects == {"prefill-0-1"}


def test_the_last_choice_to_end_cancels_the_attempt() -> None:
    tried = Tried()
    for choice in range(3):
        assert not tried.cancelled
        tried.attempt.end_choice(choice)
    assert tried.cancelled
    assert tried.attempt.on_lost(tried.decode.endpoint, "x") is None
