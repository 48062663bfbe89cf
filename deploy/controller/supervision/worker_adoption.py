"""Adoption of the workers that a controller's predecessor has left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kvrelay.deploy.controller.records.journal import Journal
from kvrelay.deploy.controller.records.records import WorkerRecord
from kvrelay.deploy.controller.supervision.supervisor import WorkerSupervisor
from kvrelay.deploy.nodes.left_over import end_left_over
from kvrelay.deploy.nodes.ray_places import RayPlaces
from kvrelay.engine.config import WorkerConfig

ConfigOf = Callable[[WorkerRecord], WorkerConfig]
Supervise = Callable[[WorkerConfig, dict[str, Any]], WorkerSupervisor]


class WorkerAdoption:
    """The take-over of workers that a previous controller has started or placed.

    It supervises those that have started, and undoes the starts that are no longer wanted.

    A worker that a scaling or a roll was about to start keeps its place, in `reserved`. The code
    that resumes the scaling or the roll uses it there.

    Args:
        journal: has the records of the controller before this one.
        placement: is told where the workers are.
        namespace: Ray's namespace of the workers' actors; empty if they end with their controller.
    """

    def __init__(self, journal: Journal, placement: RayPlaces, namespace: str) -> None:
        self._journal = journal
        self._placement = placement
        self._namespace = namespace
        change, roll = journal.cluster.change, journal.cluster.roll
        self._coming = {name for name, _ in change.added} if change else set()
        self._coming |= roll.coming if roll else set()
        self.reserved: dict[str, dict[str, Any]] = {}
        """Ray's options for each worker that has a place, and was not started yet, by name."""

    async def run(
        self, config_of: ConfigOf, supervise: Supervise, was_known_dead: Callable[[str], bool]
    ) -> None:
        """Return when each started worker has answered, or has failed to answer in time.

        Args:
            config_of: returns the configuration of the worker with this record.
            supervise: makes a worker's supervisor and registers it with its watcher.
            was_known_dead: says whether this incarnation's process is known to have ended.
        """
        adoptions = []
        for name, (config, options) in (await self._placed(config_of)).items():
            record = self._journal.workers[name]
            if record.started is None:
                self.reserved[name] = options
            else:
                dead = was_known_dead(record.started.info.incarnation)
                adoptions.append(supervise(config, options).adopt(record, dead=dead))
        await asyncio.gather(*adoptions)
        await self._undo()

    async def _placed(self, config_of: ConfigOf) -> dict[str, tuple[WorkerConfig, dict[str, Any]]]:
        """Return configuration and Ray options, by name, of each worker that has its place."""
        there = {
            name: one
            for name, one in self._journal.workers.items()
            if one.started is not None or one.place is not None
        }
        configs = {name: config_of(one) for name, one in there.items()}
        options = await asyncio.to_thread(
            self._placement.adopt,
            configs,
            {name: one.place for name, one in there.items()},
            placing=self._coming - there.keys(),
            of_workers=len(there),
        )
        return {name: (config, options[name]) for name, config in configs.items()}

    async def _undo(self) -> None:
        """End and forget the workers whose start was under way and is no longer wanted."""
        undone = {
            name: one.process
            for name, one in self._journal.workers.items()
            if one.started is None and name not in self._coming
        }
        await end_left_over(self._namespace, undone)
        for name in undone:
            await self._journal.remove_worker(name)
            self._placement.give_back(name)
