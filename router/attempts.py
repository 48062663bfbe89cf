"""All attempts at one request: the first, and those that go on where one ended early."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Set

from kvrelay.router.attempt import Attempt
from kvrelay.router.config import RouterConfig
from kvrelay.router.errors import DataLoss, InternalFailure, RequestError, Unavailable
from kvrelay.router.fleet import Fleet, Placement
from kvrelay.router.generation import Submission
from kvrelay.router.live_request import LiveRequest
from kvrelay.router.metrics import RouterMetrics
from kvrelay.router.worker_output import FailureReason

_log = logging.getLogger(__name__)

_PAUSES = (0.05, 0.5)
"""Seconds before a try after a failure, and after others: who else was lost with the worker is
known by then, and what passes has passed."""


def _strict_failure(error: Unavailable, reason: FailureReason) -> RequestError:
    kind = DataLoss if reason is FailureReason.PAGE_MISMATCH else Unavailable
    return kind(f"{reason}: {error} (strict: it is not computed again)")


class Attempts:
    """Sees to it that some attempt works on every unfinished choice, until the outcome.

    An attempt can end early for a choice:

    ========= ==================================================================
    retracted its memory went to others, or its worker drains; that costs the
              request nothing
    failed    a worker was lost, or failed in a way that another may not; when
              this is a choice's `max_attempts`-th, or always if the router is
              `strict`, the request fails
    ========= ==================================================================

    Either way the choice is submitted again: the prompt and what it has emitted,
    to workers that are chosen anew, for which it waits `failover_wait_seconds`.

    Args:
        numbers: of attempts; none of them repeats on a router.
    """

    def __init__(
        self,
        live: LiveRequest,
        fleet: Fleet,
        config: RouterConfig,
        metrics: RouterMetrics,
        numbers: Iterator[int],
    ) -> None:
        self._live = live
        self._fleet = fleet
        self._config = config
        self._metrics = metrics
        self._numbers = numbers
        self._running: list[Attempt] = []
        self._resuming: set[asyncio.Task[None]] = set()
        self._failures: Counter[int] = Counter()  # by choice
        self._suspects: set[str] = set()  # incarnations that attempts have failed with

    def start(self, placement: Placement) -> None:
        """The first attempt, at all choices."""
        self._submit(range(self._live.request.sampling.n), placement)

    def start_later(self) -> None:
        """The same, once there are workers for it."""
        choices = range(self._live.request.sampling.n)
        self._submit_later(choices, "every worker that could take the request drains", pause=0.0)

    def release(self) -> None:
        """See `Release`."""
        for task in self._resuming:
            task.cancel()
        for attempt in self._running:
            attempt.release()

    def retracted(self, choices: Set[int], detail: str) -> None:
        """See `Keeper`."""
        unfinished = self._interrupt(choices)
        self._resume(unfinished, "retracted", detail, pause=0.0)

    def failed(
        self, choices: Set[int], error: Unavailable, reason: FailureReason, suspects: Set[str]
    ) -> None:
        """See `Keeper`."""
        self._suspects |= suspects
        unfinished = self._interrupt(choices)
        self._failures.update(unfinished)
        worst = max((self._failures[choice] for choice in unfinished), default=0)
        if unfinished and self._config.strict:
            self._metrics.failed_strictly(reason)
            self._live.fail(_strict_failure(error, reason))
        elif worst >= self._config.max_attempts:
            self._live.fail(Unavailable(f"{error} (attempt {worst} of {worst})"))
        else:
            self._resume(unfinished, reason, str(error), _PAUSES[min(worst, len(_PAUSES)) - 1])

    def stale(self) -> None:
        """See `Keeper`."""
        self._metrics.stale_output()

    def _interrupt(self, choices: Set[int]) -> set[int]:
        """Ends those that are complete in what they emitted; returns the others."""
        for choice in choices:
            self._live.interrupt(choice)
        return {choice for choice in choices if self._live.choices[choice].ended is None}

    def _resume(self, choices: Set[int], reason: str, detail: str, pause: float) -> None:
        for run in self._runs(choices):
            self._metrics.resubmitted(reason)
            self._submit_later(run, detail, pause)

    def _submit_later(self, choices: range, detail: str, pause: float) -> None:
        task = asyncio.create_task(self._resubmit(choices, detail, pause))
        self._resuming.add(task)
        task.add_done_callback(self._resuming.discard)

    def _runs(self, choices: Set[int]) -> list[range]:
        """These as they are submitted: neighbours together, but only while nothing has come."""
        runs: list[range] = []
        for choice in sorted(choices):
            if runs and runs[-1].stop == choice and not self._emitted(runs[-1][0], choice):
                runs[-1] = range(runs[-1].start, choice + 1)
            else:
                runs.append(range(choice, choice + 1))
        return runs

    def _emitted(self, *choices: int) -> tuple[int, ...]:
        """What these choices have told their readers, one after the other."""
        return tuple(itertools.chain(*(self._live.choices[choice].emitted for choice in choices)))

    async def _resubmit(self, choices: range, detail: str, pause: float) -> None:
        try:
            await asyncio.sleep(pause)
            self._submit(choices, await self._placement(choices, detail))
        except RequestError as error:
            self._live.fail(error)
        except Exception as error:
            _log.exception("request %s", self._live.request.request_id)
            self._live.fail(InternalFailure(f"router: {error}"))

    async def _placement(self, choices: range, detail: str) -> Placement:
        """Workers to go on with, once there are some; raises `Unavailable` after the wait."""
        request, seconds = self._live.request, self._config.failover_wait_seconds
        input_tokens = len(request.input_ids) + len(self._emitted(*choices))
        missing: Unavailable | None = None
        try:
            async with asyncio.timeout(seconds):
                while True:
                    try:
                        return self._fleet.place(input_tokens, request.total_tokens, self._suspects)
                    except Unavailable as error:
                        missing = error
                    await self._fleet.news.next()
        except TimeoutError:
            raise Unavailable(f"{detail}; then for {seconds:g} s {missing}") from missing

    def _submit(self, choices: range, placement: Placement) -> None:
        live = self._live
        submission = Submission(
            request=live.request,
            attempt=next(self._numbers),
            choices=choices,
            age_seconds=live.age_seconds,
            emitted=self._emitted(*choices),
            prompt_logprobs=live.prompt_logprobs_due,
        )
        attempt = Attempt(submission, placement, live, self)
        self._running = [*(other for other in self._running if not other.over), attempt]
        attempt.submit()
