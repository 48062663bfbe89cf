"""Which nodes prefill and decode workers get with --near; Ray itself is scripted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from kvrelay.deploy.nodes.nearness import Crowd, choose_values
from kvrelay.deploy.nodes.ray_places import PlacementPlan, RayPlaces
from kvrelay.deploy.options.machine_options import Nodes, Spread
from kvrelay.engine.config import WorkerConfig
from kvrelay.wire.worker_info import WorkerRole
from tests.deploy.test_placement import CONFIG

P, D = WorkerRole.PREFILL, WorkerRole.DECODE
CROWD = Crowd(2, {"CPU": 1.0}, Nodes(), Spread.SPREAD)
PLAN = PlacementPlan(wait_seconds=0.01, near="rack")


@dataclass
class Group:
    """Bundles, each on a node."""

    nodes: dict[int, str]

    def wait(self, seconds: float) -> bool:
        return True


@dataclass
class LabelledRay:
    """Reserves one CPU a bundle, on the last node by name that has the labels and a CPU free.

    Args:
        cpus: of each node, by its name, whose first letter is its rack.
    """

    cpus: dict[str, int]
    more: dict[str, dict[str, str]] = field(default_factory=dict)
    """Other labels of nodes."""

    def __post_init__(self) -> None:
        self.util = SimpleNamespace(
            placement_group=self._reserve,
            placement_group_table=lambda group: {"bundles_to_node_id": group.nodes},
        )
        state = SimpleNamespace(available_resources_per_node=self._free)
        self._private = SimpleNamespace(state=state)

    def cluster_resources(self) -> dict[str, float]:
        return {}

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": name, "Alive": True, "Labels": {"rack": name[0], **self.more.get(name, {})}}
            for name in self.cpus
        ]

    def _free(self) -> dict[str, dict[str, float]]:
        return {name: {"CPU": float(cpus)} for name, cpus in self.cpus.items()}

    def _reserve(
        self,
        bundles: list[Any],
        *,
        bundle_label_selector: list[dict[str, str]] | None,
        **_: Any,
    ) -> Group:
        group = Group({})
        for index, labels in enumerate(bundle_label_selector or [{}] * len(bundles)):
            fitting = [
                node["NodeID"] for node in self.nodes() if labels.items() <= node["Labels"].items()
            ]
            chosen = max(name for name in fitting if self.cpus[name])
            self.cpus[chosen] -= 1
            group.nodes[index] = chosen
        return group


class Cluster:
    """The workers of a cluster, and their nodes."""

    def __init__(self, plan: PlacementPlan = PLAN) -> None:
        self._placement = RayPlaces(plan)
        self._numbers = count()

    async def start(self, prefill: int, decode: int) -> tuple[list[str], list[str]]:
        """The nodes of the prefill workers, and of the decode workers."""
        total = prefill + decode
        return await self._reserve(P, prefill, total), await self._reserve(D, decode, total)

    async def add(self, role: WorkerRole, of_workers: int) -> str:
        """The node of one more worker."""
        return _node(await self._placement.add(self._config(role), of_workers=of_workers))

    async def _reserve(self, role: WorkerRole, number: int, total: int) -> list[str]:
        configs = [self._config(role) for _ in range(number)]
        places = await self._placement.reserve(configs, of_workers=total)
        return sorted(map(_node, places))

    def _config(self, role: WorkerRole) -> WorkerConfig:
        return replace(CONFIG, name=f"{role}-{next(self._numbers)}", role=role)


def _node(options: dict[str, Any]) -> str:
    group, index = options["scheduling_strategy"]
    node: str = group.nodes[index]
    return node


def scripted(monkeypatch: pytest.MonkeyPatch, ray: LabelledRay) -> LabelledRay:
    for module in ("ray_places", "nearness"):
        monkeypatch.setattr(f"kvrelay.deploy.nodes.{module}.ray", ray)
    monkeypatch.setattr(
        "kvrelay.deploy.nodes.ray_places.PlacementGroupSchedulingStrategy",
        lambda group, placement_group_bundle_index: (group, placement_group_bundle_index),
    )
    return ray


async def test_a_pair_comes_into_the_rack_that_has_room_for_both(monkeypatch: pytest.MonkeyPatch):
    scripted(monkeypatch, LabelledRay({"a1": 1, "a2": 1, "b1": 1, "c1": 1}))
    assert await Cluster().start(1, 1) == (["a2"], ["a1"])
    scripted(monkeypatch, LabelledRay({"a1": 1, "a2": 1, "b1": 1, "c1": 1}))
    plan = replace(PLAN, near="")
    assert await Cluster(plan).start(1, 1) == (["c1"], ["b1"]), "else the racks do not count"


async def test_pairs_are_spread_over_racks(monkeypatch: pytest.MonkeyPatch):
    scripted(monkeypatch, LabelledRay({"a1": 2, "a2": 2, "b1": 2, "b2": 2}))
    prefills, decodes = await Cluster().start(2, 6)
    assert [one[0] for one in prefills] == ["a", "b"]
    assert [one[0] for one in decodes] == ["a", "a", "a", "b", "b", "b"]


async def test_one_more_worker_comes_to_its_partners(monkeypatch: pytest.MonkeyPatch):
    scripted(monkeypatch, LabelledRay({"a1": 3, "b1": 1, "c1": 2}))
    cluster = Cluster()
    assert await cluster.start(1, 1) == (["a1"], ["a1"])
    assert await cluster.add(D, 3) == "a1"
    assert await cluster.add(D, 4) == "c1", "rack a is full, so it is placed all the same"
    assert await cluster.add(P, 5) == "c1"


async def test_the_nodes_of_the_other_role_count(monkeypatch: pytest.MonkeyPatch):
    """Rack b has most room, and no decode worker may run there."""
    nodes = {P: Nodes({"kind": "cpu"}), D: Nodes({"kind": "gpu"})}
    kinds = {"a1": {"kind": "cpu"}, "a2": {"kind": "gpu"}, "b1": {"kind": "cpu"}}
    scripted(monkeypatch, LabelledRay({"a1": 1, "a2": 1, "b1": 5}, kinds))
    assert await Cluster(replace(PLAN, nodes=nodes)).start(1, 1) == (["a1"], ["a2"])


def test_the_first_role_leaves_room_for_the_others():
    crowd = replace(CROWD, with_others=2.0)
    assert choose_values({"a": [4], "b": [1]}, {}, {"a", "b"}, crowd) == ["a", "a"]
    assert choose_values({"a": [2], "b": [2]}, {}, {"a", "b"}, crowd) == ["a", "b"]


def test_where_no_value_has_room_any_node_will_do():
    assert choose_values({"a": [1]}, {}, {"a"}, CROWD) == ["a", ""]
    assert choose_values({}, {"a": 1}, {"a"}, CROWD) == ["", ""]


def test_later_roles_follow_in_proportion():
    crowd = replace(CROWD, count=3)
    rooms = {"a": [9], "b": [9], "c": [99]}
    assert choose_values(rooms, {"a": 2, "b": 1}, {"a", "b"}, crowd) == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("spread", "expected"),
    [
        (Spread.PACK, ["b", "b"]),
        (Spread.STRICT_PACK, ["b", "b"]),
        (Spread.STRICT_SPREAD, ["a", "a"]),
    ],
)
def test_strict_spreads_can_be_kept(spread: Spread, expected: list[str]):
    crowd = replace(CROWD, spread=spread)
    assert choose_values({"a": [1, 1, 1], "b": [4]}, {}, {"a", "b"}, crowd) == expected
