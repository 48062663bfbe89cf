"""A cluster's workers, which come and leave while it serves: the part that drains and adds them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from kvrelay.deploy.bounded_waits import finished
from kvrelay.deploy.controller.changes.role_configs import WorkerConfigs
from kvrelay.deploy.controller.changes.steps import DrainPhase, DrainStep
from kvrelay.deploy.controller.records.journal import Journal
from kvrelay.deploy.controller.records.ordered_changes import Revision
from kvrelay.deploy.controller.records.records import WorkerRecord
from kvrelay.deploy.controller.supervision.controller_metrics import ControllerMetrics
from kvrelay.deploy.controller.supervision.membership import Membership
from kvrelay.deploy.controller.supervision.supervisor import WorkerSupervisor
from kvrelay.deploy.errors import ClusterError
from kvrelay.deploy.nodes.ray_places import RayPlaces
from kvrelay.engine.config import WorkerConfig
from kvrelay.router.errors import CannotDrain, UnknownWorker
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole

Place = dict[str, Any]
"""Ray's options for an actor's place."""

OPEN_ROLL: Final = "not before the workers are replaced: `kvrelay roll` goes on, --undo goes back"
"""The reason why the number of workers cannot change while a roll is under way or has stopped."""
_PART_OF_ROLE: Final = 10
"""The divisor of a role's size: a tenth of its workers, or one, may be missing at a time."""


class Workforce:
    """A cluster's workers, which are added and drained on request.

    Their supervisors carry the requests out. An instance belongs to one event loop.

    Args:
        configs: the workers' configurations.
        members: lists the live workers, and is told which ones drain.
        supervisors: the workers' supervisors by name; those of added workers are entered here.
        placement: finds a place for each worker that is added.
        metrics: count the drains.
        journal: returns the journal, in which everything is written before it is done.
        supervisor_of: makes the supervisor of a worker from its configuration and place.
    """

    def __init__(
        self,
        *,
        configs: WorkerConfigs,
        members: Membership,
        supervisors: dict[str, WorkerSupervisor],
        placement: RayPlaces,
        metrics: ControllerMetrics,
        journal: Callable[[], Journal],
        supervisor_of: Callable[[WorkerConfig, Place], WorkerSupervisor],
    ) -> None:
        self._configs = configs
        self._members = members
        self._supervisors = supervisors
        self._placement = placement
        self._metrics = metrics
        self._journal = journal
        self._supervisor_of = supervisor_of
        self.reserved: dict[str, Place] = {}
        """The places of workers that another controller was about to start, by name."""

    @property
    def staying(self) -> dict[str, WorkerRole]:
        """The workers that are not being removed, by name."""
        return {name: one.role for name, one in self._supervisors.items() if not one.removing}

    async def drain(
        self, worker: str, *, remove: bool, for_roll: bool = False
    ) -> AsyncIterator[DrainStep]:
        """Drain a worker, and yield each phase; see `Administrator`.

        Args:
            worker: its name.
            remove: start no successor.
            for_roll: whether the roll that is under way removes the worker.
        """
        if remove and not for_roll and self._journal().cluster.roll is not None:
            raise CannotDrain(f"remove: {OPEN_ROLL}")
        info, supervisor = self._to_drain(worker, remove)
        await finished(self._begin_drain(info, supervisor, remove=remove))
        self._metrics.draining(info)
        yield DrainStep(DrainPhase.DRAINING, info.incarnation)
        await self._members.until_dead(info)
        yield DrainStep(DrainPhase.LEFT, info.incarnation)
        if not remove:
            successor = await self._members.until_live(worker)
            yield DrainStep(DrainPhase.READY, successor.incarnation)

    async def add(self, name: str, role: WorkerRole, revision: Revision | None = None) -> None:
        """Start one more worker, like the first of its role, and supervise it.

        Raises ClusterError, in one line, if it does not start, or has loaded another model; nothing
        is then left running.

        Args:
            name: the worker's name.
            role: the worker's role.
            revision: the revision of its options; None: that of all added workers.
        """
        if name in self._supervisors:
            return  # a controller before this one has started it
        journal = self._journal()
        revision = revision or journal.cluster.revision
        config = self._configs.of(name, role, revision)
        if name not in journal.cluster.names:
            await journal.write_cluster(names=journal.cluster.names | {name})
        try:
            place = self.reserved.pop(name, None)
            if place is None:
                await journal.add_worker(WorkerRecord(name, role, revision=revision))
                of_workers = len(self._supervisors) + 1
                place = await self._placement.add(config, of_workers=of_workers)
                await journal.write_worker(name, place=self._placement.place_of(name))
            supervisor = self._supervisor_of(config, place)
            try:
                await supervisor.start(self._check_model)
            except BaseException:
                await finished(supervisor.stop())
                raise
        except BaseException:
            await journal.remove_worker(name)
            self._placement.give_back(name)
            raise
        self._supervisors[name] = supervisor

    async def until_up(self, name: str) -> None:
        """Wait until a worker can receive calls, or is no longer to stay."""
        while name in self.staying and name not in self._members.live:
            await self._members.discovery.changed()

    async def until_removed(self, name: str) -> None:
        """Wait until nothing is left of a worker that leaves."""
        while name in self._supervisors:
            await self._members.discovery.changed()

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

    async def _begin_drain(
        self, info: WorkerInfo, supervisor: WorkerSupervisor, *, remove: bool
    ) -> None:
        worker, journal = info.name, self._journal()
        removed_before, drained_before = supervisor.removing, self._members.is_draining(worker)
        supervisor.removing = removed_before or remove
        # Before the worker can have ended: its requests then wait for its successor.
        self._members.add_draining(info)
        try:
            await journal.write_worker(worker, draining=True, removing=supervisor.removing)
            await supervisor.begin_drain(remove=remove)
        except BaseException as error:
            supervisor.removing = removed_before
            if not drained_before:  # if it drains all the same, its supervisor notices
                self._members.remove_draining(info)
            await journal.write_worker(worker, draining=drained_before, removing=removed_before)
            if isinstance(error, ClusterError):
                raise CannotDrain(str(error)) from error
            raise

    def _check_model(self, new: WorkerInfo) -> None:
        """Raise ClusterError if a new worker could not serve beside the others."""
        for old in self._members.live.values():
            if difference := new.model.difference_from(old.model):
                raise ClusterError(f"{new.name} has loaded another model than others: {difference}")


