"""Transitions of an attempt when a worker reports the end of a choice, as a table.

A choice of an attempt starts in `PREFILLING`, or in `DECODING` on an aggregated worker, which
counts as a decode worker here. For each phase and each end that either side can report,
`TRANSITIONS` has the attempt's action and the next phase. An end that completes the choice is
looked up only if tokens before it are still missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final

from kvrelay.wire.output import EndReason, FailureReason, RequestEnd
from kvrelay.wire.worker_info import WorkerRole


class ChoicePhase(Enum):
    """The state of a choice in its attempt."""

    PREFILLING = auto()
    """The prefill worker has not ended its side yet."""
    DECODING = auto()
    """The prefill worker has ended its side, or there is none."""
    DECODE_RETRACTED = auto()
    """The decode worker retracted the choice before the prefill worker ended its side.

    The attempt awaits the prefill worker's end: it may bring a first token, which is kept.
    """
    DECODE_ABORTED = auto()
    """The decode worker gave the choice up before the prefill worker ended its side.

    The attempt awaits the prefill worker's end: it may have completed the choice and ended the
    hand-over because of that.
    """
    ENDED = auto()
    """The attempt works on the choice no more."""


class ChoiceReport(Enum):
    """A worker's report of the end of a choice."""

    COMPLETE = auto()
    """The choice is complete, but tokens before its end are still to come from the other worker."""
    HANDED_OVER = auto()
    RETRACTED = auto()
    ABORTED = auto()
    """The worker gave the choice up unasked, or because the other did; the other says why."""
    FAILED = auto()
    """The choice failed, and another attempt could complete it."""
    FAILED_FOR_GOOD = auto()
    """The choice failed, and another attempt would fail, too."""

    @classmethod
    def of(cls, end: RequestEnd) -> ChoiceReport:
        """The report of this end."""
        if end.cause is FailureReason.PEER_FAILED:
            return cls.ABORTED
        if end.reason is EndReason.FAILED:
            return cls.FAILED if end.retryable else cls.FAILED_FOR_GOOD
        return _REPORTS[end.reason]


class AttemptAction(Enum):
    """The action of an attempt on a report."""

    CONTINUE = auto()
    """Do nothing: more is to come."""
    AWAIT_PREFILL = auto()
    """Wait for the prefill worker's end.

    If the decode worker retracted the choice because it drains, tell the prefill worker to end its
    side: nothing else would.
    """
    RETRACT_CHOICE = auto()
    """Leave this choice to another attempt; it has not failed."""
    RETRACT_ATTEMPT = auto()
    """Leave all choices to other attempts; none has failed."""
    FAIL_ATTEMPT = auto()
    """Fail for all choices, which other attempts may go on with.

    Retract the attempt instead if a draining worker explains the failure.
    """
    FAIL_REQUEST = auto()
    """Fail the request."""


_REPORTS: Final = {
    EndReason.STOP: ChoiceReport.COMPLETE,
    EndReason.LENGTH: ChoiceReport.COMPLETE,
    EndReason.HANDED_OVER: ChoiceReport.HANDED_OVER,
    EndReason.RETRACTED: ChoiceReport.RETRACTED,
    EndReason.ABORTED: ChoiceReport.ABORTED,
}

Step = tuple[AttemptAction, ChoicePhase]
Steps = Mapping[tuple[WorkerRole, ChoiceReport], Step]

_PREFILL, _DECODE = WorkerRole.PREFILL, WorkerRole.DECODE

_IN_EVERY_PHASE: Final[Steps] = {
    (_PREFILL, ChoiceReport.RETRACTED): (AttemptAction.RETRACT_ATTEMPT, ChoicePhase.ENDED),
    (_PREFILL, ChoiceReport.ABORTED): (AttemptAction.FAIL_ATTEMPT, ChoicePhase.ENDED),
    (_PREFILL, ChoiceReport.FAILED): (AttemptAction.FAIL_ATTEMPT, ChoicePhase.ENDED),
    (_PREFILL, ChoiceReport.FAILED_FOR_GOOD): (AttemptAction.FAIL_REQUEST, ChoicePhase.ENDED),
    (_DECODE, ChoiceReport.FAILED): (AttemptAction.FAIL_ATTEMPT, ChoicePhase.ENDED),
    (_DECODE, ChoiceReport.FAILED_FOR_GOOD): (AttemptAction.FAIL_REQUEST, ChoicePhase.ENDED),
}

