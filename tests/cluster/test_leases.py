"""Workers whose lease runs out, and deaths that nobody has seen, in a real Ray."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay.deploy.controller.cluster import Cluster
from kvrelay.deploy.controller.records.leases import Leases
from kvrelay.deploy.nodes.worker_end import WorkerEnd
from kvrelay.deploy.nodes.worker_host import WorkerHost
from kvrelay.deploy.nodes.worker_process import ProcessIdentity, WorkerProcess
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.worker.worker_lease import Renewal
from kvrelay.wire.worker_info import WorkerInfo
from tests.cluster.supervised import (
    is_running,
    make_configs,
    next_life,
    until,
    was_told,
)

pytestmark = pytest.mark.usefixtures("obedient_workers")
LEASE_SECONDS = 5.0
"""Short, and yet longer than a busy machine may delay a sign of life."""


def leased(folder: Path) -> list[WorkerConfig]:
    """A prefill and a decode worker whose silence is noticed long after their leases' end."""
    return [
        replace(config, worker_lease=LEASE_SECONDS, worker_timeout=60, metrics_port=0)
        for config in make_configs(folder)[:2]
    ]


@pytest.mark.slow  # `tests/kv_transfer/test_lease.py` has a process of its own that wakes
async def test_a_worker_that_was_frozen_for_longer_than_its_lease_ends_when_it_wakes(
    tmp_path: Path,
):
    """One that is renewed lives on."""
    async with Cluster(leased(tmp_path)) as cluster:
        first, renewed = cluster.workers["decode-0"], cluster.workers["prefill-0"]
        os.kill(first.pid, signal.SIGSTOP)
        await asyncio.sleep(1.5 * LEASE_SECONDS)
        assert is_running(first)
        os.kill(first.pid, signal.SIGCONT)
        await next_life(cluster, first)
        assert not is_running(first)
        await until(lambda: was_told(tmp_path, "prefill-0", first))
        assert cluster.workers["prefill-0"] == renewed
        assert is_running(renewed)


@pytest.mark.slow  # `tests/engine/test_worker_lease.py` has the end of one process
async def test_workers_end_when_their_controller_renews_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with Cluster(leased(tmp_path)) as cluster:
        before = dict(cluster.workers)
        with monkeypatch.context() as patch:
            patch.setattr(Leases, "renew", lambda *_: None)
            await until(lambda: not any(map(is_running, before.values())))
        for info in before.values():
            await next_life(cluster, info)


async def test_a_worker_refuses_an_earlier_controller(tmp_path: Path):
    async with Cluster(leased(tmp_path)) as cluster:
        leases, workers = cluster._leases, list(cluster.workers.values())
        assert leases is not None
        [decode] = [one for one in workers if one.name == "decode-0"]
        actor = cluster._supervisors["decode-0"]._actor
        try:
            await actor.call(WorkerHost.heartbeat, decode.incarnation, Renewal(7, 60, None))
            await until(lambda: not is_running(decode))
            await until(lambda: leases.is_given_up)
        finally:
            # A controller that was superseded leaves its workers to the next; here is none.
            cluster._placement.release()
    await until(lambda: not any(map(is_running, workers)))


class Unseen:
    """Processes that cannot be observed from here, as those of other machines."""

    @staticmethod
    def find(identity: ProcessIdentity) -> WorkerProcess | None:
        return None


async def test_a_death_on_another_machine_is_seen_by_the_next_process_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("kvrelay.deploy.controller.supervision.incarnation.WorkerProcess", Unseen)
    configs = [replace(config, worker_lease=1000) for config in make_configs(tmp_path)[:2]]
    async with Cluster(configs) as cluster:
        first = cluster.workers["decode-0"]
        os.kill(first.pid, signal.SIGKILL)
        await until(lambda: was_told(tmp_path, "prefill-0", first))
        await next_life(cluster, first)


@pytest.mark.slow  # `tests/deploy/test_leases.py` has it without processes
async def test_a_death_that_nobody_sees_is_believed_after_lease_and_margin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("kvrelay.deploy.controller.supervision.incarnation.WorkerProcess", Unseen)
    monkeypatch.setattr("kvrelay.deploy.controller.cluster._CONTROLLER_LEASE_SECONDS", 2.0)

    async def end_process(self: WorkerHost, identity: ProcessIdentity) -> bool:
        return False

    monkeypatch.setattr("tests.cluster.obedient_worker.ObedientHost.end_process", end_process)
    async with Cluster(leased(tmp_path)) as cluster:
        first, leases, believe = cluster.workers["decode-0"], cluster._leases, cluster.worker_dead
        assert leases is not None
        believed: list[float] = []
        """Seconds from the last renewal until the death was believed."""

        async def worker_dead(info: WorkerInfo, cause: WorkerEnd) -> None:
            believed.append(leases.clock() - leases._asked[info.incarnation])
            assert not was_told(tmp_path, "prefill-0", info)
            await believe(info, cause)

        monkeypatch.setattr(cluster, "worker_dead", worker_dead)
        os.kill(first.pid, signal.SIGKILL)
        await until(lambda: was_told(tmp_path, "prefill-0", first))
        # Not counted from the kill: on a busy machine the last renewal may be much older than it.
        assert believed[0] >= LEASE_SECONDS + leases.times.margin_seconds
        await next_life(cluster, first)
