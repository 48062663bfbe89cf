"""One incarnation of a worker, whose actor is scripted; tests/cluster has real ones."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from kvrelay.deploy.controller.records.leases import Leases, LeaseTimes
from kvrelay.deploy.controller.supervision import incarnation
from kvrelay.deploy.controller.supervision.incarnation import Incarnation
from kvrelay.deploy.controller.supervision.watcher import Watcher
from kvrelay.deploy.nodes.local_ray import ray
from kvrelay.deploy.nodes.started_worker import Started
from kvrelay.deploy.nodes.worker_actor import WorkerActor
from kvrelay.deploy.nodes.worker_end import WorkerEnd
from kvrelay.deploy.nodes.worker_host import WorkerHost
from kvrelay.deploy.nodes.worker_process import ProcessIdentity, _start_ticks
from kvrelay.engine.worker.worker_lease import Renewal, boottime
from kvrelay.wire.worker_info import WorkerInfo
from tests.worker_infos import worker_info

INFO = worker_info(pid=1)
GONE = ray.exceptions.ActorUnavailableError("the connection broke", None)


class ScriptedActor:
    """Answers heartbeats with these, in order, and then no call at all.

    Args:
        answers: stamps, or what is raised.
    """

    def __init__(self, *answers: float | Exception) -> None:
        self._answers = list(answers)
        self.renewals: list[Renewal | None] = []

    async def call(self, method: Callable[..., Any], *args: Any) -> Any:
        if method is not WorkerHost.heartbeat:
            await asyncio.Event().wait()
        if not self._answers:
            raise GONE
        self.renewals.append(args[1])
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def ask_who_it_is(self, *, seconds: float) -> WorkerInfo | None:
        await asyncio.Event().wait()
        return None


class DrainedActor(ScriptedActor):
    """Says that its worker has drained, and is gone when that was heard."""

    def __init__(self) -> None:
        super().__init__()
        self._heard = asyncio.Event()

    async def call(self, method: Callable[..., Any], *args: Any) -> Any:
        if method is WorkerHost.last_word:
            return WorkerEnd.DRAINED
        if method is WorkerHost.last_word_heard:
            return self._heard.set()
        if method is WorkerHost.heartbeat:
            await self._heard.wait()
        return await super().call(method, *args)


def life_of(actor: ScriptedActor, process: ProcessIdentity | None) -> Incarnation:
    leases = Leases(1, LeaseTimes(60, 15), began=boottime())
    started = Started(INFO, process)
    return Incarnation(started, cast("WorkerActor", actor), 0.1, leases, cast("Watcher", None))


async def test_a_false_alarm_does_not_forget_the_stamp():
    actor = ScriptedActor(7.0, GONE, 8.0)
    life = life_of(actor, None)
    for _ in range(2):
        await life.lost()
    life.close()
    assert [one and one.stamp for one in actor.renewals] == [None, 7.0, 7.0]


async def test_a_worker_that_dies_before_its_first_call_is_seen_to_end():
    child = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE)
    identity = identity_of(child.pid)
    child.kill()
    await child.wait()
    life = life_of(ScriptedActor(), identity)
    await life.lost()
    assert await asyncio.wait_for(life.has_died(), 30), "its lease lasts for a minute"


async def test_a_worker_that_has_drained_elsewhere_is_dead_before_its_lease_is_over():
    drained, other = life_of(DrainedActor(), None), life_of(ScriptedActor(), None)
    for life in (drained, other):
        await life.lost()
    assert await asyncio.wait_for(drained.has_died(), 60)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(other.has_died(), 0.3)


@pytest.mark.parametrize("how", ["fails", "hangs", "answers"])
async def test_a_death_has_a_reason_whether_or_not_ray_tells_one(
    monkeypatch: pytest.MonkeyPatch, how: str
):
    may_answer = threading.Event()

    def ask(_node: str, _pid: int) -> str:
        if how == "fails":
            raise KeyError("death_cause")
        if how == "hangs":
            may_answer.wait(60)
        return "Ray's memory monitor has ended it"

    monkeypatch.setattr(incarnation, "ended_by_memory_monitor", ask)
    monkeypatch.setattr(incarnation, "_TELL_WHY_SECONDS", 0.05 if how == "hangs" else 10)
    why = await life_of(ScriptedActor(), None).why("its process has ended")
    may_answer.set()
    told = "Ray's memory monitor has ended it"
    assert why == (told if how == "answers" else "its process has ended")


def identity_of(pid: int) -> ProcessIdentity:
    here = ProcessIdentity.of(os.getpid())
    return ProcessIdentity(here.boot_id, here.pid_namespace, pid, _start_ticks(pid))
