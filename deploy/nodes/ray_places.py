"""The workers' places in Ray: a placement group for each role."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvrelay.deploy.errors import ClusterError
from kvrelay.deploy.nodes.local_ray import OWN_RAY, PlacementGroupSchedulingStrategy, ray
from kvrelay.deploy.nodes.named_groups import find_groups, group_name
from kvrelay.deploy.nodes.nearness import Crowd, labels_near
from kvrelay.deploy.nodes.started_worker import ActorPlace
from kvrelay.deploy.options.machine_options import MachineOptions, Nodes, Spread
from kvrelay.engine.config import WorkerConfig
from kvrelay.wire.worker_info import WorkerRole

_log = logging.getLogger(__name__)
_SAY_SECONDS: Final = 10.0
"""The time between two log lines about a wait for Ray."""
_PARTNERS: Final = {
    WorkerRole.PREFILL: WorkerRole.DECODE,
    WorkerRole.DECODE: WorkerRole.PREFILL,
}
"""The role that hands KV over to, or takes it over from, each role."""


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """The resources that a worker takes of its node, and the nodes that may have which workers."""

    cpus: int = 1
    gpus: float | None = None
    """GPUs of one worker on --device cuda; None: an equal share of all that Ray has."""
    nodes: Mapping[WorkerRole, Nodes] = field(default_factory=dict)
    spread: Spread = Spread.SPREAD
    near: str = ""
    """The label whose values say which prefill and decode workers are near each other."""
    wait_seconds: float = 30.0
    """The time that Ray has to reserve the places of a role's workers."""
    names_actors: bool = False
    """Whether an actor has its worker's name in Ray's namespace, where no other can have it."""
    namespace: str = ""
    """Ray's namespace of actors and groups that outlive their maker; empty: they do not."""

    @classmethod
    def from_options(cls, options: MachineOptions) -> PlacementPlan:
        """Make the plan from the options."""
        return cls(
            cpus=options.worker_cpus,
            gpus=1.0 if options.worker_gpus is None and options.joins_ray else options.worker_gpus,
            nodes={role: options.nodes_for(role) for role in WorkerRole},
            spread=options.spread,
            near=options.near,
            wait_seconds=options.placement_timeout,
            names_actors=options.joins_ray,
        )


@dataclass(frozen=True, slots=True)
class _Bundle:
    """A worker's place in a placement group."""

    role: WorkerRole
    needs: Mapping[str, float]
    group: Any
    index: int
    group_name: str = ""


