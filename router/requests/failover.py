"""Placement of a request's attempts, and the decision on a retry after one ended early.

`LiveRequest` asks here and submits the new attempt itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import partial

from kvrelay.router.config import RouterConfig
from kvrelay.router.errors import DataLoss, InternalFailure, RequestError, Unavailable
from kvrelay.router.generation import GenerationRequest
from kvrelay.router.metrics import STRICT_FAILURES, WORKER_WAITS, RouterMetrics
from kvrelay.router.placement.demand import Demand
from kvrelay.router.placement.fleet import Fleet, Placement
from kvrelay.router.placement.worker_link import FORWARD_FAILURES
from kvrelay.router.requests.attempt import AttemptFailed, AttemptRetracted
from kvrelay.wire.output import FailureReason
from kvrelay.wire.worker_info import WorkerRole

_PAUSES_SECONDS = (0.05, 0.5)
"""The pause before the retry after a choice's first failure, and after each later one.

By then the router knows of other losses with the worker, and a passing fault has passed.
"""


@dataclass(frozen=True, slots=True)
class Retry:
    """Choices that are to be submitted again."""

    reason: str
    """The value of the `reason` metric label."""
    detail: str
    """Why the earlier attempt ended."""
    pause_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Failures:
    """The failures of one choice since its latest new token."""

    count: int
    emitted: int
    """The choice's tokens at its latest failure."""


class Failover:
    """Placement of one request's attempts, and the decisions on its retries.

    A choice whose attempt was retracted is always submitted again. A choice whose attempt failed is
    submitted again, too, with two exceptions. The request fails at the choice's `max_attempts`-th
    failure without a new token in between, and at once if the router is `strict`. The new attempt
    gets the prompt and the emitted tokens, on workers that are chosen anew. A worker of a failed
    attempt is chosen only if there is no other. Where decode workers compute prompts, too, the next
    attempt's prompt is computed by the other role. A forward that failed as a whole is no failure
    of its choices: see `FailedForwards`. A request that waits for workers keeps its place in line
    by its arrival, also when it is submitted again.

    Args:
        fleet: the workers.
        config: the router's.
        metrics: the router's.
        arrived: the moment of the request's arrival.
    """

    def __init__(
        self, fleet: Fleet, config: RouterConfig, metrics: RouterMetrics, arrived: float
    ) -> None:
        self._arrived = arrived
        self._fleet = fleet
        self._config = config
        self._metrics = metrics
        self._model = fleet.model.digest  # of the first attempt
        self._failures: dict[int, _Failures] = {}  # by choice
        self._failed_forwards = FailedForwards()
        self._suspects: set[str] = set()  # incarnations that attempts have failed with
        self._failed_by: WorkerRole | None = None  # see `Demand`

    def decide(
        self, verdict: AttemptRetracted | AttemptFailed, unfinished: Mapping[int, int]
    ) -> Retry:
        """Decide how the unfinished choices of an attempt that ended are submitted again.

        Args:
            verdict: how the attempt ended.
            unfinished: the emitted tokens of each unfinished choice.

        Raises:
            RequestError: there is no retry; the request ends with this error.
        """
        if isinstance(verdict, AttemptRetracted):
            return Retry("retracted", verdict.detail)
        self._suspects |= verdict.suspects
        if verdict.culprit is None or verdict.prompt_by is WorkerRole.DECODE:
            self._failed_by = verdict.prompt_by
        if verdict.culprit is not None:
            for choice in unfinished:
                self._failed_forwards.suspect(choice, verdict.culprit)
        in_forward = verdict.reason in FORWARD_FAILURES
        count = partial(self._count_failed_forward, verdict) if in_forward else self._count_failure
        worst = max((count(*choice) for choice in unfinished.items()), default=0)
        if unfinished and self._config.strict:
            self._metrics.count(STRICT_FAILURES, reason=verdict.reason)
            raise _strict_failure(verdict)
        if worst >= self._config.max_attempts:
            raise Unavailable(f"{verdict.error} (attempt {worst} of {worst})")
        pause = _PAUSES_SECONDS[max(min(worst, len(_PAUSES_SECONDS)), 1) - 1]
        return Retry(verdict.reason, str(verdict.error), pause)

    def _count_failure(self, choice: int, emitted: int) -> int:
        """Count a failure of a choice; return its failures since its latest new token."""
        before = self._failures.get(choice, _Failures(0, 0))
        count = 1 if emitted > before.emitted else before.count + 1
        self._failures[choice] = _Failures(count, emitted)
        return count

    def _count_failed_forward(self, verdict: AttemptFailed, choice: int, emitted: int) -> int:
        """Note a forward that failed with a choice; it is no failure of the choice."""
        [worker] = verdict.suspects
        self.forward_failed(choice, emitted, worker, verdict.reason, str(verdict.error))
        return 0

    def forward_failed(
        self, choice: int, emitted: int, worker: str, reason: FailureReason, detail: str
    ) -> None:
        """Note a forward that failed with a choice; raise InternalFailure if that is to blame."""
        alone = reason is FailureReason.FORWARD_FAILED_ALONE
        if self._failed_forwards.add(choice, emitted, worker, alone=alone):
            raise InternalFailure(f"{detail} (with this request alone, and before)")

    def alone(self, choices: Iterable[int]) -> Set[WorkerRole]:
        """The roles on whose workers an attempt is to be computed apart from other requests."""
        return self._failed_forwards.suspected_on(choices)

    async def place(self, demand: Demand, detail: str) -> Placement:
        """Find workers for the next attempt; wait for them up to `failover_wait` seconds.

        Args:
            demand: what the attempt needs.
            detail: why the attempt before ended.

        Raises:
            Unavailable: none were ready in that time, or the model of the request's first attempt
                is not served any more.
        """
        seconds = self._config.failover_wait
        found = await self._place_within(seconds, demand, lambda: True)
        if isinstance(found, Placement):
            self._check_model()
            return found
        raise Unavailable(
            f"{detail}; it could not be submitted again within {seconds:g} s: {found}"
        ) from found

    async def place_first(
        self, request: GenerationRequest, deadline: Callable[[], float | None]
    ) -> Placement:
        """Find workers for the first attempt; wait for them up to `worker_wait` seconds.

        Args:
            request: the request.
            deadline: tells, once there are workers, when the first token must have come; see
                `Fleet.place`.

        Raises:
            DeadlineTooNear: there are workers, but none is expected to be in time.
            Unavailable: none were ready in that time, or no more workers are expected.
        """
        seconds, outcome = self._config.worker_wait, "left"
        demand = Demand.of(request)
        hope = partial(self._fleet.expects, demand)
        try:
            found = await self._place_within(seconds, demand, hope)
            if isinstance(found, Placement):
                outcome = "served"
                self._model = self._fleet.model.digest
                return self._fleet.place(demand, deadline())
            if not hope():
                outcome = "given_up"
                raise found
            outcome = "expired"
            waited = f"{found}, and none came within {seconds:g} s (--worker-wait)"
            raise Unavailable(waited, self._config.retry_after_ms) from found
        finally:
            self._metrics.count(WORKER_WAITS, outcome=outcome)

    async def _place_within(
        self, seconds: float, demand: Demand, hope: Callable[[], bool]
    ) -> Placement | Unavailable:
        """Find workers as soon as they are ready; return the shortage if time or hope ends."""
        missing = Unavailable("no workers were looked for")
        demand = replace(demand, suspects=self._suspects, failed_by=self._failed_by)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    try:
                        return self._fleet.place(demand)
                    except Unavailable as error:
                        missing = error
                    if not hope():
                        break
                    await self._fleet.changes.wait(self._arrived)
        return missing

    def _check_model(self) -> None:
        """Raise Unavailable if another model is served now: a stream must not mix two models."""
        served = self._fleet.model.digest
        if self._model and served and self._model != served:
            began, now = self._model.name, served.name
            raise Unavailable(f"it began with model {began}, in whose place {now} is served now")


