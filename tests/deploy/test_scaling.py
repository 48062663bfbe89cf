"""In which order a cluster's size is changed; tests/cluster changes real ones."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from typing import cast

import pytest

from kvrelay.deploy.controller.changes.resizing import Scaling
from kvrelay.deploy.controller.changes.steps import DrainPhase, DrainStep, ScalePhase
from kvrelay.deploy.controller.changes.workforce import Workforce
from kvrelay.deploy.controller.records.journal import Journal
from kvrelay.deploy.controller.records.key_value_store import InProcessStore
from kvrelay.deploy.controller.records.leases import Leases, LeaseTimes
from kvrelay.deploy.errors import ClusterError
from kvrelay.engine.worker.worker_lease import boottime
from kvrelay.wire.worker_info import WorkerRole

P, D = WorkerRole.PREFILL, WorkerRole.DECODE


class ScriptedCluster:
    """A real journal, and a workforce that starts workers as they are let, but for some."""

    def __init__(self) -> None:
        self.workers = {"prefill-0": P, "prefill-1": P, "decode-0": D}
        self.fails: dict[str, Exception] = {}
        self.starting = self.most_starting = 0
        self.ended = 0
        leases = Leases(1, LeaseTimes(1, math.inf), began=boottime())
        self.journal = Journal(InProcessStore(), leases)

    @property
    def staying(self) -> Mapping[str, WorkerRole]:
        return self.workers

    def make_scaling(self) -> Scaling:
        return Scaling(cast("Workforce", self), lambda: self.journal)

    async def until_up(self, name: str) -> None:
        pass

    async def add(self, name: str, role: WorkerRole) -> None:
        self.starting += 1
        self.most_starting = max(self.most_starting, self.starting)
        try:
            await asyncio.sleep(0)
            if name in self.fails:
                raise self.fails[name]
            await asyncio.sleep(0.01)
            self.workers[name] = role
        finally:
            self.starting -= 1
            self.ended += 1

    async def drain(self, worker: str, *, remove: bool) -> AsyncIterator[DrainStep]:
        del self.workers[worker]
        yield DrainStep(DrainPhase.LEFT, worker)


async def test_a_few_workers_start_at_a_time():
    cluster = ScriptedCluster()
    _ = [step async for step in cluster.make_scaling().scale({D: 20})]
    assert len(cluster.workers) == 22
    assert cluster.most_starting == 4


async def test_nobody_leaves_if_a_new_worker_does_not_start():
    cluster = ScriptedCluster()
    cluster.fails["decode-1"] = ClusterError("no room")
    steps = [step async for step in cluster.make_scaling().scale({D: 3, P: 1})]
    assert "prefill-1" in cluster.workers
    failed = {step.worker: step.reason for step in steps if step.phase is ScalePhase.FAILED}
    assert failed == {
        "decode-1": "no room",
        "prefill-1": "it stays, since a new worker did not start",
    }
    cluster.fails.clear()
    steps = [step async for step in cluster.make_scaling().scale({D: 3, P: 1})]
    assert sorted(cluster.workers) == ["decode-0", "decode-1", "decode-2", "prefill-0"]


async def test_an_error_that_nobody_expects_leaves_no_start_and_no_change_behind():
    cluster = ScriptedCluster()
    cluster.fails["decode-1"] = RuntimeError("a bug")
    with pytest.raises(ExceptionGroup) as caught:
        _ = [step async for step in cluster.make_scaling().scale({D: 4, P: 1})]
    assert caught.group_contains(RuntimeError, match="a bug")
    assert cluster.starting == 0
    assert cluster.journal.cluster.change is None
    assert sorted(cluster.workers) == ["decode-0", "prefill-0", "prefill-1"]
