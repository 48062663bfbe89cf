"""Ray's actors and groups without processes of its own, under real controllers that can be stopped.

A controller writes down what it does before it does it, and after. So it is stopped before and
after each thing that it writes: for good, in the middle of whatever it was doing.
"""

from __future__ import annotations

import asyncio
import itertools
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvrelay.deploy.controller.cluster import Cluster
from kvrelay.deploy.controller.records.key_value_store import InProcessStore
from kvrelay.deploy.nodes.local_ray import ray as real_ray
from kvrelay.deploy.nodes.ray_places import PlacementPlan
from kvrelay.deploy.nodes.started_worker import Started
from kvrelay.deploy.nodes.worker_host import WorkerHost
from kvrelay.engine.config import WorkerConfig
from kvrelay.wire.cluster_state import WorkerPhase
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole
from tests.deploy.test_incarnation import INFO, identity_of
from tests.deploy.test_placement import CONFIG

P, D = WorkerRole.PREFILL, WorkerRole.DECODE
SECONDS = 60
AWAY = real_ray.exceptions.ActorUnavailableError("the connection broke", None)


_store: ContextVar[InProcessStore | None] = ContextVar("_store", default=None)
"""Of the controller whose task this is."""


def is_dead() -> bool:
    """Whether the controller whose task this is has died: then it does nothing any more."""
    store = _store.get()
    return isinstance(store, Stopping) and store.stopped.is_set()


class Actor:
    """A worker's actor, which outlives controllers. Its process does nothing."""

    def __init__(self, world: World, name: str, config: WorkerConfig) -> None:
        self.world, self.name, self.config = world, name, config
        self.process: subprocess.Popen[bytes] | None = None
        self.started: Started | None = None
        self.told: set[str] = set()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.failing_starts = 0
        """The starts after the first that fail; none begins then until `may_start`."""
        self.has_failed, self.may_start = asyncio.Event(), asyncio.Event()

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    async def answer(self, method: Callable[..., Any], *args: Any) -> Any:
        if method in (WorkerHost.start, WorkerHost.restart):
            return self._start()
        if self.started is None or not self.runs:
            raise AWAY
        if method is WorkerHost.process:
            return self.started.process
        if method is WorkerHost.peers_died:
            self.told.update(*args)
        elif method is WorkerHost.heartbeat:
            await self.may_answer.wait()
            return 1.0 if args[0] == self.started.info.incarnation else None
        elif method is WorkerHost.begin_drain:
            if args[0] == self.started.info.incarnation:
                self.kill()  # it has nothing to finish
        elif method is not WorkerHost.stop:
            process = self.process
            while process is not None and process.poll() is None:
                await asyncio.sleep(0.002)
            raise AWAY
        return None

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def _start(self) -> Started:
        if self.started is None or not self.runs:
            self.process = subprocess.Popen(["sleep", "60"])
            self.told = set()
            incarnation = f"{self.name}-{next(self.world.numbers)}"
            role = WorkerRole(self.name.partition("-")[0])
            info = replace(INFO, name=self.name, role=role, incarnation=incarnation)
            self.started = Started(info, identity_of(self.process.pid))
            self.world.starts.append(self.name)
        return self.started


class World:
    """What is there beside controllers: Ray's actors and groups, by name."""

    def __init__(self) -> None:
        self.actors: dict[str, Actor] = {}
        self.groups: dict[str, SimpleNamespace] = {}
        self.starts: list[str] = []
        self.numbers = itertools.count()
        self.util = SimpleNamespace(
            placement_group=self._reserve,
            remove_placement_group=self._give_back,
        )

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 8.0}

    def remove(self, name: str) -> None:
        if is_dead():
            return
        if (actor := self.actors.pop(name, None)) is not None:
            actor.kill()

    async def end_left_over(self, _namespace: str, workers: Mapping[str, object]) -> None:
        for name in workers:
            self.remove(name)

    def close(self) -> None:
        for name in list(self.actors):
            self.remove(name)

    def _give_back(self, group: SimpleNamespace) -> None:
        if not is_dead():
            self.groups.pop(group.name, None)

    def _reserve(self, bundles: list[Any], *, name: str, **_: Any) -> SimpleNamespace:
        assert name not in self.groups, "Ray refuses a second group of a name"
        group = SimpleNamespace(name=name, bundle_count=len(bundles), wait=lambda seconds: True)
        self.groups[name] = group
        return group


