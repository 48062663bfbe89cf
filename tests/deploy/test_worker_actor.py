"""How a worker's actor is placed, in a Ray that is scripted; tests/cluster has a real one."""

from __future__ import annotations

import logging
import weakref
from dataclasses import replace
from typing import Any, cast

import pytest

from kvrelay.deploy.controller.records.leases import Leases, LeaseTimes
from kvrelay.deploy.controller.supervision.supervisor import WorkerSupervisor
from kvrelay.deploy.controller.supervision.watcher import Watcher
from kvrelay.deploy.nodes.local_ray import ray
from kvrelay.deploy.nodes.worker_actor import WorkerActor
from kvrelay.deploy.nodes.worker_host import WorkerHost
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.worker.worker_lease import boottime
from tests.deploy.test_incarnation import INFO
from tests.deploy.test_placement import CONFIG


class Handle:
    """Of an actor, which ends when the one that its maker got is gone; others do not count."""

    config: WorkerConfig


class Names:
    """Those that Ray's actors have; makes actors as Ray does, which are not detached."""

    def __init__(self) -> None:
        self.actors: weakref.WeakValueDictionary[str, Handle] = weakref.WeakValueDictionary()

    def get_actor(self, name: str, namespace: str | None = None) -> Handle:
        assert namespace is None, "the one of this process"
        if name not in self.actors:
            raise ValueError(f"Failed to look up actor with name '{name}'")
        return Handle()

    def remote(self, actor_class: type) -> Names:
        return self

    def options(self, **options: Any) -> _Placed:
        return _Placed(self.actors, **options)


class _Placed:
    def __init__(
        self,
        actors: weakref.WeakValueDictionary[str, Handle],
        *,
        name: str = "",
        get_if_exists: bool = False,
        lifetime: str = "",
        num_gpus: float = 0.0,
    ) -> None:
        if get_if_exists and not name:
            raise ValueError("The actor name must be specified to use `get_if_exists`.")
        self._actors, self._name, self._get_if_exists = actors, name, get_if_exists

    def remote(self, config: WorkerConfig, *_: Any) -> Handle:
        if self._name in self._actors:
            if self._get_if_exists:
                return Handle()
            raise ray.exceptions.ActorAlreadyExistsError(f"The name {self._name} is taken")
        actor = Handle()
        actor.config = config
        if self._name:
            self._actors[self._name] = actor
        return actor


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    names = Names()
    monkeypatch.setattr(ray, "remote", names.remote)
    monkeypatch.setattr(ray, "get_actor", names.get_actor)
    return names


def test_an_actor_that_ray_starts_elsewhere_all_the_same_is_kept_alive(names: Names):
    actor = WorkerActor(CONFIG, {"name": CONFIG.name}, logging.WARNING)
    actor.place_again()
    assert names.actors[CONFIG.name] is actor._handle


def test_a_detached_actor_is_found_by_its_name(names: Names):
    lasting = {"name": CONFIG.name, "lifetime": "detached", "get_if_exists": True}
    first = WorkerActor(CONFIG, lasting, logging.WARNING)._handle
    actor = WorkerActor(CONFIG, lasting, logging.WARNING)
    actor.place_again()
    assert names.actors[CONFIG.name] is first, "it was not made twice"


def test_an_actor_that_ray_has_forgotten_is_made_anew(names: Names):
    actor = WorkerActor(CONFIG, {"name": CONFIG.name}, logging.WARNING)
    first = actor._handle
    del names.actors[CONFIG.name]
    actor.place_again()
    assert actor._handle is names.actors[CONFIG.name] is not first


def test_another_cluster_s_actor_is_not_taken(names: Names):
    other = WorkerActor(CONFIG, {"name": CONFIG.name}, logging.WARNING)
    with pytest.raises(ray.exceptions.ActorAlreadyExistsError):
        WorkerActor(CONFIG, {"name": CONFIG.name}, logging.WARNING)
    assert names.actors[CONFIG.name] is other._handle


def test_an_actor_without_a_name_is_made_anew(names: Names):
    actor = WorkerActor(CONFIG, {}, logging.WARNING)
    first = actor._handle
    actor.place_again()
    assert actor._handle is not first


@pytest.mark.parametrize(("gpus", "part"), [(0.0, 1.0), (1.0, 1.0), (2.0, 1.0), (0.25, 0.25)])
def test_a_worker_has_the_part_of_a_gpu_that_ray_gives_it(names: Names, gpus: float, part: float):
    actor = WorkerActor(CONFIG, {"num_gpus": gpus}, logging.WARNING)
    assert actor._handle.config.gpu_part == part
    actor.place_again()
    assert actor._handle.config.gpu_part == part, "wherever it starts again"


@pytest.mark.parametrize(("gpus", "starts"), [(0.0, 1), (1.0, 1), (2.0, 1), (0.5, 2), (0.3, 4)])
def test_the_last_of_those_that_share_a_gpu_has_time_for_the_starts_of_all(
    names: Names, gpus: float, starts: int
):
    config = replace(CONFIG, start_timeout=20)
    leases = Leases(1, LeaseTimes(60, 15), began=boottime())
    watcher = cast("Watcher", None)
    place = {"num_gpus": gpus}
    supervisor = WorkerSupervisor(config, place, logging.WARNING, leases, watcher)
    assert supervisor.start_seconds == 20 * starts


async def test_a_successor_that_imports_torch_slowly_is_not_taken_for_one_that_hangs(
    names: Names, monkeypatch: pytest.MonkeyPatch
):
    class AskedError(Exception):
        """The end of the start that this test looks at."""

    given: list[float] = []

    async def ask(*, seconds: float, **_: object) -> None:
        given.append(seconds)
        raise AskedError

    leases, watcher = Leases(1, LeaseTimes(60, 15), began=boottime()), cast("Watcher", None)
    for timeout in (2.0, 90.0):
        config = replace(CONFIG, worker_timeout=timeout)
        supervisor = WorkerSupervisor(config, {}, logging.WARNING, leases, watcher)
        monkeypatch.setattr(supervisor._actor, "ask_who_it_is", ask)
        with pytest.raises(AskedError):
            await supervisor._restart(INFO)
    assert given == [60.0, 90.0]


async def test_each_process_that_fails_is_told(names: Names, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvrelay.deploy.bounded_waits._FIRST_SECONDS", 0.001)
    actor = WorkerActor(CONFIG, {}, logging.WARNING)
    monkeypatch.setattr(actor, "restart", lambda: None)
    away = ray.exceptions.ActorUnavailableError("not yet", None)
    # The process that is called each time, and how the call ends.
    calls: list[tuple[int, Exception | str]] = [
        (1, away),
        (1, away),
        (2, away),
        (3, ray.exceptions.RaySystemError("broken")),
        (3, away),  # it is on its way out
        (4, ray.exceptions.RaySystemError("broken")),
        (5, ray.exceptions.ActorDiedError()),
        (6, "up"),
    ]
    failures: list[int] = []

    async def call(method: object) -> object:
        process, end = calls[0]
        if method is WorkerHost.process:
            return process
        calls.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    monkeypatch.setattr(actor, "call", call)
    answer = await actor.call_until_answered(
        WorkerHost.restart, seconds=10, on_failure=lambda: failures.append(calls[0][0])
    )
    assert answer == "up"
    assert failures == [2, 3, 3, 5, 6], "one for each process but the last, seen by the next call"
