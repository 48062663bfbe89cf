"""A cluster that gets more workers, and fewer, in a real Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvrelay.deploy.controller.changes.steps import ScalePhase, ScaleStep
from kvrelay.deploy.controller.cluster import Cluster
from kvrelay.deploy.controller.cluster_thread import ClusterThread
from kvrelay.router.errors import CannotScale, UnknownWorker
from kvrelay.wire.worker_info import WorkerRole
from tests.cluster.obedient_worker import give_order
from tests.cluster.supervised import SECONDS, heard, is_running, make_configs, until

pytestmark = pytest.mark.usefixtures("obedient_workers")
P, D = WorkerRole.PREFILL, WorkerRole.DECODE


async def scaled(
    cluster: Cluster | ClusterThread, wanted: Mapping[WorkerRole, int]
) -> list[tuple[str, ScalePhase]]:
    async with asyncio.timeout(SECONDS):
        return [(step.worker, step.phase) async for step in cluster.scale(wanted)]


async def test_a_cluster_grows_and_shrinks_and_no_process_is_left(tmp_path: Path):
    async with ClusterThread(make_configs(tmp_path)[:2]) as cluster:
        steps = await scaled(cluster, {D: 3})
        assert steps[:2] == [("decode-1", ScalePhase.STARTING), ("decode-2", ScalePhase.STARTING)]
        assert sorted(steps[2:]) == [("decode-1", ScalePhase.READY), ("decode-2", ScalePhase.READY)]
        added = [cluster.workers[name] for name in ("decode-1", "decode-2")]
        listed = {one.incarnation for one in cluster.discovery.endpoints()}
        assert {one.incarnation for one in added} < listed
        for name in ("decode-1", "decode-2"):
            give_order(tmp_path, name, "leave", "now")
        steps = await scaled(cluster, {D: 1, P: 1})
        left = {name for name, phase in steps if phase is ScalePhase.LEFT}
        assert left == {"decode-1", "decode-2"}
        assert sorted(cluster.workers) == ["decode-0", "prefill-0"]
        assert not any(map(is_running, added))
        dead = {one.incarnation for one in added}
        await until(lambda: set(heard(tmp_path, "prefill-0")) == dead)


@pytest.mark.slow  # `tests/deploy/test_scaling.py` has it without processes
async def test_a_worker_that_does_not_start_is_said_and_leaves_nothing(tmp_path: Path):
    async with Cluster(make_configs(tmp_path)[:2]) as cluster:
        give_order(tmp_path, "prefill-1", "start", "refuse")
        steps: list[ScaleStep] = [step async for step in cluster.scale({P: 2})]
        assert [step.phase for step in steps] == [ScalePhase.STARTING, ScalePhase.FAILED]
        assert steps[1].reason == (
            "prefill-1 did not start: kv_memory: 1 byte does not hold one page"
        )
        assert sorted(cluster.workers) == ["decode-0", "prefill-0"]
        with pytest.raises(UnknownWorker):
            await anext(cluster.drain("prefill-1", remove=False))
        assert (await scaled(cluster, {P: 2}))[-1][1] is ScalePhase.READY


@pytest.mark.slow  # `tests/deploy/test_scaling.py` has it without processes
async def test_one_change_at_a_time_and_it_goes_on_though_nobody_listens(tmp_path: Path):
    async with Cluster(make_configs(tmp_path)[:2]) as cluster:
        steps = aiter(cluster.scale({P: 2}))
        await anext(steps)
        with pytest.raises(CannotScale, match=r"^the cluster is being scaled already$"):
            await anext(cluster.scale({P: 3}))
        del steps
        await until(lambda: "prefill-1" in cluster.workers)
        with pytest.raises(CannotScale, match=r"^aggregated: the cluster has no such workers$"):
            await anext(cluster.scale({WorkerRole.AGGREGATED: 1}))
