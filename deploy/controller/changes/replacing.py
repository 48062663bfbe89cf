"""The replacement of all workers of a cluster by others with other options, while it serves."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace

from kvrelay.deploy.bounded_waits import Pauses, finished
from kvrelay.deploy.controller.changes.role_configs import WorkerConfigs, rolled
from kvrelay.deploy.controller.changes.steps import (
    DrainPhase,
    RollOrder,
    ScalePhase,
    ScaleStep,
)
from kvrelay.deploy.controller.changes.wanted import replacements
from kvrelay.deploy.controller.changes.workforce import Workforce
from kvrelay.deploy.controller.records.journal import Journal
from kvrelay.deploy.controller.records.ordered_changes import Replacement, Revision, Roll
from kvrelay.deploy.controller.supervision.controller_metrics import ControllerMetrics
from kvrelay.deploy.errors import ClusterError
from kvrelay.router.errors import CannotDrain, CannotRoll, UnknownWorker
from kvrelay.wire.worker_info import WorkerRole

_log = logging.getLogger(__name__)
_PHASES = {DrainPhase.DRAINING: ScalePhase.DRAINING, DrainPhase.LEFT: ScalePhase.LEFT}
_Steps = asyncio.Queue[ScaleStep | None]


class Rolling:
    """The roll of a cluster's workers: one roll runs at a time. Belongs to one event loop.

    `max_surge` lanes start a successor before its predecessor drains; `max_unavailable` other lanes
    let a worker leave first. Each lane replaces one worker at a time. So there are never more
    workers, or fewer that take requests, than the order allows.

    Args:
        workforce: the workers, which are replaced.
        configs: say which options the workers can have.
        journal: returns the journal, in which each step is written before it is made.
        metrics: count the rolls.
        is_scaling: returns whether the number of workers is being changed.
    """

    def __init__(
        self,
        workforce: Workforce,
        configs: WorkerConfigs,
        journal: Callable[[], Journal],
        metrics: ControllerMetrics,
        is_scaling: Callable[[], bool],
    ) -> None:
        self._workforce = workforce
        self._configs = configs
        self._journal = journal
        self._metrics = metrics
        self._is_scaling = is_scaling
        self._rolling: asyncio.Task[None] | None = None
        self._beginning = asyncio.Lock()
        self._stopped = False
        self._failed = ""
        self._has_failed = asyncio.Event()

    @property
    def is_running(self) -> bool:
        """Whether workers are being replaced at this moment."""
        return self._rolling is not None and not self._rolling.done()

    async def roll(self, order: RollOrder) -> AsyncIterator[ScaleStep]:
        """Replace all workers; see `Administrator`."""
        steps: _Steps = asyncio.Queue()
        if self._changes_nothing(order):
            return
        # Whole, though the caller leaves: or the roll would be under way, and nobody would make it.
        rolling = await finished(self._obey(order, steps))
        while (step := await steps.get()) is not None:
            yield step
        await asyncio.wait({rolling})
        if rolling.cancelled():
            raise CannotRoll("another order has ended this one")
        rolling.result()  # raises what nobody has expected

    def resume(self, roll: Roll) -> None:
        """Go on with a roll that another controller has begun, unless it has stopped."""
        self._metrics.rolling(roll)
        if not roll.failed:
            self._begin(roll, asyncio.Queue())

    async def stop(self) -> None:
        """Stop replacing workers. A starting successor is ended; a draining worker drains on."""
        self._stopped = True
        async with self._beginning:
            await self._end_running()

    async def _obey(self, order: RollOrder, steps: _Steps) -> asyncio.Task[None]:
        """Begin a roll, in place of the one that runs. Raises CannotRoll."""
        async with self._beginning:
            if self.is_running and not order.undo:
                raise CannotRoll("the workers are being replaced already; --undo goes back")
            target = self._target_of(order)
            await self._end_running()
            if self._stopped:
                raise CannotRoll("the cluster is being stopped")
            if self._is_scaling():
                raise CannotRoll("the cluster is being scaled")
            roll = self._plan(order, target)
            await self._write(roll)
            return self._begin(roll, steps)

    async def _end_running(self) -> None:
        if self._rolling is not None:
            self._rolling.cancel()
            await asyncio.gather(self._rolling, return_exceptions=True)

    def _changes_nothing(self, order: RollOrder) -> bool:
        """Return whether all workers have these options already, and no others are requested."""
        given = self._given(order).items()
        cluster = self._journal().cluster
        there = cluster.revision.options
        same = all(there.get(name, "") == text for name, text in given)
        return bool(given) and same and not order.undo and cluster.roll is None

    @staticmethod
    def _given(order: RollOrder) -> dict[str, str]:
        """Return the options by field name. Raises CannotRoll for one that cannot be rolled."""
        try:
            return {rolled(name).name: text for name, text in order.options.items()}
        except ValueError as error:
            raise CannotRoll(str(error)) from error

    def _target_of(self, order: RollOrder) -> Revision:
        """Return the revision that the workers are to have. Raises CannotRoll."""
        cluster = self._journal().cluster
        if order.undo:
            if order.options:
                raise CannotRoll("undo: goes back to options that were, so none can be given")
            target = cluster.previous if cluster.roll is None else cluster.revision
            if target is None:
                raise CannotRoll("undo: there was no roll")
            return target
        opened = None if cluster.roll is None else cluster.roll.target
        known = [one for one in (cluster.revision, cluster.previous, opened) if one is not None]
        # A worker may keep the one of a roll that was undone but for it.
        number = 1 + max([*(one.number for one in known), *self._revisions.values()])
        options = dict(cluster.revision.options) | self._given(order)
        # An option without a value gets back the one of the start.
        target = Revision(number, {name: text for name, text in options.items() if text})
        try:
            self._configs.check(cluster.revision, target)
        except ValueError as error:
            raise CannotRoll(str(error)) from error
        return target

    def _plan(self, order: RollOrder, target: Revision) -> Roll:
        cluster, staying = self._journal().cluster, self._workforce.staying
        counts = dict(Counter(staying.values())) if cluster.roll is None else cluster.roll.counts
        _check_lanes(order, counts)
        left = replacements(target, counts, staying, self._revisions, set(cluster.names))
        return Roll(
            target=target,
            left=left,
            workers=len(left),
            max_surge=order.max_surge,
            max_unavailable=order.max_unavailable,
            counts=counts,
        )

    @property
    def _revisions(self) -> Mapping[str, int]:
        """The number of each worker's revision, by name."""
        return {name: one.revision.number for name, one in self._journal().workers.items()}

    def _begin(self, roll: Roll, steps: _Steps) -> asyncio.Task[None]:
        self._failed = ""
        self._has_failed.clear()
        self._rolling = asyncio.create_task(self._run(roll, steps))
        self._rolling.add_done_callback(_log_failure)
        return self._rolling

    async def _run(self, roll: Roll, steps: _Steps) -> None:
        """Replace one worker after the other; the first successor that fails to start stops it."""
        try:
            waiting = deque(roll.left)
            acts = [self._start_first] * min(roll.max_surge, len(waiting))
            acts += [self._leave_first] * roll.max_unavailable
            async with asyncio.TaskGroup() as group:
                for act in acts:
                    group.create_task(self._lane(waiting, act, roll.target, steps))
            if self._failed:
                await self._write_failure(self._failed)
            else:
                await self._write_end(roll)
        except Exception as error:
            await self._write_failure(f"{type(error).__name__}: see the controller's log")
            raise
        finally:
            steps.put_nowait(None)

    async def _write(self, roll: Roll) -> None:
        """Write down a roll that is about to begin or to go on, or has stopped."""
        self._metrics.rolling(roll)
        await self._journal().write_cluster(roll=roll)

    async def _write_failure(self, reason: str) -> None:
        if (roll := self._journal().cluster.roll) is not None:
            await self._write(replace(roll, failed=reason))

    async def _write_end(self, roll: Roll) -> None:
        """Write down that all workers have the roll's options."""
        now = self._journal().cluster
        before = now.previous if roll.target == now.revision else now.revision
        self._metrics.rolled(back=roll.target.number <= now.revision.number)
        await self._journal().write_cluster(revision=roll.target, previous=before, roll=None)

    async def _lane(
        self,
        waiting: deque[Replacement],
        act: Callable[[Replacement, Revision, _Steps], Awaitable[None]],
        target: Revision,
        steps: _Steps,
    ) -> None:
        while waiting and not self._failed:
            one = waiting.popleft()
            try:
                await act(one, target, steps)
            except ClusterError as error:
                self._failed = self._failed or str(error)
                self._has_failed.set()
                steps.put_nowait(ScaleStep(one.new or one.old, ScalePhase.FAILED, str(error)))
                return
            roll = self._journal().cluster.roll
            assert roll is not None
            await self._write(replace(roll, left=tuple(o for o in roll.left if o != one)))

    async def _start_first(self, one: Replacement, target: Revision, steps: _Steps) -> None:
        await self._start(one, target, steps)
        await self._leave(one.old, steps)

    async def _leave_first(self, one: Replacement, target: Revision, steps: _Steps) -> None:
        await self._leave(one.old, steps)
        await self._start(one, target, steps)

    async def _start(self, one: Replacement, target: Revision, steps: _Steps) -> None:
        if one.new:
            steps.put_nowait(ScaleStep(one.new, ScalePhase.STARTING))
            await self._workforce.add(one.new, one.role, target)
            await self._until_up(one.new)  # it may have started long ago
            steps.put_nowait(ScaleStep(one.new, ScalePhase.READY))

    async def _leave(self, name: str, steps: _Steps) -> None:
        """Let a worker drain and leave once it can receive calls; it may have left meanwhile.

        Raises ClusterError if it cannot drain and the roll has stopped.
        """
        pauses = Pauses()
        while name in self._workforce.staying:
            await self._until_up(name)
            try:
                async for step in self._workforce.drain(name, remove=True, for_roll=True):
                    steps.put_nowait(ScaleStep(name, _PHASES[step.phase]))
            except CannotDrain as error:
                if self._failed:
                    raise ClusterError(f"{name} stays: {error}") from error
                _log.info("%s", error)  # it is lost, and its next incarnation can be told
                await pauses.pause()
            except UnknownWorker:
                break
        await self._workforce.until_removed(name)

    async def _until_up(self, name: str) -> None:
        """Wait until a worker can receive calls, or is no longer to stay.

        Raises ClusterError if the roll stops first.
        """
        up = asyncio.create_task(self._workforce.until_up(name))
        failed = asyncio.create_task(self._has_failed.wait())
        try:
            await asyncio.wait({up, failed}, return_when=asyncio.FIRST_COMPLETED)
            if not up.done():
                raise ClusterError(f"{name} is not up")
            up.result()
        finally:
            up.cancel()
            failed.cancel()


def _check_lanes(order: RollOrder, counts: Mapping[WorkerRole, int]) -> None:
    """Raise CannotRoll unless there is a lane, and each role always keeps a worker in service."""
    if order.max_surge + order.max_unavailable == 0:
        raise CannotRoll("max_surge and max_unavailable: one of them must be at least 1")
    for role, count in counts.items():
        if order.max_unavailable >= count > 0:
            raise CannotRoll(
                f"max_unavailable: must be less than the number of {role} workers, which is {count}"
            )


def _log_failure(rolling: asyncio.Task[None]) -> None:
    """Log a failure, as perhaps no caller waits any more who would see it."""
    if not rolling.cancelled() and (error := rolling.exception()) is not None:
        _log.error("the roll has failed", exc_info=error)
