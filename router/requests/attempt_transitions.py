"""What a worker's end of a choice means for its attempt: a table.

A choice of an attempt starts in `PREFILLING`, or in `DECODING` on an aggregated
worker, which counts as a decode worker here. `TRANSITIONS` says for each phase
and each end that either side can report what the attempt does, and the phase
after it. An end that completes the choice is not looked up, unless tokens before
it are still missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final

from kvrelay.wire.output import EndReason, FailureReason, RequestEnd
from kvrelay.wire.worker_info import WorkerRole


class ChoicePhase(Enum):
    """Where a choice is in its attempt."""

    PREFILLING = auto()
    """The prefill worker has not ended its side yet."""
    DECODING = auto()
    """The prefill worker has ended its side, or there is none."""
    DECODE_RETRACTED = auto()
    """The decode worker retracted it before the prefill worker ended its side, whose end is
    awaited: it may bring a first token, which is kept."""
    DECODE_ABORTED = auto()
    """The decode worker gave it up before the prefill worker ended its side, whose end is
    awaited: it may have completed the choice and ended the hand-over because of that."""
    ENDED = auto()
    """The attempt works on it no more."""


class ChoiceReport(Enum):
    """What a worker says with the end of a choice."""

    COMPLETE = auto()
    """It is complete, but tokens before the end are still on their way from the other worker."""
    HANDED_OVER = auto()
    RETRACTED = auto()
    ABORTED = auto()
    """It gave the choice up unasked, or because the other worker did: that one says why."""
    FAILED = auto()
    """It failed, and another attempt could complete it."""
    FAILED_FOR_GOOD = auto()
    """It failed, and another attempt would fail, too."""

    @classmethod
    def of(cls, end: RequestEnd) -> ChoiceReport:
        """The report that this end is."""
        if end.cause is FailureReason.PEER_FAILED:
            return cls.ABORTED
        if end.reason is EndReason.FAILED:
            return cls.FAILED if end.retryable else cls.FAILED_FOR_GOOD
        return _REPORTS[end.reason]


class AttemptAction(Enum):
    """What an attempt does about a report."""

    CONTINUE = auto()
    """Nothing: more is to come."""
    AWAIT_PREFILL = auto()
    """Waits for the prefill worker's end. If the decode worker retracted the choice because
    it drains, it tells the prefill worker to end its side: nothing else would."""
    RETRACT_CHOICE = auto()
    """Leaves this choice to another attempt; it has not failed."""
    RETRACT_ATTEMPT = auto()
    """Leaves all its choices to other attempts; it has not failed."""
    FAIL_ATTEMPT = auto()
    """Fails for all its choices, which other attempts may go on with. It is retracted instead
    if a worker that drains explains the failure."""
    FAIL_REQUEST = auto()
    """Fails the request."""


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
"""By phase, then by who reports what."""
