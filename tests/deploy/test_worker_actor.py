"""How a worker's actor is placed, in a Ray that is scripted; tests/cluster has a real one."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kvrelay.deploy.local_ray import ray
from kvrelay.deploy.worker_actor import WorkerActor
from tests.deploy.test_placement import CONFIG


class Names:
    """Those that Ray's actors have; makes actors as Ray does."""

    def __init__(self) -> None:
        self.actors: dict[str, object] = {}

    def remote(self, actor_class: type) -> Names:
        return self

    def options(self, **options: Any) -> _Placed:
        return _Placed(self.actors, **options)


class _Placed:
    def __init__(
        self, actors: dict[str, object], *, name: str = "", get_if_exists: bool = False
    ) -> None:
        if get_if_exists and not name:
            raise ValueError("The actor name must be specified to use `get_if_exists`.")
        self._actors, self._name, self._get_if_exists = actors, name, get_if_exists

    def remote(self, *args: Any) -> object:
        if self._name in self._actors:
            if self._get_if_exists:
                return self._actors[self._name]
            raise ray.exceptions.ActorAlreadyExistsError(f"The name {self._name} is taken")
        actor = object()
        if self._name:
            self._actors[self._name] = actor
        return actor


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    names = Names()
    monkeypatch.setattr(ray, "remote", names.remote)
    return names


def test_an_actor_that_ray_starts_elsewhere_all_the_same_is_found_by_its_name(names: Names):
    actor = WorkerActor(CONFIG, {"name": CONFIG.name}, logging.WARNING)
    first = names.actors[CONFIG.name]
    actor.place_again()
    assert actor._handle is first
    del names.actors[CONFIG.name]
    actor.place_again()
    assert actor._handle is names.actors[CONFIG.name] is not first


def test_another_cluster_s_actor_is_not_taken(names: Names):
    WorkerActor(CONFIG, {"name": CONFIG.name}, logging.WARNING)
    with pytest.raises(ray.exceptions.ActorAlreadyExistsError):
        WorkerActor(CONFIG, {"name": CONFIG.name}, logging.WARNING)


def test_an_actor_without_a_name_is_made_anew(names: Names):
    actor = WorkerActor(CONFIG, {}, logging.WARNING)
    first = actor._handle
    actor.place_again()
    assert actor._handle is not first
