"""Where Ray runs the workers: a placement group for each role."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any, Final

from kvrelay.deploy.errors import ClusterError
from kvrelay.deploy.local_ray import OWN_RAY, PlacementGroupSchedulingStrategy, ray
from kvrelay.engine.config import WorkerConfig

PLACEMENT_SECONDS: Final = 30.0
"""For Ray to reserve what the workers of a role need."""


class Placement:
    """The places that a cluster has reserved in the Ray that is initialised."""

    def __init__(self) -> None:
        self._groups: list[Any] = []

    async def reserve(
        self, configs: Sequence[WorkerConfig], *, of_workers: int
    ) -> list[dict[str, Any]]:
        """Reserve a place for each worker of a role, spread over the nodes that there are.

        Raises ClusterError if there is not enough room.

        Args:
            configs: of the role's workers.
            of_workers: how many workers of all roles share the GPUs.

        Returns:
            Ray's options for each worker's actor.
        """
        if not configs:
            return []
        needs = {"CPU": 1.0}
        if configs[0].device == "cuda":
            needs["GPU"] = _gpu_share(of_workers)
        group = ray.util.placement_group([needs] * len(configs), strategy="SPREAD")
        self._groups.append(group)
        if not await asyncio.to_thread(group.wait, PLACEMENT_SECONDS):
            raise ClusterError(f"Ray has no room for {len(configs)} workers that need {needs} each")
        return [
            {
                "num_cpus": needs["CPU"],
                "num_gpus": needs.get("GPU", 0.0),
                "max_restarts": -1,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=index
                ),
            }
            for index in range(len(configs))
        ]

    async def add(self, config: WorkerConfig, *, of_workers: int) -> dict[str, Any]:
        """A place for one more worker: Ray's options for its actor.

        A Ray of our own counts a CPU for each worker that it was started for, and nobody else is
        there to share with. So one more is not counted, if it needs no GPU. Raises ClusterError if
        there is no room.

        Args:
            config: the worker's.
            of_workers: how many workers of all roles share the GPUs.
        """
        if config.device == "cpu" and OWN_RAY in ray.cluster_resources():
            return {"num_cpus": 0.0, "max_restarts": -1}
        [place] = await self.reserve([config], of_workers=of_workers)
        return place

    def release(self) -> None:
        """Give every place back to Ray."""
        groups, self._groups = self._groups, []
        for group in groups:
            ray.util.remove_placement_group(group)


def _gpu_share(workers: int) -> float:
    """The part of a GPU that each worker gets: all of it, unless workers have to share."""
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if gpus == 0:
        raise ClusterError("--device: Ray finds no GPU on this machine")
    return 1 / math.ceil(workers / gpus)
