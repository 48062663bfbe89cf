"""Steps in flight: launched in order, ended in order.

While one step runs the next one is launched. The host waits for the previous step only if the next
one needs its tokens: for all of its launch, or for its sampling alone, which is launched when its
forward may run already. The host waits for no other event.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from kvrelay.device.device_streams import STEPS_IN_FLIGHT
from kvrelay.engine.executor.failures import ForwardFailedError
from kvrelay.engine.executor.step import (
    Executor,
    LaunchedStep,
    Scheduled,
    Step,
    StepEnded,
    StepOutput,
)

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT")


class _InFlight(NamedTuple, Generic[RequestT]):
    launched: LaunchedStep[RequestT]
    live: Sequence[Scheduled[RequestT]]
    begun: float


class StepPipeline(Generic[RequestT]):
    """A pipeline that launches steps and ends each when its results are on the host. On one thread.

    Ends come in the order of the launches. A step that fails ends as failed, and so does every
    later one for its requests.

    Args:
        executor: launches and finishes them.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._in_flight: deque[_InFlight[RequestT]] = deque()
        self._last_end = 0.0
        self._is_broken = False

    @property
    def oldest(self) -> LaunchedStep[RequestT] | None:
        """The step that ends next."""
        return self._in_flight[0].launched if self._in_flight else None

    @property
    def latest(self) -> LaunchedStep[RequestT] | None:
        """The step that was launched last, if it has not ended."""
        return self._in_flight[-1].launched if self._in_flight else None

    def launch(self, step: Step[RequestT]) -> Iterator[StepEnded[RequestT]]:
        """Launch a step, piece by piece as the ends are read; read all of them.

        Yields:
            The ends of the steps whose tokens it needs, each as it comes; reading on blocks until
            they have run. Then its own if it has ended already.
        """
        while self._in_flight and self._must_wait(step):
            yield self._end_oldest()
        begun, copied = time.monotonic(), False
        live = [item for item in step.scheduled if item.is_live]
        try:
            if step.copies:
                self._executor.copy(step.copies)
            copied = True
            launched = self._executor.launch(step)
        except Exception as error:  # whatever it was, the engine must hear of it
            yield from self._fail_launch(step, live, begun, error, copied=copied)
            return
        while launched.awaits_tokens and self._in_flight:
            yield self._end_oldest(beside=True)
        try:
            if launched.awaits_tokens:
                self._executor.sample(launched)
        except Exception as error:
            yield from self._fail_launch(step, live, begun, error)
            return
        self._in_flight.append(_InFlight(launched, live, begun))
        while self._in_flight and launched.home.passed():
            yield self._end_oldest()

    def finish(self, launched: LaunchedStep[RequestT]) -> list[StepEnded[RequestT]]:
        """End steps up to `launched`, unless it has ended already. Blocks until they have run."""
        ends = []
        while any(one.launched is launched for one in self._in_flight):
            ends.append(self._end_oldest())
        return ends

    def finish_all(self, *, beside: bool = False) -> list[StepEnded[RequestT]]:
        """End every step that is in flight. Blocks until they have run.

        `beside` is whether the device has been given part of yet another step.
        """
        return [self._end_oldest(beside=beside) for _ in range(len(self._in_flight))]

    def _must_wait(self, step: Step[RequestT]) -> bool:
        return len(self._in_flight) >= STEPS_IN_FLIGHT or self._executor.must_wait(step)

    def _end_oldest(self, *, beside: bool = False) -> StepEnded[RequestT]:
        one = self._in_flight.popleft()
        # The device began this step no earlier than it ended the previous one.
        begun = max(one.begun, self._last_end)
        try:
            ended = self._executor.finish(one.launched)
        except Exception as error:
            # A broken device reports the error of one step for every other step, too.
            beside = beside or bool(self._in_flight) or self._is_broken
            return self._fail(one.launched.step, one.live, begun, error, beside=beside)
        self._last_end = time.monotonic()
        ended.begun, ended.seconds = begun, self._last_end - begun
        return ended

    def _settled(self, error: Exception) -> Exception:
        """Wait until no part of a failed step runs: its pages must not be reused before.

        Returns:
            `error`, or the error of a device that cannot even do that.
        """
        try:
            self._executor.wait()
        except Exception as worse:
            logger.exception("what was launched before a failure cannot end")
            return worse
        return error

    def _fail_launch(
        self,
        step: Step[RequestT],
        live: Sequence[Scheduled[RequestT]],
        begun: float,
        error: Exception,
        *,
        copied: bool = True,
    ) -> list[StepEnded[RequestT]]:
        """End the steps in flight, and one that could not be launched whole as failed."""
        beside = bool(self._in_flight) or self._is_broken
        ends = self.finish_all(beside=True)
        why = self._settled(error)
        return [*ends, self._fail(step, live, begun, why, copied=copied, beside=beside)]

    def _fail(
        self,
        step: Step[RequestT],
        live: Sequence[Scheduled[RequestT]],
        begun: float,
        error: Exception,
        *,
        copied: bool = True,
        beside: bool = False,
    ) -> StepEnded[RequestT]:
        """End a step as failed: later steps compute nothing for its requests.

        If its page copies were not made, no later step can be right: the device counts as broken.
        """
        logger.error("a forward of %d requests failed", len(live), exc_info=error)
        failed = ForwardFailedError.of(error, len(live), copied=copied, beside=beside)
        self._is_broken = self._is_broken or failed.breaks_device
        for item in live:
            item.token_state.broken = item.token_state.broken or failed
        outputs = [StepOutput(error=item.token_state.broken) for item in step.scheduled]
        self._last_end = time.monotonic()
        seconds = self._last_end - begun
        return StepEnded(step, outputs, begun=begun, seconds=seconds, error=failed)