def _strict_failure(failed: AttemptFailed) -> RequestError:
    kind = DataLoss if failed.reason is FailureReason.PAGE_MISMATCH else Unavailable
    return kind(f"{failed.reason}: {failed.error} (--strict: it is not computed again)")


_SAME_PLACE_TOKENS = 16
"""The most tokens between two failed forwards at the same place of a choice.

An attempt gains a token from its prefill worker in any case, and some from steps in flight.
"""
_WORKERS, _FORWARDS = 2, 3
"""The numbers of workers, or of forwards, that must fail with a choice before it is to blame.

In the last of them it must be alone.
"""


@dataclass(slots=True)
class _Blame:
    """The failed forwards of one choice in a row, at about the same place."""

    emitted: int = 0
    """The choice's tokens at the last failure."""
    workers: list[str] = field(default_factory=list)
    """The worker of each failed forward."""


class FailedForwards:
    """The search for a choice that breaks every forward, without harm to its neighbours.

    A forward that fails as a whole does not tell which request is to blame, or whether the worker
    is. So each choice is tried again, alone in its forwards, if possible on another worker.
    `max_attempts` does not count these failures. A choice is to blame if a forward fails with it
    alone, after one has failed on another worker. Without another worker, two must have failed
    before. By then the worker itself could have given up, after `failed_forwards_limit` failed
    forwards in a row.
    """

    def __init__(self) -> None:
        self._blames: dict[int, _Blame] = {}  # by choice
        self._suspected: dict[int, set[WorkerRole]] = {}  # by choice

    def suspect(self, choice: int, role: WorkerRole) -> None:
        """Note that a choice may break forwards on this role's workers: compute it alone there."""
        self._suspected.setdefault(choice, set()).add(role)

    def suspected_on(self, choices: Iterable[int]) -> Set[WorkerRole]:
        """The roles on whose workers one of these choices is suspected."""
        return {role for choice in choices for role in self._suspected.get(choice, ())}

    def add(self, choice: int, emitted: int, worker: str, *, alone: bool) -> bool:
        """Note a forward that failed with a choice; return whether the choice is to blame.

        `emitted` is the number of the choice's tokens; `worker` is an incarnation, or a stand-in
        for it.
        """
        blame = self._blames.setdefault(choice, _Blame())
        if emitted - blame.emitted > _SAME_PLACE_TOKENS:
            blame.workers.clear()
        blame.emitted = emitted
        blame.workers.append(worker)
        workers, forwards = len(set(blame.workers)), len(blame.workers)
        return alone and (workers >= _WORKERS or forwards >= _FORWARDS)
