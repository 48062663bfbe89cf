"""What a cluster keeps of workers that have left, or did not start; their actors are scripted."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrelay.deploy.controller.changes.steps import DrainPhase, ScalePhase
from kvrelay.deploy.controller.cluster import Cluster
from kvrelay.deploy.errors import ClusterError
from kvrelay.deploy.nodes.local_ray import ray as real_ray
from kvrelay.deploy.nodes.started_worker import Started
from kvrelay.deploy.nodes.worker_host import WorkerHost
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole
from tests.deploy.scripted_ray import AWAY
from tests.deploy.test_incarnation import INFO, identity_of
from tests.deploy.test_placement import CONFIG, PLAN, ScriptedRay, ray

__all__ = ["ray"]
D = WorkerRole.DECODE


class ScriptedActor:
    """A worker whose process does nothing, and ends as soon as it drains."""

    refuses: str | None = None
    """The name of a worker that does not start."""

    def __init__(self, config: Any, placement: dict[str, Any], log_level: int) -> None:
        self.config = config
        self._name = config.name
        self._process: subprocess.Popen[bytes] | None = None

    async def call(self, method: Callable[..., Any], *args: Any) -> Any:
        if method is WorkerHost.start:
            return await self._start()
        if method is WorkerHost.heartbeat:
            return 1.0
        if method is WorkerHost.begin_drain:
            self.remove()
        elif method not in (WorkerHost.process, WorkerHost.stop):
            await asyncio.Event().wait()
        return None

    async def ask_who_it_is(self, *, seconds: float) -> WorkerInfo | None:
        await asyncio.Event().wait()
        return None

    def why(self, error: Exception) -> str:
        return str(error)

    def remove(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def _start(self) -> Started:
        if self._name == self.refuses:
            raise real_ray.exceptions.RaySystemError("not in the mood")
        self._process = subprocess.Popen(["sleep", "60"])  # noqa: ASYNC220 (it takes no time)
        info = replace(INFO, name=self._name, incarnation=f"{self._name}-1")
        return Started(info, identity_of(self._process.pid))


@pytest.fixture(autouse=True)
def actors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kvrelay.deploy.controller.supervision.supervisor.WorkerActor", ScriptedActor
    )


def cluster_of_two(model: Path) -> Cluster:
    configs = [replace(CONFIG, name=f"decode-{number}", model_path=model) for number in range(2)]
    return Cluster(configs, plan=PLAN)


async def test_nothing_is_kept_of_a_worker_that_has_left_but_its_name(
    ray: ScriptedRay, tmp_path: Path
):
    async with asyncio.timeout(60), cluster_of_two(tmp_path) as cluster:
        for count in (3, 1, 2, 1):
            steps = [step async for step in cluster.scale({D: count})]
            assert steps[-1].phase in (ScalePhase.READY, ScalePhase.LEFT)
            assert len(cluster._supervisors) == len(cluster.workers) == count
        assert ray.room == 1, "the group of the start has a bundle in use"
        assert cluster._written.cluster.names == {f"decode-{number}" for number in range(4)}
    assert ray.room == 3


async def test_the_place_of_a_worker_that_did_not_start_is_given_back(
    ray: ScriptedRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ScriptedActor, "refuses", "decode-2")
    async with asyncio.timeout(60), cluster_of_two(tmp_path) as cluster:
        with pytest.raises(ClusterError, match=r"^decode-2 did not start: .*not in the mood"):
            await cluster.workforce.add("decode-2", D)
        assert ray.room == 1
        assert "decode-2" in cluster._written.cluster.names
        await cluster.workforce.add("decode-3", D)
        assert ray.room == 0


class Unobservable(ScriptedActor):
    """A worker on another machine, which hears that it is to drain, and whose answer is lost."""

    async def call(self, method: Callable[..., Any], *args: Any) -> Any:
        if method is WorkerHost.begin_drain:
            self.remove()
            self.has_left = True
        if self.has_left and method is not WorkerHost.stop:
            raise AWAY
        return await super().call(method, *args)

    has_left = False

    async def _start(self) -> Started:
        return replace(await super()._start(), process=None)


async def test_a_removal_that_goes_on_is_not_said_to_have_failed(
    ray: ScriptedRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        "kvrelay.deploy.controller.supervision.supervisor.WorkerActor", Unobservable
    )
    configs = [
        replace(CONFIG, name=f"decode-{number}", model_path=tmp_path, worker_timeout=0.5)
        for number in range(2)
    ]
    async with asyncio.timeout(60), Cluster(configs, plan=PLAN) as cluster:
        step = await anext(cluster.drain("decode-1", remove=True))
        assert step.phase is DrainPhase.DRAINING, "its lease runs out, and it is removed"
        assert list(cluster.workforce.staying) == ["decode-0"]
