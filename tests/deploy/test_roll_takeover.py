"""Controllers that die while workers are replaced, and their successors; Ray is scripted.

As in test_takeover.py: the controller stops before and after each thing that it writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrelay.deploy.controller.changes.steps import RollOrder
from kvrelay.deploy.controller.cluster import Cluster
from kvrelay.deploy.controller.controller_spec import ControllerSpec
from kvrelay.deploy.controller.detached import _is_as_asked
from kvrelay.deploy.controller.records.key_value_store import InProcessStore
from kvrelay.deploy.controller.records.ordered_changes import FIRST
from kvrelay.deploy.controller.supervision.membership import Membership
from kvrelay.deploy.errors import ClusterError
from kvrelay.deploy.nodes.ray_places import PlacementPlan
from kvrelay.deploy.nodes.worker_host import WorkerHost
from kvrelay.router.errors import CannotDrain, CannotRoll, CannotScale
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole
from tests.deploy import scripted_ray
from tests.deploy.scripted_ray import (
    Act,
    Actor,
    Handle,
    World,
    count_changes,
    grow,
    make_cluster,
    scale,
    stop_all,
    succeed,
)
from tests.pairwise import few

world, make_world = scripted_ray.world, scripted_ray.make_world
"""Fixtures, which script Ray."""
OPTIONS = {"chunk_tokens": "7"}
D = WorkerRole.DECODE


async def roll(cluster: Cluster, order: RollOrder) -> list[str]:
    return [step.reason async for step in cluster.roll(order) if step.reason]


async def rolls(cluster: Cluster, world: World) -> None:
    await roll(cluster, RollOrder(OPTIONS))


async def rolls_in_place(cluster: Cluster, world: World) -> None:
    await roll(cluster, RollOrder(OPTIONS, max_surge=0, max_unavailable=1))


async def undoes(cluster: Cluster, world: World) -> None:
    await roll(cluster, RollOrder(undo=True))


async def grow_both(cluster: Cluster, world: World) -> None:
    async for _ in cluster.scale({WorkerRole.PREFILL: 2, D: 2}):
        pass


BEFORE = {"decode-0": 512, "prefill-0": 512}
BOTH_BEFORE = {f"{role}-{n}": 512 for role in ("prefill", "decode") for n in (0, 1)}


def chunks(world: World) -> dict[str, int]:
    """What the workers were told, by name."""
    return {name: one.config.chunk_tokens for name, one in world.actors.items()}


@few(1)
@pytest.mark.parametrize(
    ("prepare", "act", "before", "after"),
    [
        (scripted_ray.nothing, rolls, BEFORE, {"decode-1": 7, "prefill-1": 7}),
        (rolls, undoes, {"decode-1": 7, "prefill-1": 7}, {"decode-2": 512, "prefill-2": 512}),
        (
            *(grow_both, rolls_in_place, BOTH_BEFORE),
            {f"{role}-{n}": 7 for role in ("prefill", "decode") for n in (2, 3)},
        ),
    ],
    ids=["surge", "undo", "in-place"],
)
async def test_whenever_a_controller_dies_its_successor_goes_on_with_the_roll(
    make_world: Callable[[], World],
    tmp_path: Path,
    prepare: Act,
    act: Act,
    before: Mapping[str, int],
    after: Mapping[str, int],
):
    """Args: what is done before, what while it dies, workers and their chunks before and after."""
    first = await count_changes(tmp_path, make_world(), prepare, scripted_ray.nothing)
    last = await count_changes(tmp_path, make_world(), prepare, act)
    assert last > first + 10
    for at in range(first, last):
        world = make_world()
        async with succeed(tmp_path, world, prepare, act, at) as (cluster, there):
            assert there.keys() == world.actors.keys()
            assert chunks(world) == (before if at == first else after), at
            assert all(actor.runs for actor in world.actors.values())
            assert all(world.starts.count(name) <= 1 for name in world.starts), (at, world.starts)
            assert cluster._written.cluster.roll is None
            await stop_all(cluster, world)


@pytest.fixture
async def cluster(make_world: Callable[[], World], tmp_path: Path) -> Any:
    make_world()
    async with make_cluster(tmp_path, InProcessStore()) as cluster:
        yield cluster


def refuse(monkeypatch: pytest.MonkeyPatch, worker: str) -> None:
    """Let a worker not start."""
    answer = Actor.answer

    async def scripted(self: Actor, method: Callable[..., Any], *args: Any) -> Any:
        if method is WorkerHost.start and self.name == worker:
            raise ClusterError(f"{worker} did not start: no room")
        return await answer(self, method, *args)

    monkeypatch.setattr(Actor, "answer", scripted)


async def test_a_successor_that_does_not_start_stops_it_until_it_is_undone(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        refuse(patch, "decode-1")
        assert await roll(cluster, RollOrder(OPTIONS)) == ["decode-1 did not start: no room"]
    state = await cluster.state()
    assert state.roll is not None
    assert (state.roll.replaced, state.roll.workers) == (1, 2)
    assert state.roll.failed == "decode-1 did not start: no room"
    assert {one.name: one.revision for one in state.workers} == {"decode-0": 0, "prefill-1": 1}
    with pytest.raises(CannotScale, match=r"`kvrelay roll` goes on, --undo goes back"):
        await scale(cluster, 2)
    with pytest.raises(CannotDrain, match=r"^remove: .* --undo goes back"):
        await anext(cluster.drain("decode-0", remove=True))
    await roll(cluster, RollOrder(undo=True))
    assert sorted(cluster.workers) == ["decode-0", "prefill-2"]
    written = cluster._written.cluster
    assert (written.roll, written.revision) == (None, FIRST)
    await grow(cluster, Handle.world)
    assert chunks(Handle.world) == {"decode-0": 512, "prefill-2": 512, "decode-2": 512}


async def test_a_worker_that_dies_or_is_added_later_has_the_new_options(cluster: Cluster):
    await rolls(cluster, Handle.world)
    await grow(cluster, Handle.world)
    assert chunks(Handle.world) == {"prefill-1": 7, "decode-1": 7, "decode-2": 7}
    before = cluster.workers["decode-1"]
    Handle.world.actors["decode-1"].kill()
    while cluster.workers.get("decode-1", before) == before:
        await cluster.discovery.changed()
    assert chunks(Handle.world)["decode-1"] == 7


async def test_up_finds_its_cluster_again_by_the_options_of_the_start_and_of_the_last_roll(
    cluster: Cluster,
):
    spec = ControllerSpec("t", cluster._configs.first, PlacementPlan(), 30)
    rolled = replace(spec, configs=tuple(replace(one, chunk_tokens=7) for one in spec.configs))
    assert not await _is_as_asked(spec, rolled, cluster._store)
    await rolls(cluster, Handle.world)
    for asked in (spec, rolled):
        assert await _is_as_asked(spec, asked, cluster._store)
    other = replace(rolled, port=7)
    assert not await _is_as_asked(spec, other, cluster._store)
    assert not await _is_as_asked(spec, rolled, InProcessStore())


async def test_a_successor_with_another_model_stops_it_before_anybody_knows_of_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    start, listed = Actor._start, set[str]()

    def other(self: Actor) -> Any:
        started = start(self)
        model = replace(started.info.model, weights="other")
        self.started = replace(started, info=replace(started.info, model=model))
        return self.started

    monkeypatch.setattr(Actor, "_start", other)

    list_it = Membership.add_live

    def add_live(self: Membership, info: WorkerInfo) -> None:
        listed.add(info.name)
        list_it(self, info)

    monkeypatch.setattr(Membership, "add_live", add_live)
    [reason] = await roll(cluster, RollOrder())
    assert reason.startswith("prefill-1 has loaded another model than others: weights (other, not")
    assert sorted(cluster.workers) == ["decode-0", "prefill-0"]
    assert sorted(Handle.world.actors) == ["decode-0", "prefill-0"]
    assert not listed


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dtype": "float32"}, "dtype: workers of one cluster cannot differ"),
        ({"worker_lease": "90"}, "worker_lease: workers would have leases of 90 s"),
        ({"worker_timeout": "90"}, "worker_timeout: workers would have leases of 360 s"),
        ({"speculation": "draft"}, "speculation: the draft model belongs to the model"),
        ({"chunk_tokens": "none"}, "chunk_tokens: 'none' is not a valid integer range"),
        ({"itl-target": "0"}, "itl_target: 0.0 is not in the range x>0"),
        ({"kv_memory": "much"}, "kv_memory: "),
        ({"cuda_graph_sizes": "1,,2"}, "cuda_graph_sizes: must be numbers"),
        ({"overlap": "perhaps"}, "overlap: 'perhaps' is neither on nor off"),
    ],
)
async def test_options_that_cannot_be_are_refused(
    cluster: Cluster, options: dict[str, str], why: str
):
    with pytest.raises(CannotRoll, match=f"^{why}"):
        await roll(cluster, RollOrder(options))
    assert cluster._written.cluster.roll is None


def rolls_counted(cluster: Cluster) -> dict[str, float]:
    """By outcome, and whether one has stopped."""
    samples = [one for family in cluster.metrics.registry.collect() for one in family.samples]
    found = {s.labels["outcome"]: s.value for s in samples if s.name == "kvrelay_rolls_total"}
    [stopped] = [s.value for s in samples if s.name == "kvrelay_roll_stopped"]
    return found | {"has stopped": stopped}


async def test_what_becomes_of_rolls_is_counted(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    counted = {"done": 0, "undone": 0, "stopped": 0, "has stopped": 0}
    await roll(cluster, RollOrder(OPTIONS))
    counted["done"] += 1
    assert rolls_counted(cluster) == counted
    with monkeypatch.context() as patch:
        refuse(patch, "prefill-2")
        assert await roll(cluster, RollOrder({"chunk_tokens": "9"}))
    assert rolls_counted(cluster) == counted | {"stopped": 1, "has stopped": 1}
    await roll(cluster, RollOrder(undo=True))
    assert rolls_counted(cluster) == counted | {"stopped": 1, "undone": 1}


async def test_it_is_not_begun_while_the_cluster_is_scaled(cluster: Cluster):
    scaling = asyncio.create_task(scale(cluster, 2))
    await asyncio.sleep(0)
    with pytest.raises(CannotRoll, match="the cluster is being scaled"):
        await roll(cluster, RollOrder(OPTIONS))
    await scaling
    rolling = asyncio.create_task(roll(cluster, RollOrder(OPTIONS)))
    while cluster._written.cluster.roll is None:
        await asyncio.sleep(0)
    with pytest.raises(CannotScale):
        await scale(cluster, 3)
    await rolling
