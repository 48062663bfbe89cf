"""The workers of a cluster: started, replaced when they die, and drained on request."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

from kvrelay.deploy.bounded_waits import finished
from kvrelay.deploy.controller.changes.replacing import Rolling
from kvrelay.deploy.controller.changes.resizing import Scaling
from kvrelay.deploy.controller.changes.role_configs import WorkerConfigs
from kvrelay.deploy.controller.changes.workforce import DrainTurns, Workforce
from kvrelay.deploy.controller.cluster_report import state_of
from kvrelay.deploy.controller.records.deaths import Deaths
from kvrelay.deploy.controller.records.journal import Journal
from kvrelay.deploy.controller.records.key_value_store import InProcessStore, KeyValueStore
from kvrelay.deploy.controller.records.leadership import Leadership
from kvrelay.deploy.controller.records.leases import Leases
from kvrelay.deploy.controller.records.records import ClusterPhase, WorkerRecord
from kvrelay.deploy.controller.supervision.controller_metrics import ControllerMetrics
from kvrelay.deploy.controller.supervision.membership import Membership
from kvrelay.deploy.controller.supervision.supervisor import WorkerSupervisor
from kvrelay.deploy.controller.supervision.worker_adoption import WorkerAdoption
from kvrelay.deploy.errors import ClusterError
from kvrelay.deploy.nodes.left_over import end_left_over
from kvrelay.deploy.nodes.ray_places import PlacementPlan, RayPlaces
from kvrelay.deploy.nodes.started_worker import Started
from kvrelay.deploy.nodes.worker_end import WorkerEnd
from kvrelay.deploy.options.listen_address import Address
from kvrelay.engine.config import WorkerConfig
from kvrelay.router.discovery import Discovery
from kvrelay.router.errors import CannotShift
from kvrelay.wire.cluster_state import ClusterState
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole

_log = logging.getLogger(__name__)
_CONTROLLER_LEASE_SECONDS: Final = 15.0
BROKEN: Final = 74
"""The exit status of a process that can no longer supervise its workers.

