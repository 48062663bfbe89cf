"""The workers of a cluster: placed, supervised and discovered through Ray."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType, TracebackType
from typing import Any, Self

from kvrelay.deploy.errors import ClusterError
from kvrelay.deploy.local_ray import PlacementGroupSchedulingStrategy, ray
from kvrelay.deploy.options import DEFAULT_WORKER_TIMEOUT
from kvrelay.deploy.supervisor import WorkerSupervisor
from kvrelay.engine.config import Role, WorkerConfig, WorkerInfo
from kvrelay.engine.faults import Fault
from kvrelay.router.admin import DrainPhase, DrainStep
from kvrelay.router.discovery import Discovery, StaticDiscovery, WorkerEndpoint, WorkerRole
from kvrelay.router.errors import CannotDrain, UnknownWorker

_PLACEMENT_SECONDS = 30.0


class Cluster:
    """One Ray actor a worker, each under its supervisor; in the Ray that is initialised.

    Each role has a placement group. `discovery` holds the incarnations that are
    live, at every moment; `start` returns when all of them are. Belongs to one
    event loop.

    Args:
        configs: the workers; their names differ.
        log_level: of the workers' processes, whose log comes out at Ray's driver.
        worker_timeout: seconds without an answer of its engine after which a worker is
            killed, and another takes its place.
        on_start: told of each worker as it comes up for the first time.
    """

    def __init__(
        self,
        configs: Sequence[WorkerConfig],
        *,
        log_level: int = logging.WARNING,
        worker_timeout: float = DEFAULT_WORKER_TIMEOUT,
        on_start: Callable[[WorkerInfo], None] = lambda info: None,
    ) -> None:
        self._configs = tuple(configs)
        self._log_level = log_level
        self._worker_timeout = worker_timeout
        self._on_start = on_start
        self._live: dict[str, WorkerInfo] = {}
        self._dead: list[WorkerInfo] = []  # every one there ever was: one for each restart
        self._draining: dict[str, WorkerInfo] = {}  # until their successors are live
        self._discovery = StaticDiscovery()
        self._groups: list[Any] = []
        self._supervisors: list[WorkerSupervisor] = []

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
        """What a router is handed."""
        return self._discovery

    @property
    def workers(self) -> Mapping[str, WorkerInfo]:
        """The live incarnations by worker name; a view that changes with them."""
        return MappingProxyType(self._live)

    async def start(self) -> None:
        """Place and start every worker.

        Raises ClusterError, in one line, for the first that does not start;
        nothing is left running then.
        """
        try:
            for role in Role:
                await self._place([config for config in self._configs if config.role is role])
            await self._start_all()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End every worker, in good order where it can, and give back what it took of Ray."""
        supervisors, self._supervisors = self._supervisors, []
        await asyncio.gather(*(supervisor.stop() for supervisor in supervisors))
        groups, self._groups = self._groups, []
        for group in groups:
            ray.util.remove_placement_group(group)
        self._live.clear()
        self._draining.clear()
        self._publish()

    async def drain(self, worker: str, *, remove: bool) -> AsyncIterator[DrainStep]:
        """See `router.admin.Administrator`."""
        info, supervisor = self._to_drain(worker, remove)
        before = self._draining.get(worker)
        self.worker_draining(info)  # before it can have left: its successor is waited for
        try:
            await supervisor.drain(remove=remove)
        except ClusterError as error:
            if before is None and self._draining.get(worker) == info:
                del self._draining[worker]
                self._publish()
            raise CannotDrain(str(error)) from error
        yield DrainStep(DrainPhase.DRAINING, info.incarnation)
        while info not in self._dead:
            await self._discovery.changed()
        yield DrainStep(DrainPhase.LEFT, info.incarnation)
        if remove:
            return
        while worker not in self._live:
            await self._discovery.changed()
        yield DrainStep(DrainPhase.READY, self._live[worker].incarnation)

    def _to_drain(self, worker: str, remove: bool) -> tuple[WorkerInfo, WorkerSupervisor]:
        """The worker's life and who follows it; see `drain` for what it raises."""
        staying = {one.name: one for one in self._supervisors if not one.removing}
        if worker not in staying:
            raise UnknownWorker(worker, staying)
        if worker not in self._live:
            raise CannotDrain(f"worker: {worker} is not up; another one is on its way")
        role = staying[worker].role
        if remove and [one.role for one in staying.values()].count(role) == 1:
            raise CannotDrain(f"remove: {worker} is the last {role} worker")
        return self._live[worker], staying[worker]

    async def arm(self, name: str, faults: Sequence[Fault]) -> None:
        """Let these go wrong in a worker's present life, if it was built for faults."""
        await self._supervisor(name).arm(faults)

    async def faults_fired(self, name: str) -> int:
        """Of those armed last in that worker, how many have happened."""
        return await self._supervisor(name).faults_fired()

    def _supervisor(self, name: str) -> WorkerSupervisor:
        return next(one for one in self._supervisors if one.name == name)

    def worker_live(self, info: WorkerInfo) -> None:
        """See `Watcher`. What died while it could not be reached is told to it now."""
        self._draining.pop(info.name, None)
        self._live[info.name] = info
        self._publish()
        self._tell(info.name, self._dead)

    def worker_draining(self, info: WorkerInfo) -> None:
        """See `Watcher`."""
        self._draining[info.name] = info
        self._publish()

    def worker_lost(self, info: WorkerInfo) -> None:
        """See `Watcher`."""
        del self._live[info.name]
        self._publish()

    def worker_dead(self, info: WorkerInfo) -> None:
        """See `Watcher`. The others may now let go of what it could still have read or written."""
        self._dead.append(info)
        if any(one.removing for one in self._supervisors if one.name == info.name):
            self._draining.pop(info.name, None)
        self._publish()
        for name in self._live:
            self._tell(name, [info])

    def _tell(self, name: str, dead: Sequence[WorkerInfo]) -> None:
        """Tell a worker which of the others' incarnations are dead."""
        incarnations = [info.incarnation for info in dead if info.name != name]
        if not incarnations:
            return
        for supervisor in self._supervisors:
            if supervisor.name == name:
                supervisor.tell_of_deaths(incarnations)

    async def _place(self, configs: Sequence[WorkerConfig]) -> None:
        """Reserve one role's places, spread over what nodes there are, and make its actors."""
        if not configs:
            return
        needs = {"CPU": 1.0}
        if configs[0].device == "cuda":
            needs["GPU"] = self._gpu_share()
        group = ray.util.placement_group([needs] * len(configs), strategy="SPREAD")
        self._groups.append(group)
        if not await asyncio.to_thread(group.wait, _PLACEMENT_SECONDS):
            raise ClusterError(f"Ray has no room for {len(configs)} workers that need {needs} each")
        for index, config in enumerate(configs):
            options = {
                "num_cpus": needs["CPU"],
                "num_gpus": needs.get("GPU", 0.0),
                "max_restarts": -1,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=index
                ),
            }
            self._supervisors.append(
                WorkerSupervisor(config, options, self._log_level, self._worker_timeout, self)
            )

    def _gpu_share(self) -> float:
        """What each worker gets of a GPU: a whole one, or an equal part if they are too few."""
        gpus = int(ray.cluster_resources().get("GPU", 0))
        if gpus == 0:
            raise ClusterError("--device: Ray finds no GPU on this machine")
        return 1 / math.ceil(len(self._configs) / gpus)

    async def _start_all(self) -> None:
        """Start all workers at once; the first failure ends the wait for the others."""
        starts = [asyncio.create_task(self._start_one(one)) for one in self._supervisors]
        try:
            await asyncio.gather(*starts)
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)

    async def _start_one(self, supervisor: WorkerSupervisor) -> None:
        self._on_start(await supervisor.start())

    def _publish(self) -> None:
        listed = self._live | self._draining
        self._discovery.replace(
            [
                replace(endpoint_of(listed[name]), draining=name in self._draining)
                for name in sorted(listed)
            ]
        )


def endpoint_of(info: WorkerInfo) -> WorkerEndpoint:
    """What a router is to know of a worker."""
    return WorkerEndpoint(
        worker=info.name,
        role=WorkerRole(info.role.value),
        incarnation=info.incarnation,
        address=info.address,
        metrics_address=info.metrics_address,
        pool_tokens=info.pool_tokens,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        architecture=info.architecture,
        eos_token_ids=info.eos_token_ids,
    )
