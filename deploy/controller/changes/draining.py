"""The drains of workers on request, with the progress of each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping

from kvrelay.deploy.bounded_waits import finished
from kvrelay.deploy.controller.controller_metrics import ControllerMetrics
from kvrelay.deploy.controller.membership import Membership
from kvrelay.deploy.controller.operators.admin_service import DrainPhase, DrainStep
from kvrelay.deploy.controller.records.journal import Journal
from kvrelay.deploy.controller.supervisor import WorkerSupervisor
from kvrelay.deploy.errors import ClusterError
from kvrelay.router.errors import CannotDrain, UnknownWorker
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole


class Drains:
    """The drains that operators ask for; the workers' supervisors carry them out.

    An instance belongs to one event loop.

    Args:
        members: lists the live workers, and is told which ones drain.
        supervisors: the workers' supervisors by name; a view that changes with them.
        journal: returns the journal, in which each drain is written before the worker is told.
        metrics: count the drains.
    """

    def __init__(
        self,
        members: Membership,
        supervisors: Mapping[str, WorkerSupervisor],
        journal: Callable[[], Journal],
        metrics: ControllerMetrics,
    ) -> None:
        self._members = members
        self._supervisors = supervisors
        self._journal = journal
        self._metrics = metrics

    @property
    def staying(self) -> dict[str, WorkerRole]:
        """The workers that are not being removed, by name."""
        return {name: one.role for name, one in self._supervisors.items() if not one.removing}

    async def drain(self, worker: str, *, remove: bool) -> AsyncIterator[DrainStep]:
        """Drain a worker, and yield each phase; see `Administrator`."""
        info, supervisor = self._to_drain(worker, remove)
        await finished(self._begin(info, supervisor, remove=remove))
        self._metrics.draining(info)
        yield DrainStep(DrainPhase.DRAINING, info.incarnation)
        await self._members.until_dead(info)
        yield DrainStep(DrainPhase.LEFT, info.incarnation)
        if not remove:
            successor = await self._members.until_live(worker)
            yield DrainStep(DrainPhase.READY, successor.incarnation)

    def _to_drain(self, worker: str, remove: bool) -> tuple[WorkerInfo, WorkerSupervisor]:
        """Return the worker's incarnation and its supervisor.

        Raises UnknownWorker; or CannotDrain if the worker is not up, or is the last of its role
        while requests do not go to another cluster.
        """
        roles = self.staying
        if worker not in roles:
            raise UnknownWorker(worker, roles)
        if worker not in self._members.live:
            raise CannotDrain(f"worker: {worker} is not up; another one is on its way")
        role = roles[worker]
        is_last = list(roles.values()).count(role) == 1
        if remove and is_last and not self._journal().cluster.successor:
            raise CannotDrain(f"remove: {worker} is the last {role} worker")
        return self._members.live[worker], self._supervisors[worker]

    async def _begin(self, info: WorkerInfo, supervisor: WorkerSupervisor, *, remove: bool) -> None:
        worker, journal = info.name, self._journal()
        removed_before, drained_before = supervisor.removing, self._members.is_draining(worker)
        supervisor.removing = removed_before or remove
        # Before the worker can have ended: its requests then wait for its successor.
        self._members.add_draining(info)
        try:
            await journal.write_worker(worker, draining=True, removing=supervisor.removing)
            await supervisor.drain(remove=remove)
        except BaseException as error:
            supervisor.removing = removed_before
            if not drained_before:  # if it drains all the same, its supervisor notices
                self._members.remove_draining(info)
            await journal.write_worker(worker, draining=drained_before, removing=removed_before)
            if isinstance(error, ClusterError):
                raise CannotDrain(str(error)) from error
            raise
