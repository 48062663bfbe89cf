"""Requests that may break the forward they are in: they are computed in forwards of their own.

A router says so of a request that was in a forward that failed. If it was not that
request, it is computed with others again after a few tokens; if it was, no other request
fails with it. One by one is simple, and its price is small: a prompt fills a step by
itself anyway, and a decode step takes about as long for one request as for many. So a
batch of 32 that has failed once costs about 32 times the tokens of `alone_until` in steps,
every second one of which is for everybody else.
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
    """The output tokens until which a submitted request is computed alone; 0: it is not.

    The step that failed may have been as far ahead of the emitted tokens as steps in
    flight can be, so the trial ends one token later.
    """
    if not submission.alone:
        return 0
    return submission.num_emitted + config.tokens_in_flight + 1


class Turns(Generic[RequestT]):
    """Lets a suspect and all others compute in turn, so that neither waits for long."""

    def __init__(self) -> None:
        self._alone = False

    def next(
        self, schedule: Callable[[bool], Sequence[Scheduled[RequestT]]]
    ) -> Sequence[Scheduled[RequestT]]:
        """Plan a step; `schedule` plans one of a suspect alone, or one of all others."""
        self._alone = not self._alone
        return schedule(self._alone) or schedule(not self._alone)


def failed_end(error: Exception) -> RequestEnd:
    """How a request ends whose forward, or whose own row of a forward, has failed.

    Another worker may do better, unless a grammar is the cause. So it is the router that
    knows which request is to blame.
    """
    if isinstance(error, GrammarError):
        return RequestEnd(EndReason.FAILED, error=str(error), cause=FailureReason.GRAMMAR_FAILED)
    shared = isinstance(error, ForwardFailedError) and not error.alone
    cause = FailureReason.FORWARD_FAILED if shared else FailureReason.FORWARD_FAILED_ALONE
    return RequestEnd(EndReason.FAILED, error=f"the forward failed: {error}", cause=cause)