class RayPlaces:
    """The places that a cluster has reserved in the Ray that is initialised."""

    def __init__(self, plan: PlacementPlan | None = None) -> None:
        self._plan = PlacementPlan() if plan is None else plan
        self._groups: list[Any] = []
        self._bundles: dict[str, _Bundle] = {}
        """The bundles in use, by worker name."""
        self._free: list[_Bundle] = []
        """The bundles of workers that have left, in groups that other workers still use."""

    async def reserve(
        self, configs: Sequence[WorkerConfig], *, of_workers: int
    ) -> list[dict[str, Any]]:
        """Reserve a place for each worker of a role.

        Raises ClusterError, in one line, if there is not enough room in time, or if another cluster
        of this name runs.

        Args:
            configs: the configurations of the role's workers.
            of_workers: the number of workers of all roles that share the GPUs.

        Returns:
            Ray's options for each worker's actor.
        """
        if not configs:
            return []
        namespace = self._plan.namespace
        if self._plan.names_actors and not namespace and not self._groups:
            await asyncio.to_thread(check_name_is_free)
        role = configs[0].role
        nodes = self._plan.nodes.get(role, Nodes())
        needs = self._needs(configs[0], nodes, of_workers)
        name = group_name(namespace, configs[0].name) if namespace else ""
        found = await asyncio.to_thread(find_groups, namespace) if namespace else {}
        group = found.get(name)
        if group is None:
            crowd = Crowd(len(configs), needs, nodes, self._plan.spread, of_workers / len(configs))
            labels = await asyncio.to_thread(self._labels, role, crowd)
            group = ray.util.placement_group(
                [needs] * len(configs),
                strategy=self._plan.spread.strategy,
                name=name,
                lifetime="detached" if namespace else None,
                bundle_label_selector=labels if any(labels) else None,
            )
        self._groups.append(group)
        what = f"{len(configs)} {role} workers, {_amounts(needs)} each"
        try:
            await self._wait(group, what, nodes, needs)
        except BaseException:
            self._groups.remove(group)
            ray.util.remove_placement_group(group)
            raise
        return [
            self._take(config, _Bundle(role, needs, group, index, name))
            for index, config in enumerate(configs)
        ]

    async def add(self, config: WorkerConfig, *, of_workers: int) -> dict[str, Any]:
        """Find a place for one more worker; return Ray's options for its actor.

        A Ray of our own has a CPU for each worker that it was started for, and no other users. So a
        further worker is not counted there, if it needs no GPU. Elsewhere it gets the place of a
        worker that has left, or a new place. Raises ClusterError if there is no room, or if Ray
        cannot place a new one as --spread says.

        Args:
            config: the worker's configuration.
            of_workers: the number of workers of all roles that share the GPUs.
        """
        if config.device == "cpu" and OWN_RAY in ray.cluster_resources():
            return self._uncounted(config)
        left = next((bundle for bundle in self._free if bundle.role is config.role), None)
        if left is not None:
            self._free.remove(left)
            return self._take(config, left)
        if self._plan.spread in (Spread.STRICT_SPREAD, Spread.STRICT_PACK):
            raise ClusterError(
                f"--spread: {self._plan.spread} holds for the workers of the start, not for more"
            )
        [place] = await self.reserve([config], of_workers=of_workers)
        return place

    def adopt(
        self,
        configs: Mapping[str, WorkerConfig],
        places: Mapping[str, ActorPlace | None],
        *,
        placing: Collection[str],
        of_workers: int,
    ) -> dict[str, dict[str, Any]]:
        """Take over the places that another controller has reserved. Blocks.

        Groups in which no worker has a place, or is about to get one, are given back to Ray.

        Args:
            configs: the workers' configurations, by name.
            places: the workers' places, by name; None: Ray counts none for it.
            placing: the names of workers that are about to get a place.
            of_workers: the number of workers of all roles that share the GPUs.

        Returns:
            Ray's options for their actors, by name.
        """
        groups = find_groups(self._plan.namespace)
        options = {}
        used: dict[str, set[int]] = {}
        for name, place in places.items():
            config = configs[name]
            if place is None:
                options[name] = self._uncounted(config)
                continue
            used.setdefault(place.group, set()).add(place.index)
            needs = self._needs(config, self._plan.nodes.get(config.role, Nodes()), of_workers)
            group = groups[place.group]
            bundle = _Bundle(config.role, needs, group, place.index, place.group)
            options[name] = self._take(config, bundle)
        for coming in placing:
            groups.pop(group_name(self._plan.namespace, coming), None)
        for name, group in groups.items():
            if name in used:
                self._groups.append(group)
                like = next(one for one in self._bundles.values() if one.group_name == name)
                free = set(range(group.bundle_count)) - used[name]
                self._free += [replace(like, index=index) for index in free]
            else:
                ray.util.remove_placement_group(group)
        return options

    def place_of(self, name: str) -> ActorPlace | None:
        """Return a worker's place; None: it has none that Ray counts."""
        bundle = self._bundles.get(name)
        return None if bundle is None else ActorPlace(bundle.group_name, bundle.index)

    def give_back(self, name: str) -> None:
        """Free the place of a worker that has left for good, for another of its role or for Ray.

        Ray takes back only whole groups, so a place in a group that others use is kept.
        """
        bundle = self._bundles.pop(name, None)
        if bundle is None:
            return
        self._free.append(bundle)
        if not any(other.group is bundle.group for other in self._bundles.values()):
            self._free = [other for other in self._free if other.group is not bundle.group]
            self._groups.remove(bundle.group)
            ray.util.remove_placement_group(bundle.group)

    def release(self) -> None:
        """Give every place back to Ray."""
        groups, self._groups = self._groups, []
        self._bundles.clear()
        self._free.clear()
        for group in groups:
            ray.util.remove_placement_group(group)

    def _labels(self, role: WorkerRole, crowd: Crowd) -> list[dict[str, str]]:
        """Return the labels of the nodes for each worker of a role. Blocks."""
        partner = _PARTNERS.get(role)
        if not self._plan.near or partner is None:
            return [dict(crowd.nodes.labels)] * crowd.count
        crowd = replace(crowd, partners=self._plan.nodes.get(partner, Nodes()))
        others = [_node_of(one) for one in self._bundles.values() if one.role is partner]
        return labels_near(self._plan.near, crowd, others)

    def _needs(self, config: WorkerConfig, nodes: Nodes, of_workers: int) -> dict[str, float]:
        needs = {"CPU": float(self._plan.cpus), **nodes.resources}
        if config.device == "cuda":
            gpus = self._plan.gpus
            needs["GPU"] = _gpu_share(of_workers) if gpus is None else gpus
        return needs

    async def _wait(self, group: Any, what: str, nodes: Nodes, needs: Mapping[str, float]) -> None:
        """Wait until Ray has reserved a group; log now and then why it has not."""
        give_up_at = time.monotonic() + self._plan.wait_seconds
        while True:
            left = give_up_at - time.monotonic()
            # Ray waits for whole seconds: a part of one would be none, again and again.
            if await asyncio.to_thread(group.wait, math.ceil(max(0.01, min(left, _SAY_SECONDS)))):
                return
            why = await asyncio.to_thread(_what_lacks, nodes, needs)
            line = f"Ray has no room for {what}: {why}"
            if time.monotonic() >= give_up_at:
                raise ClusterError(line)
            _log.warning("%s; waiting for more nodes, or for others to end", line)

    def _take(self, config: WorkerConfig, bundle: _Bundle) -> dict[str, Any]:
        """Give a bundle to a worker; return Ray's options for its actor."""
        self._bundles[config.name] = bundle
        needs = bundle.needs
        options = {
            "num_cpus": needs["CPU"],
            "num_gpus": needs.get("GPU", 0.0),
            "resources": {key: needs[key] for key in needs if key not in ("CPU", "GPU")},
            "max_restarts": -1,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                bundle.group, placement_group_bundle_index=bundle.index
            ),
        }
        return options | self._lasting(config)

    def _uncounted(self, config: WorkerConfig) -> dict[str, Any]:
        """Return Ray's options for an actor that takes nothing that Ray counts."""
        return {"num_cpus": 0.0, "max_restarts": -1} | self._lasting(config)

    def _lasting(self, config: WorkerConfig) -> dict[str, Any]:
        """Return Ray's options that name an actor, and let it outlive the process that made it."""
        if self._plan.namespace:
            return {
                "name": config.name,
                "namespace": self._plan.namespace,
                "lifetime": "detached",
                "get_if_exists": True,
            }
        return {"name": config.name} if self._plan.names_actors else {}