TRANSITIONS: Final[Mapping[ChoicePhase, Steps]] = {
    ChoicePhase.PREFILLING: {
        **_IN_EVERY_PHASE,
        (_PREFILL, ChoiceReport.COMPLETE): (AttemptAction.CONTINUE, ChoicePhase.DECODING),
        (_PREFILL, ChoiceReport.HANDED_OVER): (AttemptAction.CONTINUE, ChoicePhase.DECODING),
        (_DECODE, ChoiceReport.COMPLETE): (AttemptAction.CONTINUE, ChoicePhase.PREFILLING),
        (_DECODE, ChoiceReport.HANDED_OVER): (AttemptAction.CONTINUE, ChoicePhase.PREFILLING),
        (_DECODE, ChoiceReport.RETRACTED): (
            AttemptAction.AWAIT_PREFILL,
            ChoicePhase.DECODE_RETRACTED,
        ),
        (_DECODE, ChoiceReport.ABORTED): (AttemptAction.AWAIT_PREFILL, ChoicePhase.DECODE_ABORTED),
    },
    ChoicePhase.DECODING: {
        **_IN_EVERY_PHASE,
        (_PREFILL, ChoiceReport.COMPLETE): (AttemptAction.CONTINUE, ChoicePhase.DECODING),
        (_PREFILL, ChoiceReport.HANDED_OVER): (AttemptAction.CONTINUE, ChoicePhase.DECODING),
        (_DECODE, ChoiceReport.COMPLETE): (AttemptAction.CONTINUE, ChoicePhase.DECODING),
        (_DECODE, ChoiceReport.HANDED_OVER): (AttemptAction.CONTINUE, ChoicePhase.DECODING),
        (_DECODE, ChoiceReport.RETRACTED): (AttemptAction.RETRACT_CHOICE, ChoicePhase.ENDED),
        (_DECODE, ChoiceReport.ABORTED): (AttemptAction.FAIL_ATTEMPT, ChoicePhase.ENDED),
    },
    ChoicePhase.DECODE_RETRACTED: {
        **_IN_EVERY_PHASE,
        (_PREFILL, ChoiceReport.COMPLETE): (AttemptAction.RETRACT_CHOICE, ChoicePhase.ENDED),
        (_PREFILL, ChoiceReport.HANDED_OVER): (AttemptAction.RETRACT_CHOICE, ChoicePhase.ENDED),
        (_DECODE, ChoiceReport.COMPLETE): (
            AttemptAction.AWAIT_PREFILL,
            ChoicePhase.DECODE_RETRACTED,
        ),
        (_DECODE, ChoiceReport.HANDED_OVER): (
            AttemptAction.AWAIT_PREFILL,
            ChoicePhase.DECODE_RETRACTED,
        ),
        (_DECODE, ChoiceReport.RETRACTED): (
            AttemptAction.AWAIT_PREFILL,
            ChoicePhase.DECODE_RETRACTED,
        ),
        (_DECODE, ChoiceReport.ABORTED): (AttemptAction.AWAIT_PREFILL, ChoicePhase.DECODE_ABORTED),
    },
    ChoicePhase.DECODE_ABORTED: {
        **_IN_EVERY_PHASE,
        (_PREFILL, ChoiceReport.COMPLETE): (AttemptAction.FAIL_ATTEMPT, ChoicePhase.ENDED),
        (_PREFILL, ChoiceReport.HANDED_OVER): (AttemptAction.FAIL_ATTEMPT, ChoicePhase.ENDED),
        (_DECODE, ChoiceReport.COMPLETE): (AttemptAction.AWAIT_PREFILL, ChoicePhase.DECODE_ABORTED),
        (_DECODE, ChoiceReport.HANDED_OVER): (
            AttemptAction.AWAIT_PREFILL,
            ChoicePhase.DECODE_ABORTED,
        ),
        (_DECODE, ChoiceReport.RETRACTED): (
            AttemptAction.AWAIT_PREFILL,
            ChoicePhase.DECODE_RETRACTED,
        ),
        (_DECODE, ChoiceReport.ABORTED): (AttemptAction.AWAIT_PREFILL, ChoicePhase.DECODE_ABORTED),
    },
    ChoicePhase.ENDED: {},
}
"""The step by phase, then by the side that reports and its report."""
