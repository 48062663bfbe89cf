"""The workers of a cluster: started, replaced when they die, and drained on request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Final, Self

from kvrelay.deploy.address import Address
from kvrelay.deploy.adoption import Adoption
from kvrelay.deploy.cluster_view import state_of
from kvrelay.deploy.controller_metrics import ControllerMetrics
from kvrelay.deploy.drain_turns import DrainTurns
from kvrelay.deploy.drains import Drains
from kvrelay.deploy.errors import ClusterError
from kvrelay.deploy.journal import Journal
from kvrelay.deploy.key_value_store import InProcessStore, KeyValueStore
from kvrelay.deploy.leadership import Leadership
from kvrelay.deploy.leases import Leases
from kvrelay.deploy.left_over import end_left_over
from kvrelay.deploy.membership import Membership
from kvrelay.deploy.pauses import finished
from kvrelay.deploy.placement import Placement, PlacementPlan
from kvrelay.deploy.recorded_deaths import RecordedDeaths
from kvrelay.deploy.records import Phase, Started, WorkerRecord
from kvrelay.deploy.rolling import Rolling
from kvrelay.deploy.rolls import Revision, Roll
from kvrelay.deploy.scaling import Scaling
from kvrelay.deploy.supervisor import WorkerSupervisor
from kvrelay.deploy.wanted import Changes
from kvrelay.deploy.worker_configs import WorkerConfigs
from kvrelay.deploy.worker_end import WorkerEnd
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.faults import Fault
from kvrelay.router.admin import DrainStep, RollOrder, ScaleStep
from kvrelay.router.discovery import Discovery
from kvrelay.router.errors import CannotDrain, CannotScale, CannotShift
from kvrelay.wire.cluster_state import ClusterState
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole

_log = logging.getLogger(__name__)
_CONTROLLER_LEASE_SECONDS: Final = 15.0
_OPEN_ROLL: Final = "not before the workers are replaced: `kvrelay roll` goes on, --undo goes back"


class Cluster:
    """A Ray actor for each worker, each under a supervisor; in the Ray that is initialised.

    `discovery` lists the incarnations that are live, at every moment; `start` returns when
    all workers are. Belongs to one event loop.

    Args:
        configs: of the workers; their names differ.
        plan: which nodes have room for which workers.
        log_level: of the workers' processes, whose logs Ray prints in this process.
        on_progress: is called, while the workers start for the first time, with the share of its
            weights that each has read, by name; 1 once it has started.
        store: says which controller is the latest one, and what those before have done; in this
            process if not given, which is the only controller then.
        on_deposed: is called when a later controller has begun: this one must do nothing any more.
        on_broken: is called when an error that nobody expected has ended the renewal of this
            controller's lease, without which the workers end one after the other.
    """

    def __init__(
        self,
        configs: Sequence[WorkerConfig],
        *,
        plan: PlacementPlan | None = None,
        log_level: int = logging.WARNING,
        on_progress: Callable[[Mapping[str, float]], None] = lambda progress: None,
        store: KeyValueStore | None = None,
        on_deposed: Callable[[], object] = lambda: None,
        on_broken: Callable[[], object] = lambda: None,
    ) -> None:
        self._made = time.monotonic()
        self._configs = WorkerConfigs(configs)
        self._log_level = log_level
        self._on_progress = on_progress
        self._progress = {config.name: 0.0 for config in configs}
        """Of workers that start for the first time."""
        self._members = Membership()
        self._deaths: RecordedDeaths | None = None
        self._plan = plan or PlacementPlan()
        self._placement = Placement(self._plan)
        self._name = self._plan.namespace.rpartition("/")[2]
        """Of the cluster; empty if it ends with its command."""
        self._store = store or InProcessStore()
        self._on_deposed = on_deposed
        self._leadership = Leadership(self._store, on_deposed, on_broken)
        self._supervisors: dict[str, WorkerSupervisor] = {}
        self._journal: Journal | None = None
        self.took_over = False
        """Whether another controller had started the workers."""
        self._reserved: dict[str, dict[str, Any]] = {}
        """The places of workers that another controller was about to start."""
        self._scaling = Scaling(self)
        self._rolling = Rolling(self)
        model = configs[0].model_name if configs else ""
        self.metrics = ControllerMetrics(model, self.discovery, self._wanted_roles)
        """What became of the workers."""
        self._drains = Drains(
            *(self._members, self._supervisors, lambda: self._written, self.metrics)
        )
        self._turns = DrainTurns(self._members, lambda: self._drains.staying)
        self._leases: Leases | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    @property
    def discovery(self) -> Discovery:
        """What the router reads."""
        return self._members.discovery

    @property
    def workers(self) -> Mapping[str, WorkerInfo]:
        """The live incarnations by worker name; a view that changes with them."""
        return self._members.live

    async def start(self) -> None:
        """Place and start every worker, or take over those of the controller before this one.

        Raises ClusterError, in one line, for the first that does not start; nothing is left
        running then. Workers that are taken over have started before: they run on if this fails.
        """
        try:
            self._leases = leases = await self._leadership.begin(
                self._configs.first, _CONTROLLER_LEASE_SECONDS
            )
            self._journal, before = await Journal.take_over(self._store, leases)
            self._deaths = RecordedDeaths(self._journal, before.deaths if before else ())
            self._add_started()
            self._members.shift_to(self._journal.cluster.successor)
            self.took_over = before is not None and before.cluster.phase is Phase.SERVING
            if self._journal.cluster.phase is Phase.STOPPING:
                raise ClusterError("the cluster was being stopped")
            if self._journal.cluster.phase is Phase.STARTING:
                await self._write_first_records()
                await self._start_first()
            else:
                await self._adopt_all(self._journal)
            self._deaths.add_earlier()
            self._tell_all_of_deaths()
        except BaseException:
            if not self.took_over:
                await self.stop()
            raise

    async def stop(self) -> None:
        """End every worker, in good order where it can, and give its place back to Ray.

        If a later controller has begun, they are its workers: nothing is done but `on_deposed`.
        A cancellation is raised only when that is done: no process outlives its cluster.
        """
        await finished(self._stop())

    async def _stop(self) -> None:
        if self._leases is not None and not await self._leads(self._leases):
            self._on_deposed()
            return
        await self._scaling.stop()
        await self._rolling.close()
        if self._journal is not None:
            await self._journal.write_cluster(phase=Phase.STOPPING)
        supervisors = self._supervisors.copy()
        self._supervisors.clear()
        try:
            stops = [supervisor.stop() for supervisor in supervisors.values()]
            failures = await asyncio.gather(*stops, return_exceptions=True)
        finally:
            self._placement.release()
            self._members.clear()
        if self._journal is not None:
            await end_left_over(self._plan.namespace, tuple(self._journal.workers.values()))
            await self._journal.clear()
        self._leadership.end()
        for failure in failures:
            if failure is not None:
                raise failure

    async def _leads(self, leases: Leases) -> bool:
        """Whether the workers are this controller's, also if it has not heard of its successor."""
        if leases.is_given_up or self._journal is None:  # in the latter case there are none yet
            return not leases.is_given_up
        return await self._leadership.is_latest(leases)

    async def drain(self, worker: str, *, remove: bool) -> AsyncIterator[DrainStep]:
        """Drain a worker, and yield each phase, as `router.admin.Administrator` says."""
        if remove and self.open_roll is not None:
            raise CannotDrain(f"remove: {_OPEN_ROLL}")
        async for step in self._drains.drain(worker, remove=remove):
            yield step

    def leave(self, worker: str) -> AsyncIterator[DrainStep]:
        """Drain a worker that is not replaced by its own next incarnation; yield each phase."""
        return self._drains.drain(worker, remove=True)

    async def scale(self, wanted: Mapping[WorkerRole, int]) -> AsyncIterator[ScaleStep]:
        """Add and remove workers, and yield each phase; see `router.admin.Administrator`."""
        if self.open_roll is not None:
            raise CannotScale(_OPEN_ROLL)
        async for step in self._scaling.scale(wanted):
            yield step

    async def roll(self, order: RollOrder) -> AsyncIterator[ScaleStep]:
        """Replace all workers, and yield each phase; see `router.admin.Administrator`."""
        async for step in self._rolling.roll(order):
            yield step

    async def shift(self, successor: str) -> None:
        """Let routers send new requests elsewhere; see `router.admin.Administrator`."""
        try:
            Address.parse(successor or "127.0.0.1:1")
        except ValueError as error:
            raise CannotShift(f"successor: {error}") from error
        await finished(self._shift(successor))

    async def _shift(self, successor: str) -> None:
        await self._written.write_cluster(successor=successor)
        self._members.shift_to(successor)

    async def state(self) -> ClusterState:
        """The controller, and all workers that there are to be."""
        journal, leases = self._written, self._leases
        assert leases is not None
        return state_of(
            self._name,
            *(journal, leases, self._members),
            uptime_seconds=time.monotonic() - self._made,
        )

    # What scaling and rolling ask, and do.

    @property
    def staying(self) -> Mapping[str, WorkerRole]:
        """The workers that are not being removed, by name."""
        return self._drains.staying

    @property
    def names(self) -> set[str]:
        """Those that no new worker can have: of workers that have left or did not start, too."""
        return set(self._written.cluster.names)

    @property
    def revisions(self) -> Mapping[str, int]:
        """The number of each worker's revision, by name."""
        return {name: one.revision.number for name, one in self._written.workers.items()}

    @property
    def revision(self) -> Revision:
        """Of workers that are added."""
        return self._written.cluster.revision

    @property
    def previous(self) -> Revision | None:
        """What that was before the last roll; None: there was none."""
        return self._written.cluster.previous

    @property
    def is_scaling(self) -> bool:
        """Whether the number of workers is being changed."""
        return self._scaling.is_running

    @property
    def open_roll(self) -> Roll | None:
        """What is under way, or has stopped."""
        return self._written.cluster.roll

    def check_revision(self, revision: Revision) -> None:
        """Raise ValueError, which names the option, if workers cannot have it beside others."""
        self._configs.check(self.revision, revision)

    async def write_roll(self, roll: Roll) -> None:
        """A roll is about to begin or to go on, or has stopped."""
        self.metrics.rolling(roll)
        await self._written.write_cluster(roll=roll)

    async def end_roll(self, roll: Roll) -> None:
        """All workers have what the roll was for."""
        before = self.previous if roll.target == self.revision else self.revision
        self.metrics.rolled(back=roll.target.number <= self.revision.number)
        await self._written.write_cluster(revision=roll.target, previous=before, roll=None)

    async def until_up(self, name: str) -> None:
        """Wait until a worker can be told something, or does not stay."""
        while name in self.staying and name not in self.workers:
            await self._members.changed()

    async def until_removed(self, name: str) -> None:
        """Wait until nothing is left of a worker that was to leave."""
        while name in self._supervisors:
            await self._members.changed()

    async def changing(self, changes: Changes | None) -> None:
        """Changes of the number of workers are about to be made, or have been made: None."""
        await self._written.write_cluster(change=changes)

    async def add(self, name: str, role: WorkerRole, revision: Revision | None = None) -> None:
        """Start one more worker, like the first of its role, and supervise it.

        Raises ClusterError, in one line, if it does not start, or has loaded another model;
        nothing is left running then.

        Args:
            name: the worker's.
            role: the worker's.
            revision: of its options; None: what workers that are added get.
        """
        if name in self._supervisors:
            return  # a controller before this one has started it
        journal, revision = self._written, revision or self.revision
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

    async def arm(self, worker: str, faults: Sequence[Fault]) -> None:
        """Inject these faults into a worker's present incarnation, if it was built for faults."""
        await self._supervisors[worker].arm(faults)

    async def faults_fired(self, worker: str) -> int:
        """How many of the faults that were armed last in that worker have happened."""
        return await self._supervisors[worker].faults_fired()

    # What the supervisors call, as `Watcher` says.

    def worker_starting(self, name: str, weights_read: float) -> None:
        """Say so: of the cluster's start to who started it, of later ones in the log."""
        if self._progress.get(name, 1.0) == 1.0:
            what = "restarts" if name in self._supervisors else "starts"
            _log.info("%s %s: %.0f %% of its weights are read", name, what, 100 * weights_read)
        else:
            self._progress[name] = min(weights_read, 0.99)
            self._on_progress(self._progress.copy())

    def worker_live(self, info: WorkerInfo) -> None:
        """Let the router use it, and tell it of the deaths that it has missed."""
        self.metrics.started(info)
        self._told.add_worker(info.incarnation)
        self._members.add_live(info)
        self._tell_of_deaths(info)

    def worker_draining(self, info: WorkerInfo) -> None:
        """Let the router send it no more requests."""
        self.metrics.draining(info)
        self._members.add_draining(info)

    def worker_lost(self, info: WorkerInfo) -> None:
        """Let the router use it no more."""
        self._members.remove_live(info)

    async def worker_started(self, started: Started) -> None:
        """Write down who it is, before anybody can know."""
        await self._written.write_worker(started.info.name, started=started, draining=False)

    async def worker_dead(self, info: WorkerInfo, cause: WorkerEnd) -> None:
        """Tell the others, which may now release what it could still have read or written."""
        self.metrics.ended(info, cause)
        await self._told.add_death(info.incarnation)
        self._members.add_dead(info)
        if info.name in self._supervisors and self._supervisors[info.name].removing:
            self._members.remove_awaited(info)
        self._tell_all_of_deaths()

    async def worker_removed(self, name: str) -> None:
        """Give its place to the next worker, or back to Ray."""
        self._supervisors.pop(name, None)
        await self._written.remove_worker(name)
        self._placement.give_back(name)
        self._members.notify()

    def turn_to_drain(self, info: WorkerInfo) -> AbstractAsyncContextManager[None]:
        """Wait until few enough others of its role drain, or are missing."""
        return self._turns.turn(info)

    def _check_model(self, new: WorkerInfo) -> None:
        """Raise ClusterError if a new worker could not serve beside the others."""
        for old in self.workers.values():
            if difference := new.model.difference_from(old.model):
                raise ClusterError(f"{new.name} has loaded another model than others: {difference}")

    def _wanted_roles(self) -> list[WorkerRole]:
        """The roles of the workers that are to stay; any thread."""
        return [one.role for one in list(self._supervisors.values()) if not one.removing]

    def _add_started(self) -> None:
        """Let each worker that has started hear of every death, also before it has answered."""
        for record in self._written.workers.values():
            if record.started is not None:
                self._told.add_worker(record.started.info.incarnation)

    def _tell_of_deaths(self, worker: WorkerInfo) -> None:
        """Tell a worker of the deaths that it does not know of; what fails is tried again."""
        deaths = self._told
        dead = deaths.untold(worker.incarnation)
        if dead and worker.name in self._supervisors:
            self._supervisors[worker.name].tell_of_deaths(
                dead, on_told=lambda: deaths.told(worker.incarnation, dead)
            )

    def _tell_all_of_deaths(self) -> None:
        for worker in self.workers.values():
            self._tell_of_deaths(worker)

    async def _write_first_records(self) -> None:
        names = frozenset(config.name for config in self._configs.first)
        await self._written.write_cluster(names=names)
        for config in self._configs.first:
            if config.name not in self._written.workers:
                await self._written.add_worker(WorkerRecord(config.name, config.role))

    async def _start_first(self) -> None:
        """Start the workers that the cluster begins with, those excepted that run already."""
        for role in WorkerRole:
            configs = [config for config in self._configs.first if config.role is role]
            await self._place(configs)
        await self._start_all()
        await self._written.write_cluster(phase=Phase.SERVING)

    async def _place(self, configs: Sequence[WorkerConfig]) -> None:
        """Make the actors of one role's workers, each under its supervisor."""
        places = await self._placement.reserve(configs, of_workers=len(self._configs.first))
        for config in configs:
            place = self._placement.place_of(config.name)
            await self._written.write_worker(config.name, place=place)
        for config, options in zip(configs, places, strict=True):
            self._supervise(config, options)

    def _supervise(self, config: WorkerConfig, place: dict[str, Any]) -> WorkerSupervisor:
        """Make a worker's actor, under the supervisor that is known from here on."""
        self._supervisors[config.name] = supervisor = self._supervisor_of(config, place)
        return supervisor

    def _supervisor_of(self, config: WorkerConfig, place: dict[str, Any]) -> WorkerSupervisor:
        assert self._leases is not None, "the cluster was not started"
        return WorkerSupervisor(config, place, self._log_level, self._leases, self)

    async def _start_all(self) -> None:
        """Start all workers at once; the first failure ends the wait for the others."""
        starts = [asyncio.create_task(self._start_one(one)) for one in self._supervisors.values()]
        try:
            await asyncio.gather(*starts)
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)

    async def _start_one(self, supervisor: WorkerSupervisor) -> None:
        record = self._written.workers[supervisor.name]
        if record.started is None:
            await supervisor.start()
        else:
            await supervisor.adopt(record, dead=False)
        self._progress[supervisor.name] = 1.0
        self._on_progress(self._progress.copy())

    async def _adopt_all(self, journal: Journal) -> None:
        """Take over the workers of the controller before this one, and finish what it had begun."""
        adoption = Adoption(journal, self._placement, self._plan.namespace)
        self._reserved = adoption.reserved
        await adoption.run(self._configs.of_record, self._supervise, self._told.was_known)
        if journal.cluster.change is not None:
            self._scaling.resume(journal.cluster.change)
        if journal.cluster.roll is not None:
            self.metrics.rolling(journal.cluster.roll)
            self._rolling.resume(journal.cluster.roll)

    @property
    def _told(self) -> RecordedDeaths:
        """The deaths that workers are told of."""
        assert self._deaths is not None, "the cluster was not started"
        return self._deaths

    @property
    def _written(self) -> Journal:
        """What a successor is to know."""
        assert self._journal is not None, "the cluster was not started"
        return self._journal