def _node_of(bundle: _Bundle) -> str:
    """Return the id of the node where a bundle is; empty while it has none."""
    table = ray.util.placement_group_table(bundle.group)
    node: str = table.get("bundles_to_node_id", {}).get(bundle.index, "")
    return node


def check_name_is_free() -> None:
    """Raise ClusterError if Ray's namespace already has workers."""
    if any(name.rpartition("-")[0] in set(WorkerRole) for name in ray.util.list_named_actors()):
        raise name_is_taken()


def name_is_taken() -> ClusterError:
    """Return the error for a cluster's name that another cluster has."""
    _, _, name = ray.get_runtime_context().namespace.rpartition("/")
    return ClusterError(f"--cluster-name: {name} runs in this Ray already")


def _gpu_share(workers: int) -> float:
    """Return the part of a GPU that each worker gets: all of it, unless workers have to share."""
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if gpus == 0:
        raise ClusterError("--device: Ray finds no GPU on this machine")
    return 1 / math.ceil(workers / gpus)


def _what_lacks(nodes: Nodes, needs: Mapping[str, float]) -> str:
    """Say in words what each living node lacks for one worker."""
    free = ray._private.state.available_resources_per_node()
    lines = []
    for node in ray.nodes():
        if node["Alive"]:
            lack = _lack(nodes, needs, node.get("Labels") or {}, free.get(node["NodeID"], {}))
            lines.append(f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}) {lack}")
    return "; ".join(sorted(lines)) or "it has no nodes"


def _lack(
    nodes: Nodes,
    needs: Mapping[str, float],
    labels: Mapping[str, str],
    free: Mapping[str, float],
) -> str:
    unlike = [f"{key}={value}" for key, value in nodes.labels.items() if labels.get(key) != value]
    if unlike:
        return f"is not {' and '.join(unlike)}"
    short = [f"{free.get(key, 0):g} {key}" for key in needs if free.get(key, 0) < needs[key]]
    return f"has {' and '.join(short)} free" if short else "has room for one"


def _amounts(needs: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {key}" for key, amount in needs.items())