class DrainTurns:
    """Workers' turns to drain: what hits all of them must not end them all at once.

    A worker is missing from when it begins to drain, or is lost, until its successor is live.

    Args:
        members: knows which workers are missing; a turn waits for its changes.
        roles: returns the roles of the workers that are to stay, by name.
    """

    def __init__(self, members: Membership, roles: Callable[[], Mapping[str, WorkerRole]]) -> None:
        self._members = members
        self._roles = roles
        self._in_turn: set[str] = set()
        """Workers that may begin to drain now, and have not yet reported that they do."""

    @asynccontextmanager
    async def turn(self, info: WorkerInfo) -> AsyncIterator[None]:
        """Wait until a worker may drain; the turn lasts as long as the context.

        If it ends without an error, either the worker drains, or another one has its turn.
        """
        while not self._may_drain(info):
            await self._members.discovery.changed()
        self._in_turn.add(info.name)
        try:
            yield
        finally:
            self._in_turn.discard(info.name)
            self._members.publish()

    def _may_drain(self, info: WorkerInfo) -> bool:
        roles = self._roles()
        role = [name for name in roles if roles[name] is info.role]
        missing = [name for name in role if name != info.name and self._is_missing(name)]
        return len(missing) < max(1, len(role) // _PART_OF_ROLE)

    def _is_missing(self, name: str) -> bool:
        members = self._members
        return name not in members.live or members.is_draining(name) or name in self._in_turn
