"""Controllers that die between any two things that they do, and their successors; Ray is scripted.

tests/cluster/test_controller.py kills real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay.deploy.controller.records.journal import Journal
from kvrelay.deploy.controller.records.key_value_store import InProcessStore
from kvrelay.deploy.controller.records.records import ClusterPhase, WorkerRecord
from tests.deploy import scripted_ray
from tests.deploy.scripted_ray import (
    SECONDS,
    Act,
    D,
    Handle,
    Stopping,
    World,
    abandon,
    count_changes,
    drain,
    grow,
    lead,
    lose,
    make_cluster,
    nothing,
    scale,
    settled,
    shrink,
    stop_all,
    succeed,
)
from tests.deploy.test_placement import CONFIG

world, make_world = scripted_ray.world, scripted_ray.make_world
"""Fixtures, which script Ray."""


@pytest.mark.parametrize(
    ("prepare", "act", "either", "starts"),
    [
        (nothing, nothing, [{"decode-0", "prefill-0"}], {"decode-0": 1, "prefill-0": 1}),
        (grow, lose, [{"decode-0", "decode-1", "prefill-0"}], {"decode-0": 1}),
        (grow, drain, [{"decode-0", "decode-1", "prefill-0"}], {"decode-0": 1}),
        (
            shrink,
            grow,
            [{"decode-0", "prefill-0"}, {"decode-0", "decode-1", "prefill-0"}],
            {"decode-1": 1},
        ),
        (
            grow,
            shrink,
            [{"decode-0", "decode-1", "prefill-0"}, {"decode-0", "prefill-0"}],
            {},
        ),
    ],
    ids=["start", "replace", "drain", "grow", "shrink"],
)
async def test_whenever_a_controller_dies_its_successor_goes_on(
    make_world: Callable[[], World],
    tmp_path: Path,
    prepare: Act,
    act: Act,
    either: list[set[str]],
    starts: dict[str, int],
):
    """Args: what is done before, what while it dies, how it may end, how many starts at most."""
    prepared = await count_changes(tmp_path, make_world(), prepare, nothing)
    first = 0 if prepare is nothing else prepared
    last = await count_changes(tmp_path, make_world(), prepare, act)
    assert last > first + 3
    for at in range(first, last):
        world = make_world()
        async with succeed(tmp_path, world, prepare, act, at) as (cluster, there):
            assert set(there) in either, at
            assert set(world.actors) == set(there)
            assert all(actor.runs for actor in world.actors.values())
            counts = {name: world.starts.count(name) for name in world.starts}
            assert all(count <= starts.get(name, 0) for name, count in counts.items()), (at, counts)
            await stop_all(cluster, world)


async def test_who_has_shared_memory_with_the_dead_hears_of_it_from_a_successor(
    make_world: Callable[[], World], tmp_path: Path
):
    """Whether or not the controller that saw the death had told anybody."""
    first = await count_changes(tmp_path, make_world(), nothing, nothing)
    last = await count_changes(tmp_path, make_world(), nothing, lose)
    for at in range(first, last):
        world = make_world()
        async with succeed(tmp_path, world, nothing, lose, at) as (_, there):
            lost = there["decode-0"] != "decode-0-1"
            assert world.actors["prefill-0"].told == ({"decode-0-1"} if lost else set()), at


async def test_who_is_slow_to_answer_a_successor_hears_of_a_death_that_it_finds_meanwhile(
    make_world: Callable[[], World], tmp_path: Path
):
    store, world = Stopping(), make_world()
    await lead(tmp_path, store, world, nothing, nothing)
    prefill, decode = world.actors["prefill-0"], world.actors["decode-0"]
    decode.kill()
    prefill.may_answer.clear()
    successor = InProcessStore()
    successor._values = store._values
    before = asyncio.all_tasks()
    cluster = make_cluster(tmp_path, successor)
    starting = asyncio.create_task(cluster.start())
    async with asyncio.timeout(SECONDS):
        while not decode.runs:  # its successor has been started, so it was found dead
            await asyncio.sleep(0.002)
        prefill.may_answer.set()
        await starting
    await settled(cluster)
    assert prefill.told == {"decode-0-1"}
    await cluster.stop()
    await abandon(before)


async def test_a_cluster_that_was_being_stopped_is_stopped(
    make_world: Callable[[], World], tmp_path: Path
):
    store, world = InProcessStore(), make_world()
    before = asyncio.all_tasks()
    cluster = make_cluster(tmp_path, store)
    await cluster.start()
    await cluster._written.write_cluster(phase=ClusterPhase.STOPPING)
    await abandon(before)
    successor = make_cluster(tmp_path, store)
    with pytest.raises(Exception, match="the cluster was being stopped"):
        await asyncio.wait_for(successor.start(), SECONDS)
    assert not world.actors


@pytest.mark.parametrize("knows", [True, False], ids=["knows", "does not know"])
async def test_a_controller_that_has_a_successor_ends_none_of_the_workers(
    make_world: Callable[[], World], tmp_path: Path, knows: bool
):
    """It may have learnt so from a worker; it is told to stop before it asks the store again."""
    store, world = InProcessStore(), make_world()
    before = asyncio.all_tasks()
    deposed: list[int] = []
    cluster = make_cluster(tmp_path, store, lambda: deposed.append(len(world.actors)))
    await cluster.start()
    successor = make_cluster(tmp_path, store)
    await asyncio.wait_for(successor.start(), SECONDS)
    there = await settled(successor)
    assert cluster._leases is not None
    if knows:
        cluster._leases.give_up()
    await asyncio.wait_for(cluster.stop(), SECONDS)
    assert deposed == [2], "its process would have ended here, before anything else"
    assert await settled(successor) == there
    assert set(world.actors) == set(there)
    assert all(actor.runs for actor in world.actors.values())
    assert len(world.groups) == 2
    assert world.starts == ["prefill-0", "decode-0"]
    await abandon(before)


async def test_a_worker_that_no_change_starts_any_more_is_ended_and_its_place_given_back(
    make_world: Callable[[], World], tmp_path: Path
):
    store, world = InProcessStore(), make_world()
    before = asyncio.all_tasks()
    cluster = make_cluster(tmp_path, store)
    await cluster.start()
    place = await cluster._placement.add(replace(CONFIG, name="decode-1"), of_workers=3)
    Handle(replace(CONFIG, name="decode-1"), place, 30)
    reserved = cluster._placement.place_of("decode-1")
    await cluster._written.add_worker(WorkerRecord("decode-1", D, reserved))
    assert len(world.groups) == len(world.actors) == 3
    await abandon(before)
    successor = make_cluster(tmp_path, store)
    await asyncio.wait_for(successor.start(), SECONDS)
    assert set(await settled(successor)) == set(world.actors) == {"prefill-0", "decode-0"}
    assert set(world.groups) == {"kvrelay/t/prefill-0", "kvrelay/t/decode-0"}
    await successor.stop()


async def test_a_journal_has_every_worker_before_its_actor_is_there(
    make_world: Callable[[], World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store, world = InProcessStore(), make_world()
    cluster = make_cluster(tmp_path, store)
    written: list[str] = []
    add = Journal.add_worker

    async def add_worker(journal: Journal, record: WorkerRecord) -> None:
        if record.name not in written:
            assert record.name not in world.actors
            written.append(record.name)
        await add(journal, record)

    monkeypatch.setattr(Journal, "add_worker", add_worker)
    async with cluster:
        await scale(cluster, 3)
        assert set(written) == set(world.actors) == cluster._written.cluster.names
