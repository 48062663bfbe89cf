"""The change of a cluster's number of workers, while it serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

from kvrelay.deploy.controller.changes.steps import DrainPhase, ScalePhase, ScaleStep
from kvrelay.deploy.controller.changes.wanted import changes_to_reach
from kvrelay.deploy.controller.changes.workforce import OPEN_ROLL, Workforce
from kvrelay.deploy.controller.records.journal import Journal
from kvrelay.deploy.controller.records.ordered_changes import Changes
from kvrelay.deploy.errors import ClusterError
from kvrelay.router.errors import AdminError, CannotScale
from kvrelay.wire.worker_info import WorkerRole

_log = logging.getLogger(__name__)
_STARTS_AT_A_TIME: Final = 4
"""The number of workers that start at a time: each reads its weights and takes a core."""
_STAYS: Final = "it stays, since a new worker did not start"
_PHASES = {DrainPhase.DRAINING: ScalePhase.DRAINING, DrainPhase.LEFT: ScalePhase.LEFT}


class Scaling:
    """The changes of a cluster's size, one at a time. Belongs to one event loop.

    Args:
        workforce: the workers, of which some are added and removed.
        journal: returns the journal, in which a change is written before it is made.
    """

    def __init__(self, workforce: Workforce, journal: Callable[[], Journal]) -> None:
        self._workforce = workforce
        self._journal = journal
        self._changing: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether a change is under way."""
        return self._changing is not None and not self._changing.done()

    async def scale(self, wanted: Mapping[WorkerRole, int]) -> AsyncIterator[ScaleStep]:
        """Change the cluster's number of workers; see `Administrator`."""
        cluster = self._journal().cluster
        if cluster.roll is not None:
            raise CannotScale(OPEN_ROLL)
        if self.is_running:
            raise CannotScale("the cluster is being scaled already")
        try:
            changes = changes_to_reach(wanted, self._workforce.staying, set(cluster.names))
        except ValueError as error:
            raise CannotScale(str(error)) from error
        steps: asyncio.Queue[ScaleStep | None] = asyncio.Queue()
        self._changing = asyncio.create_task(self._change(changes, steps))
        self._changing.add_done_callback(_log_failure)
        while (step := await steps.get()) is not None:
            yield step
        await asyncio.shield(self._changing)  # raises what nobody has expected

    def resume(self, changes: Changes) -> None:
        """Go on with changes that another controller has begun."""
        self._changing = asyncio.create_task(self._resume(changes))
        self._changing.add_done_callback(_log_failure)

    async def stop(self) -> None:
        """Stop changing the cluster."""
        if self._changing is not None:
            self._changing.cancel()
            await asyncio.gather(self._changing, return_exceptions=True)

    async def _resume(self, changes: Changes) -> None:
        there = self._workforce.staying
        removed = tuple(name for name in changes.removed if name in there)
        for name in removed:
            await self._workforce.until_up(name)
        await self._change(Changes(changes.added, removed), asyncio.Queue())

    async def _change(self, changes: Changes, steps: asyncio.Queue[ScaleStep | None]) -> None:
        """Make all changes; surplus workers leave when all new ones have started.

        If a new one does not start, none leaves: otherwise the cluster would shrink.
        """
        turns = asyncio.Semaphore(_STARTS_AT_A_TIME)
        try:
            await self._journal().write_cluster(change=changes)
            async with asyncio.TaskGroup() as group:
                adds = [group.create_task(self._add(*one, turns, steps)) for one in changes.added]
            if all(one.result() for one in adds):
                async with asyncio.TaskGroup() as group:
                    for name in changes.removed:
                        group.create_task(self._remove(name, steps))
            else:
                for name in changes.removed:
                    steps.put_nowait(ScaleStep(name, ScalePhase.FAILED, _STAYS))
            await self._journal().write_cluster(change=None)
        except Exception:
            # Nobody is to go on with what cannot be done.
            await self._journal().write_cluster(change=None)
            raise
        finally:
            steps.put_nowait(None)

    async def _add(
        self,
        name: str,
        role: WorkerRole,
        turns: asyncio.Semaphore,
        steps: asyncio.Queue[ScaleStep | None],
    ) -> bool:
        """Start one worker, in its turn; return whether it has started."""
        async with turns:
            steps.put_nowait(ScaleStep(name, ScalePhase.STARTING))
            try:
                await self._workforce.add(name, role)
            except ClusterError as error:
                steps.put_nowait(ScaleStep(name, ScalePhase.FAILED, str(error)))
                return False
            steps.put_nowait(ScaleStep(name, ScalePhase.READY))
            return True

    async def _remove(self, name: str, steps: asyncio.Queue[ScaleStep | None]) -> None:
        try:
            async for step in self._workforce.drain(name, remove=True):
                steps.put_nowait(ScaleStep(name, _PHASES[step.phase]))
        except AdminError as error:
            steps.put_nowait(ScaleStep(name, ScalePhase.FAILED, str(error)))


def _log_failure(changing: asyncio.Task[None]) -> None:
    """Log a failure, as perhaps no caller waits any more who would see it."""
    if not changing.cancelled() and (error := changing.exception()) is not None:
        _log.error("the change of the cluster's size has failed", exc_info=error)