class Handle:
    """A controller's `WorkerActor`: the actor of this name, made if there is none."""

    world: World

    def __init__(self, config: Any, placement: dict[str, Any], log_level: int) -> None:
        assert placement["get_if_exists"]
        self.config = config
        name = self._name = config.name
        self._actor = self.world.actors.setdefault(name, Actor(self.world, name, config))

    async def call(self, method: Callable[..., Any], *args: Any) -> Any:
        await asyncio.sleep(0)
        if is_dead():
            raise DeadError
        return await self._actor.answer(method, *args)

    async def call_until_answered(
        self, method: Callable[..., Any], *, seconds: float, on_failure: Callable[[], object]
    ) -> Any:
        if failures := self._actor.failing_starts:
            for _ in range(failures):
                on_failure()
            self._actor.has_failed.set()
            await self._actor.may_start.wait()
        return await self.call(method)

    async def ask_who_it_is(
        self, *, seconds: float, on_failure: Callable[[], object] = lambda: None
    ) -> WorkerInfo | None:
        actor = self._actor
        return actor.started.info if actor.started is not None and actor.runs else None

    def why(self, error: Exception) -> str:
        return str(error)

    def restart(self) -> None:
        self._actor.kill()

    def remove(self) -> None:
        self.world.remove(self._name)


class DeadError(Exception):
    """Who is dead does nothing more, not even when it is cancelled."""


class Stopping(InProcessStore):
    """A store in front of which its controller stops for good.

    Args:
        at: the number of the change that is the last one; even: it is not made any more.
    """

    def __init__(self) -> None:
        super().__init__()
        self.at = -1
        self.changes = 0
        self.stopped = asyncio.Event()

    async def put(self, key: str, value: bytes) -> None:
        await self._maybe_stop()
        await super().put(key, value)
        await self._maybe_stop()

    async def delete(self, key: str) -> None:
        await self._maybe_stop()
        await super().delete(key)
        await self._maybe_stop()

    async def _maybe_stop(self) -> None:
        if self.stopped.is_set():
            raise DeadError
        if self.changes == self.at:
            self.stopped.set()
            await asyncio.Event().wait()
        self.changes += 1
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.deploy.controller.supervision.supervisor.WorkerActor", Handle)
    monkeypatch.setattr("kvrelay.deploy.bounded_waits._FIRST_SECONDS", 0.001)
    monkeypatch.setattr(
        "kvrelay.deploy.nodes.ray_places.PlacementGroupSchedulingStrategy",
        lambda group, placement_group_bundle_index: (group.name, placement_group_bundle_index),
    )


@pytest.fixture
async def make_world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[], World]]:
    made = []

    def make() -> World:
        world = World()
        made.append(world)
        monkeypatch.setattr("kvrelay.deploy.nodes.ray_places.ray", world)
        monkeypatch.setattr(
            "kvrelay.deploy.nodes.ray_places.find_groups", lambda namespace: dict(world.groups)
        )
        for module in ("supervision.worker_adoption", "cluster"):
            monkeypatch.setattr(
                f"kvrelay.deploy.controller.{module}.end_left_over", world.end_left_over
            )
        monkeypatch.setattr(Handle, "world", world, raising=False)
        return world

    yield make
    for one in made:
        one.close()


def make_cluster(
    model: Path, store: InProcessStore, on_deposed: Callable[[], object] = lambda: None
) -> Cluster:
    names = [("prefill-0", P), ("decode-0", D)]
    configs = [replace(CONFIG, name=name, role=role, model_path=model) for name, role in names]
    plan = PlacementPlan(namespace="kvrelay/t")
    return Cluster(configs, plan=plan, store=store, on_deposed=on_deposed)