Ray takes it for a crash and starts another controller.
"""


class Cluster:
    """A cluster's workers, each a Ray actor under a supervisor of its own. Ray must be initialised.

    `discovery` always lists the live incarnations; `start` returns when all workers are live. A
    cluster belongs to one event loop.

    Args:
        configs: one for each worker; their names differ.
        plan: says which nodes have room for which workers.
        log_level: the level of the workers' logs, which Ray prints in this process.
        on_progress: is called while the workers start for the first time. Its argument is the share
            of its weights that each worker has read, by name; 1 once it has started.
        store: says which controller is the latest one, and has its predecessors' records. If not
            given, it lies in this process, whose controller is then the only one.
        on_deposed: is called when a later controller has begun: this one must then do nothing more.
        on_broken: is called when an unexpected error has ended the renewal of this controller's
            lease. Without renewal the workers end one after the other.
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
        """The share of weights read, by worker name, while workers start for the first time."""
        self._members = Membership()
        self.discovery: Discovery = self._members.discovery
        """The list of workers that the router reads."""
        self.workers = self._members.live
        """The live incarnations by worker name; a view that changes with them."""
        self._deaths: Deaths | None = None
        self._plan = plan or PlacementPlan()
        self._placement = RayPlaces(self._plan)
        self._name = self._plan.namespace.rpartition("/")[2]
        """The cluster's name; empty if it ends with its command."""
        self._store = store or InProcessStore()
        self._on_deposed = on_deposed
        self._leadership = Leadership(self._store, on_deposed, on_broken)
        self._supervisors: dict[str, WorkerSupervisor] = {}
        self._journal: Journal | None = None
        self.took_over = False
        """Whether another controller had started the workers."""
        model = configs[0].model_name if configs else ""
        self.metrics = ControllerMetrics(model, self.discovery, self._wanted_roles)
        """Metrics of the workers' starts, drains and ends."""
        self.workforce = workforce = Workforce(
            configs=self._configs,
            members=self._members,
            supervisors=self._supervisors,
            placement=self._placement,
            metrics=self.metrics,
            journal=lambda: self._written,
            supervisor_of=self._supervisor_of,
        )
        """The part that adds and drains workers."""
        self._scaling = Scaling(workforce, lambda: self._written)
        self._rolling = Rolling(
            workforce,
            self._configs,
            lambda: self._written,
            self.metrics,
            lambda: self._scaling.is_running,
        )
        # What `Administrator` and `Watcher` name, and a part of the cluster does.
        self.drain = workforce.drain
        self.scale = self._scaling.scale
        self.roll = self._rolling.roll
        self.turn_to_drain = DrainTurns(self._members, lambda: workforce.staying).turn
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

    async def start(self) -> None:
        """Place and start every worker, or take over the previous controller's workers.

        Raises ClusterError, in one line, for the first worker that does not start; nothing is then
        left running. Workers that are taken over have started before: they run on if this fails.
        """
        try:
            self._leases = leases = await self._leadership.begin(
                self._configs.first, _CONTROLLER_LEASE_SECONDS
            )
            self._journal, before = await Journal.take_over(self._store, leases)
            self._deaths = Deaths(self._journal, before.deaths if before else ())
            self._add_started()
            self._members.discovery.shift_to(self._journal.cluster.successor)
            self.took_over = before is not None and before.cluster.phase is ClusterPhase.SERVING
            if self._journal.cluster.phase is ClusterPhase.STOPPING:
                raise ClusterError("the cluster was being stopped")
            if self._journal.cluster.phase is ClusterPhase.STARTING:
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

        If a later controller has begun, the workers are its own: only `on_deposed` is called. A
        cancellation is raised only after the workers have ended: no process outlives its cluster.
        """
        await finished(self._stop())

    async def _stop(self) -> None:
        if self._leases is not None and not await self._leads(self._leases):
            self._on_deposed()
            return
        await self._scaling.stop()
        await self._rolling.stop()
        if self._journal is not None:
            await self._journal.write_cluster(phase=ClusterPhase.STOPPING)
        supervisors = self._supervisors.copy()
        self._supervisors.clear()
        try:
            stops = [supervisor.stop() for supervisor in supervisors.values()]
            failures = await asyncio.gather(*stops, return_exceptions=True)
        finally:
            self._placement.release()
            self._members.clear()
        if self._journal is not None:
            left = {name: one.process for name, one in self._journal.workers.items()}
            await end_left_over(self._plan.namespace, left)
            await self._journal.clear()
        self._leadership.end()
        for failure in failures:
            if failure is not None:
                raise failure

    async def _leads(self, leases: Leases) -> bool:
        """Return whether the workers are this controller's, even if it knows of no successor."""
        if leases.is_given_up or self._journal is None:  # in the latter case there are none yet
            return not leases.is_given_up
        return await self._leadership.is_latest(leases)

    async def shift(self, successor: str) -> None:
        """Let routers send new requests elsewhere; see `Administrator`."""
        try:
            Address.parse(successor or "127.0.0.1:1")
        except ValueError as error:
            raise CannotShift(f"successor: {error}") from error
        await finished(self._shift(successor))

    async def _shift(self, successor: str) -> None:
        await self._written.write_cluster(successor=successor)
        self._members.discovery.shift_to(successor)

    async def state(self) -> ClusterState:
        """Return the controller's state and that of all workers that are wanted."""
        journal, leases = self._written, self._leases
        assert leases is not None
        return state_of(
            self._name,
            journal,
            leases,
            self._members,
            uptime_seconds=time.monotonic() - self._made,
        )

    # What the supervisors call, as `Watcher` says.

    def worker_starting(self, name: str, weights_read: float) -> None:
        """Report progress: at the cluster's start to `on_progress`, later in the log."""
        if self._progress.get(name, 1.0) == 1.0:
            what = "restarts" if name in self._supervisors else "starts"
            _log.info("%s %s: %.0f %% of its weights are read", name, what, 100 * weights_read)
        else:
            self._progress[name] = min(weights_read, 0.99)
            self._on_progress(self._progress.copy())

    def worker_live(self, info: WorkerInfo) -> None:
        """Let the router use the worker, and tell it of the deaths that it has missed."""
        self.metrics.started(info)
        self._told.add_worker(info.incarnation)
        self._members.add_live(info)
        self._tell_of_deaths(info)

    def worker_draining(self, info: WorkerInfo) -> None:
        """Let the router send the worker no more requests."""
        self.metrics.draining(info)
        self._members.add_draining(info)

    def worker_lost(self, info: WorkerInfo) -> None:
        """Let the router use the worker no more."""
        self._members.remove_live(info)

    async def worker_started(self, started: Started) -> None:
        """Record the worker's identity before it can be known anywhere else."""
        await self._written.write_worker(started.info.name, started=started, draining=False)

    async def worker_dead(self, info: WorkerInfo, cause: WorkerEnd) -> None:
        """Tell the other workers, which may now free memory that the dead one could access."""
        self.metrics.ended(info, cause)
        await self._told.add_death(info.incarnation)
        self._members.add_dead(info)
        if info.name in self._supervisors and self._supervisors[info.name].removing:
            self._members.remove_awaited(info)
        self._tell_all_of_deaths()

    def worker_ended(self, name: str, why: str) -> None:
        """Let operators see why the worker died."""
        self._members.note_end(name, why)

    def worker_fails_to_start(self, info: WorkerInfo) -> None:
        """Let no request wait for a successor that may never come; it is tried again."""
        _log.error("%s fails to start again and again: no request waits for it", info.name)
        self._members.remove_awaited(info)

    async def worker_removed(self, name: str) -> None:
        """Give the worker's place to the next worker, or back to Ray."""
        self._supervisors.pop(name, None)
        await self._written.remove_worker(name)
        self._placement.give_back(name)
        self._members.publish()

    def _wanted_roles(self) -> list[WorkerRole]:
        """Return the roles of the workers that are to stay; any thread may call this."""
        return [one.role for one in list(self._supervisors.values()) if not one.removing]

    def _add_started(self) -> None:
        """Let each worker that has started hear of every death, even before it has answered."""
        for record in self._written.workers.values():
            if record.started is not None:
                self._told.add_worker(record.started.info.incarnation)

    def _tell_of_deaths(self, worker: WorkerInfo) -> None:
        """Tell a worker of the deaths that it does not know of; a failed attempt is repeated."""
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
        """Start the workers that the cluster begins with, except those that run already."""
        for role in WorkerRole:
            configs = [config for config in self._configs.first if config.role is role]
            await self._place(configs)
        await self._start_all()
        await self._written.write_cluster(phase=ClusterPhase.SERVING)

    async def _place(self, configs: Sequence[WorkerConfig]) -> None:
        """Make the actors of one role's workers, each under its supervisor."""
        places = await self._placement.reserve(configs, of_workers=len(self._configs.first))
        for config in configs:
            place = self._placement.place_of(config.name)
            await self._written.write_worker(config.name, place=place)
        for config, options in zip(configs, places, strict=True):
            self._supervise(config, options)

    def _supervise(self, config: WorkerConfig, place: dict[str, Any]) -> WorkerSupervisor:
        """Make a worker's actor, under a supervisor that is registered from here on."""
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
        """Take over the previous controller's workers, and finish what it had begun."""
        adoption = WorkerAdoption(journal, self._placement, self._plan.namespace)
        await adoption.run(self._configs.of_record, self._supervise, self._told.was_known)
        self.workforce.reserved = adoption.reserved
        if journal.cluster.change is not None:
            self._scaling.resume(journal.cluster.change)
        if journal.cluster.roll is not None:
            self._rolling.resume(journal.cluster.roll)

    @property
    def _told(self) -> Deaths:
        """The record of deaths that workers are told of."""
        assert self._deaths is not None, "the cluster was not started"
        return self._deaths

    @property
    def _written(self) -> Journal:
        """The journal, which a successor reads."""
        assert self._journal is not None, "the cluster was not started"
        return self._journal


def end_broken_process() -> None:
    """End this process at once, because nothing renews its workers' leases any more.

    A detached controller's next process takes the workers over; those of `kvrelay serve` end.
    """
    logging.shutdown()
    os._exit(BROKEN)
