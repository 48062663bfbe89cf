"""Requests that may break the forward they are in, and are computed in forwards of their own.

A router marks a request as suspect if it was in a forward that failed. If it is innocent, it is
computed with others again after a few tokens. If not, no other request fails with it.

Testing them one by one is simple and costs little. A prompt fills a step by itself anyway, and a
decode step takes about as long for one request as for many. So a failed batch of 32 costs about 32
times the tokens of `alone_until` in steps. Every second of these steps is for all other requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.executor.failures import ForwardFailedError
from kvrelay.engine.executor.step import Scheduled
from kvrelay.text.grammar import GrammarError
from kvrelay.wire.output import EndReason, FailureReason, RequestEnd
from kvrelay.wire.submit import SubmitRequest

RequestT = TypeVar("RequestT")


def alone_until(submission: SubmitRequest, config: WorkerConfig) -> int:
    """Compute the output tokens up to which a request is computed alone; 0: it is not.

    The step that failed may have been ahead of the emitted tokens by all steps in flight. So the
    trial ends one token later than that.
    """
    if not submission.alone:
        return 0
    return submission.num_emitted + config.tokens_in_flight + 1


class Turns(Generic[RequestT]):
    """The alternation of steps between one suspect and all other requests."""

    def __init__(self) -> None:
        self._alone = False

    def next(
        self, schedule: Callable[[bool], Sequence[Scheduled[RequestT]]]
    ) -> Sequence[Scheduled[RequestT]]:
        """Plan a step: `schedule(True)` of a suspect alone, or `schedule(False)` of others."""
        self._alone = not self._alone
        return schedule(self._alone) or schedule(not self._alone)


def failed_end(error: Exception) -> RequestEnd:
    """Make the end of a request whose forward, or whose own row of a forward, has failed.

    Another worker may succeed, unless a grammar is the cause. So the router decides which request
    is to blame.
    """
    if isinstance(error, GrammarError):
        return RequestEnd(EndReason.FAILED, error=str(error), cause=FailureReason.GRAMMAR_FAILED)
    shared = isinstance(error, ForwardFailedError) and not error.alone
    cause = FailureReason.FORWARD_FAILED if shared else FailureReason.FORWARD_FAILED_ALONE
    return RequestEnd(EndReason.FAILED, error=f"the forward failed: {error}", cause=cause)