Act = Callable[[Cluster, World], Awaitable[None]]


async def nothing(cluster: Cluster, world: World) -> None:
    pass


async def lose(cluster: Cluster, world: World) -> None:
    before = cluster.workers["decode-0"]
    world.actors["decode-0"].kill()
    while cluster.workers.get("decode-0", before) == before:
        await cluster.discovery.changed()


async def drain(cluster: Cluster, world: World) -> None:
    async for _ in cluster.drain("decode-0", remove=False):
        pass


async def scale(cluster: Cluster, decode: int) -> None:
    async for _ in cluster.scale({D: decode}):
        pass


async def grow(cluster: Cluster, world: World) -> None:
    await scale(cluster, 2)


async def shrink(cluster: Cluster, world: World) -> None:
    await scale(cluster, 1)


async def abandon(before: set[asyncio.Task[Any]]) -> None:
    """End all that a controller was doing, as the death of its process does."""
    tasks = asyncio.all_tasks() - before - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def lead(model: Path, store: Stopping, world: World, prepare: Act, act: Act) -> None:
    """Lead a cluster from its start, do something, and be abandoned."""
    cluster = make_cluster(model, store)

    async def leading() -> None:
        _store.set(store)
        await cluster.start()
        await prepare(cluster, world)
        if prepare is not nothing:
            world.starts.clear()
        await act(cluster, world)
        while await untold_deaths(cluster):
            await asyncio.sleep(0)

    before = asyncio.all_tasks()
    led, stopped = asyncio.create_task(leading()), asyncio.create_task(store.stopped.wait())
    await asyncio.wait({led, stopped}, return_when=asyncio.FIRST_COMPLETED, timeout=SECONDS)
    assert led.done() or stopped.done()
    if led.done() and not store.stopped.is_set():
        led.result()
    store.stopped.set()
    # A stop may not be cut short, except by death.
    await asyncio.wait_for(abandon(before), SECONDS)


async def count_changes(model: Path, world: World, prepare: Act, act: Act) -> int:
    """That a controller makes to its store which nothing stops."""
    store = Stopping()
    await lead(model, store, world, prepare, act)
    return store.changes


@asynccontextmanager
async def succeed(
    model: Path, world: World, prepare: Act, act: Act, at: int
) -> AsyncIterator[tuple[Cluster, dict[str, str]]]:
    """A controller dies at change `at`: its successor, and the incarnations once it has settled."""
    store = Stopping()
    store.at = at
    await lead(model, store, world, prepare, act)
    assert store.changes == at, "it did not come so far"
    left = InProcessStore()
    left._values = store._values
    before = asyncio.all_tasks()
    cluster = make_cluster(model, left)
    try:
        await asyncio.wait_for(cluster.start(), SECONDS)
        yield cluster, await settled(cluster)
    finally:
        await abandon(before)


async def stop_all(cluster: Cluster, world: World) -> None:
    """Stop: each placement group was a worker's, and none is left of either."""
    taken = {record.place.group for record in cluster._written.workers.values() if record.place}
    assert set(world.groups) == taken
    await asyncio.wait_for(cluster.stop(), SECONDS)
    assert not world.actors
    assert not world.groups


async def untold_deaths(cluster: Cluster) -> list[str]:
    """The deaths that are written down, since somebody is still to be told of them."""
    return [key for key in await cluster._store.keys("records/") if "/death/" in key]


async def settled(cluster: Cluster) -> dict[str, str]:
    """The incarnations, once all workers are live and nothing is under way."""
    async with asyncio.timeout(SECONDS):
        while True:
            untold = await untold_deaths(cluster)
            state = await cluster.state()
            phases = {one.phase for one in state.workers}
            at_rest = not state.changing and (state.roll is None or bool(state.roll.failed))
            if phases == {WorkerPhase.LIVE} and at_rest and not untold:
                return {one.name: one.incarnation for one in state.workers}
            await asyncio.sleep(0.002)
