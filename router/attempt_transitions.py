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


class Phase(Enum):
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


class Report(Enum):
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
    def of(cls, end: RequestEnd) -> Report:
        """The report that this end is."""
        if end.cause is FailureReason.PEER_FAILED:
            return cls.ABORTED
        if end.reason is EndReason.FAILED:
            return cls.FAILED if end.retryable else cls.FAILED_FOR_GOOD
        return _REPORTS[end.reason]


class Action(Enum):
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
    EndReason.STOP: Report.COMPLETE,
    EndReason.LENGTH: Report.COMPLETE,
    EndReason.HANDED_OVER: Report.HANDED_OVER,
    EndReason.RETRACTED: Report.RETRACTED,
    EndReason.ABORTED: Report.ABORTED,
}

Step = tuple[Action, Phase]
Steps = Mapping[tuple[WorkerRole, Report], Step]

_PREFILL, _DECODE = WorkerRole.PREFILL, WorkerRole.DECODE

_IN_EVERY_PHASE: Final[Steps] = {
    (_PREFILL, Report.RETRACTED): (Action.RETRACT_ATTEMPT, Phase.ENDED),
    (_PREFILL, Report.ABORTED): (Action.FAIL_ATTEMPT, Phase.ENDED),
    (_PREFILL, Report.FAILED): (Action.FAIL_ATTEMPT, Phase.ENDED),
    (_PREFILL, Report.FAILED_FOR_GOOD): (Action.FAIL_REQUEST, Phase.ENDED),
    (_DECODE, Report.FAILED): (Action.FAIL_ATTEMPT, Phase.ENDED),
    (_DECODE, Report.FAILED_FOR_GOOD): (Action.FAIL_REQUEST, Phase.ENDED),
}

TRANSITIONS: Final[Mapping[Phase, Steps]] = {
    Phase.PREFILLING: {
        **_IN_EVERY_PHASE,
        (_PREFILL, Report.COMPLETE): (Action.CONTINUE, Phase.DECODING),
        (_PREFILL, Report.HANDED_OVER): (Action.CONTINUE, Phase.DECODING),
        (_DECODE, Report.COMPLETE): (Action.CONTINUE, Phase.PREFILLING),
        (_DECODE, Report.HANDED_OVER): (Action.CONTINUE, Phase.PREFILLING),
        (_DECODE, Report.RETRACTED): (Action.AWAIT_PREFILL, Phase.DECODE_RETRACTED),
        (_DECODE, Report.ABORTED): (Action.AWAIT_PREFILL, Phase.DECODE_ABORTED),
    },
    Phase.DECODING: {
        **_IN_EVERY_PHASE,
        (_PREFILL, Report.COMPLETE): (Action.CONTINUE, Phase.DECODING),
        (_PREFILL, Report.HANDED_OVER): (Action.CONTINUE, Phase.DECODING),
        (_DECODE, Report.COMPLETE): (Action.CONTINUE, Phase.DECODING),
        (_DECODE, Report.HANDED_OVER): (Action.CONTINUE, Phase.DECODING),
        (_DECODE, Report.RETRACTED): (Action.RETRACT_CHOICE, Phase.ENDED),
        (_DECODE, Report.ABORTED): (Action.FAIL_ATTEMPT, Phase.ENDED),
    },
    Phase.DECODE_RETRACTED: {
        **_IN_EVERY_PHASE,
        (_PREFILL, Report.COMPLETE): (Action.RETRACT_CHOICE, Phase.ENDED),
        (_PREFILL, Report.HANDED_OVER): (Action.RETRACT_CHOICE, Phase.ENDED),
        (_DECODE, Report.COMPLETE): (Action.AWAIT_PREFILL, Phase.DECODE_RETRACTED),
        (_DECODE, Report.HANDED_OVER): (Action.AWAIT_PREFILL, Phase.DECODE_RETRACTED),
        (_DECODE, Report.RETRACTED): (Action.AWAIT_PREFILL, Phase.DECODE_RETRACTED),
        (_DECODE, Report.ABORTED): (Action.AWAIT_PREFILL, Phase.DECODE_ABORTED),
    },
    Phase.DECODE_ABORTED: {
        **_IN_EVERY_PHASE,
        (_PREFILL, Report.COMPLETE): (Action.FAIL_ATTEMPT, Phase.ENDED),
        (_PREFILL, Report.HANDED_OVER): (Action.FAIL_ATTEMPT, Phase.ENDED),
        (_DECODE, Report.COMPLETE): (Action.AWAIT_PREFILL, Phase.DECODE_ABORTED),
        (_DECODE, Report.HANDED_OVER): (Action.AWAIT_PREFILL, Phase.DECODE_ABORTED),
        (_DECODE, Report.RETRACTED): (Action.AWAIT_PREFILL, Phase.DECODE_RETRACTED),
        (_DECODE, Report.ABORTED): (Action.AWAIT_PREFILL, Phase.DECODE_ABORTED),
    },
    Phase.ENDED: {},
}
"""By phase, then by who reports what."""
