"""The change of a cluster's workers while it serves: the side that scaling and rolling act on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

from kvrelay.deploy.bounded_waits import finished
from kvrelay.deploy.controller.changes.draining import Drains
from kvrelay.deploy.controller.changes.replacement_order import Revision, Roll
from kvrelay.deploy.controller.changes.replacing import Rolling
from kvrelay.deploy.controller.changes.resizing import Scaling
from kvrelay.deploy.controller.changes.role_configs import WorkerConfigs
from kvrelay.deploy.controller.changes.wanted import Changes
from kvrelay.deploy.controller.controller_metrics import ControllerMetrics
from kvrelay.deploy.controller.membership import Membership
from kvrelay.deploy.controller.operators.admin_service import DrainStep, RollOrder, ScaleStep
from kvrelay.deploy.controller.records.journal import Journal
from kvrelay.deploy.controller.records.records import WorkerRecord
from kvrelay.deploy.controller.supervisor import WorkerSupervisor
from kvrelay.deploy.errors import ClusterError
from kvrelay.deploy.nodes.ray_places import RayPlaces
from kvrelay.engine.config import WorkerConfig
from kvrelay.router.errors import CannotDrain, CannotScale
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole

Place = dict[str, Any]
"""Ray's options for an actor's place."""

_OPEN_ROLL: Final = "not before the workers are replaced: `kvrelay roll` goes on, --undo goes back"


class Workforce:
    """A cluster's workers, which are added, removed and replaced on request.

    It implements `Scalable` and `Rollable`, and belongs to one event loop.

    Args:
        configs: the workers' configurations.
        members: lists the live workers.
        supervisors: the workers' supervisors by name; those of added workers are entered here.
        drains: tell workers to leave.
        placement: finds a place for each worker that is added.
        metrics: count the rolls.
        journal: returns the journal, in which everything is written before it is done.
        supervisor_of: makes the supervisor of a worker from its configuration and place.
    """

    def __init__(
        self,
        *,
        configs: WorkerConfigs,
        members: Membership,
        supervisors: dict[str, WorkerSupervisor],
        drains: Drains,
        placement: RayPlaces,
        metrics: ControllerMetrics,
        journal: Callable[[], Journal],
        supervisor_of: Callable[[WorkerConfig, Place], WorkerSupervisor],
    ) -> None:
        self._configs = configs
        self._members = members
        self._supervisors = supervisors
        self._drains = drains
        self._placement = placement
        self._metrics = metrics
        self._journal = journal
        self._supervisor_of = supervisor_of
        self._reserved: dict[str, Place] = {}
        """The places of workers that another controller was about to start."""
        self._scaling = Scaling(self)
        self._rolling = Rolling(self)

    # What operators ask.

    async def scale(self, wanted: Mapping[WorkerRole, int]) -> AsyncIterator[ScaleStep]:
        """Add and remove workers, and yield each phase; see `Administrator`."""
        if self.open_roll is not None:
            raise CannotScale(_OPEN_ROLL)
        async for step in self._scaling.scale(wanted):
            yield step

    async def roll(self, order: RollOrder) -> AsyncIterator[ScaleStep]:
        """Replace all workers, and yield each phase; see `Administrator`."""
        async for step in self._rolling.roll(order):
            yield step

    async def drain(self, worker: str, *, remove: bool) -> AsyncIterator[DrainStep]:
        """Drain a worker, and yield each phase; see `Administrator`."""
        if remove and self.open_roll is not None:
            raise CannotDrain(f"remove: {_OPEN_ROLL}")
        async for step in self._drains.drain(worker, remove=remove):
            yield step

    def resume(self, reserved: dict[str, Place]) -> None:
        """Go on with the scaling or the roll that another controller has begun.

        Args:
            reserved: the places of workers that it was about to start, by name.
        """
        self._reserved = reserved
        cluster = self._journal().cluster
        if cluster.change is not None:
            self._scaling.resume(cluster.change)
        if cluster.roll is not None:
            self._metrics.rolling(cluster.roll)
            self._rolling.resume(cluster.roll)

    async def stop(self) -> None:
        """Stop scaling and rolling."""
        await self._scaling.stop()
        await self._rolling.close()

    # What scaling and rolling ask, and do.

    @property
    def staying(self) -> Mapping[str, WorkerRole]:
        """The workers that are not being removed, by name."""
        return self._drains.staying

    @property
    def names(self) -> set[str]:
        """The names that no new worker can have.

        They include those of workers that have left or did not start.
        """
        return set(self._journal().cluster.names)

    @property
    def revisions(self) -> Mapping[str, int]:
        """The number of each worker's revision, by name."""
        return {name: one.revision.number for name, one in self._journal().workers.items()}

    @property
    def revision(self) -> Revision:
        """The revision of the options that added workers get."""
        return self._journal().cluster.revision

    @property
    def previous(self) -> Revision | None:
        """The value of `revision` before the last roll; None: there was no roll."""
        return self._journal().cluster.previous

    @property
    def is_scaling(self) -> bool:
        """Whether the number of workers is being changed."""
        return self._scaling.is_running

    @property
    def open_roll(self) -> Roll | None:
        """The roll that is under way or has stopped; None: there is none."""
        return self._journal().cluster.roll

    def check_revision(self, revision: Revision) -> None:
        """Raise ValueError, which names the option, if the cluster's workers cannot have it."""
        self._configs.check(self.revision, revision)

    async def write_roll(self, roll: Roll) -> None:
        """Write down a roll that is about to begin or to go on, or has stopped."""
        self._metrics.rolling(roll)
        await self._journal().write_cluster(roll=roll)

    async def end_roll(self, roll: Roll) -> None:
        """Write down that all workers have the roll's options."""
        before = self.previous if roll.target == self.revision else self.revision
        self._metrics.rolled(back=roll.target.number <= self.revision.number)
        await self._journal().write_cluster(revision=roll.target, previous=before, roll=None)

    async def until_up(self, name: str) -> None:
        """Wait until a worker can receive calls, or is no longer to stay."""
        while name in self.staying and name not in self._members.live:
            await self._members.changed()

    def leave(self, worker: str) -> AsyncIterator[DrainStep]:
        """Drain a worker that its own next incarnation does not replace; yield each phase."""
        return self._drains.drain(worker, remove=True)

    async def until_removed(self, name: str) -> None:
        """Wait until nothing is left of a worker that leaves."""
        while name in self._supervisors:
            await self._members.changed()

    async def changing(self, changes: Changes | None) -> None:
        """Write down changes that are about to be made; None: they have been made."""
        await self._journal().write_cluster(change=changes)

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
        journal, revision = self._journal(), revision or self.revision
        config = self._configs.of(name, role, revision)
        if name not in journal.cluster.names:
            await journal.write_cluster(names=journal.cluster.names | {name})
        try:
            place = self._reserved.pop(name, None)
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

    def _check_model(self, new: WorkerInfo) -> None:
        """Raise ClusterError if a new worker could not serve beside the others."""
        for old in self._members.live.values():
            if difference := new.model.difference_from(old.model):
                raise ClusterError(f"{new.name} has loaded another model than others: {difference}")
