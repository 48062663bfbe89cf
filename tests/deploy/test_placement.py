"""Which places are reserved in Ray, and given back; Ray itself is scripted, tests/hosts has one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvrelay.deploy.errors import ClusterError
from kvrelay.deploy.nodes.ray_places import PlacementPlan, RayPlaces
from kvrelay.deploy.options.machine_options import Spread
from kvrelay.engine.config import WorkerConfig
from kvrelay.wire.worker_info import WorkerRole

CONFIG = WorkerConfig("decode-0", WorkerRole.DECODE, Path("model"), "model")
PLAN = PlacementPlan(wait_seconds=0.01)


class ScriptedRay:
    """Reserves groups of bundles as long as there is room.

    Args:
        room: for so many bundles.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.waits: list[float] = []
        """Seconds of each wait for a group."""
        self.util = SimpleNamespace(
            placement_group=self._reserve, remove_placement_group=self._remove
        )
        self._private = SimpleNamespace(state=SimpleNamespace(available_resources_per_node=dict))

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 8.0}

    def nodes(self) -> list[Any]:
        return []

    def _reserve(self, bundles: list[Any], **_: Any) -> SimpleNamespace:
        reserved = len(bundles) if len(bundles) <= self.room else 0
        self.room -= reserved

        def wait(seconds: float) -> bool:
            self.waits.append(seconds)
            return reserved > 0

        return SimpleNamespace(bundles=reserved, wait=wait)

    def _remove(self, group: SimpleNamespace) -> None:
        self.room += group.bundles


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> ScriptedRay:
    scripted = ScriptedRay(room=3)
    monkeypatch.setattr("kvrelay.deploy.nodes.ray_places.ray", scripted)
    monkeypatch.setattr(
        "kvrelay.deploy.nodes.ray_places.PlacementGroupSchedulingStrategy",
        lambda group, placement_group_bundle_index: (id(group), placement_group_bundle_index),
    )
    return scripted


def named(number: int) -> WorkerConfig:
    return replace(CONFIG, name=f"decode-{number}")


async def test_an_added_workers_place_is_rays_again(ray: ScriptedRay):
    placement = RayPlaces(PLAN)
    await placement.reserve([named(0), named(1)], of_workers=2)
    for number in range(2, 5):
        await placement.add(named(number), of_workers=3)
        assert ray.room == 0
        with pytest.raises(ClusterError, match=r"^Ray has no room for 1 decode workers"):
            await placement.add(named(9), of_workers=4)
        placement.give_back(f"decode-{number}")
        placement.give_back(f"decode-{number}")
        assert ray.room == 1
    placement.release()
    assert ray.room == 3


async def test_ray_is_asked_to_wait_for_whole_seconds(ray: ScriptedRay):
    with pytest.raises(ClusterError, match="no room"):
        await RayPlaces(PLAN).reserve([named(number) for number in range(4)], of_workers=4)
    assert ray.waits
    assert all(seconds >= 1 and seconds == int(seconds) for seconds in ray.waits)


async def test_a_place_among_others_is_the_next_workers_of_the_role(ray: ScriptedRay):
    placement = RayPlaces(PLAN)
    _, second = await placement.reserve([named(0), named(1)], of_workers=2)
    placement.give_back("decode-1")
    assert ray.room == 1, "the group is still used"
    prefill = replace(CONFIG, name="prefill-0", role=WorkerRole.PREFILL)
    other = await placement.add(prefill, of_workers=2)
    assert other["scheduling_strategy"] != second["scheduling_strategy"]
    third = await placement.add(named(2), of_workers=3)
    assert third["scheduling_strategy"] == second["scheduling_strategy"]
    for name in ("decode-0", "decode-2", "prefill-0"):
        placement.give_back(name)
    assert ray.room == 3


@pytest.mark.parametrize("spread", [Spread.STRICT_SPREAD, Spread.STRICT_PACK])
async def test_a_strict_spread_holds_for_every_worker_or_it_is_not_added(
    ray: ScriptedRay, spread: Spread
):
    placement = RayPlaces(replace(PLAN, spread=spread))
    _, second = await placement.reserve([named(0), named(1)], of_workers=2)
    with pytest.raises(ClusterError, match=f"^--spread: {spread} holds for the workers of the"):
        await placement.add(named(2), of_workers=3)
    placement.give_back("decode-1")
    third = await placement.add(named(3), of_workers=2)
    assert third["scheduling_strategy"] == second["scheduling_strategy"]
