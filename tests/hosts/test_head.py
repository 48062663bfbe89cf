"""What survives when Ray's head is killed, with its state in Redis and without.

The head has a host of its own; `kvrelay serve` runs on another one.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import psutil
import pytest

from tests.chaos.load import Expected, Load, check, make_cases
from tests.checkpoints import make_checkpoint
from tests.hosts.lan import Lan, lan
from tests.hosts.ray_nodes import (
    RayHosts,
    ServedCluster,
    connected,
    options_on,
    serving,
    start_redis,
)
from tests.hosts.served_hosts import DISK_BYTES, QUICK_RAY, drained, learn
from tests.hosts.skips import WHY_NO_HOSTS

pytestmark = [
    pytest.mark.alone,
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY_NO_HOSTS), reason=WHY_NO_HOSTS),
]
AWAY_S = 10.0
RECONNECT_S = 25
"""How long Ray's processes wait for their head; 60 if nobody says otherwise."""
ENDS_S = 90.0
BOUND_S = 60.0


@dataclass
class Headed:
    """A cluster in a Ray whose head can be killed."""

    network: Lan
    ray: RayHosts
    cluster: ServedCluster
    log: list[str]

    def restart_head(self) -> None:
        """Start it again at its address."""
        RayHosts.start(self.ray.head, variables=self.ray.variables)

    def workers(self) -> list[psutil.Process]:
        """The processes of the prefill and the decode worker that have not ended."""
        return [
            process
            for name in ("p", "d")
            for process in self.network.hosts[name].processes()
            if "Worker" in _title(process)
        ]


def _title(process: psutil.Process) -> str:
    """The first word of its command line; empty if it has ended, and waits to be buried or not."""
    try:
        return "".join(process.cmdline()[:1])
    except psutil.NoSuchProcess:
        return ""


@asynccontextmanager
async def headed(variables: Mapping[str, str], redis: bool) -> AsyncIterator[Headed]:
    with lan(["head", "front", "p", "d"], temp_bytes=DISK_BYTES) as network:
        head, front = network.hosts["head"], network.hosts["front"]
        variables = {
            **QUICK_RAY,
            "RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_S),
            **variables,
        }
        if redis:
            variables["RAY_REDIS_ADDRESS"] = start_redis(head)
        ray = RayHosts.start(head, variables=variables)
        ray.add(front, {"rack": "front"}, num_cpus=0)
        for name in ("p", "d"):
            ray.add(network.hosts[name], {"rack": name})
        options = options_on(front, make_checkpoint(network.shared / "tiny"))
        options += ["--ray-address", ray.address, "--placement", "disaggregated"]
        options += ["--prefill-on", "rack=p", "--decode-on", "rack=d", "--page-size", "4"]
        log: list[str] = []
        with serving(front, *options) as process:
            cluster = await connected(process)
            with drained(process, log):
                yield Headed(network, ray, cluster, log)


def load_of(headed: Headed, expected: Expected) -> Load:
    async def stub() -> object:
        return headed.cluster.stub

    return Load(stub, list(expected), BOUND_S, clients=2)  # type: ignore[arg-type]


async def test_without_its_state_elsewhere_all_ends_some_time_after_the_head():
    async with headed({}, redis=False) as cluster:
        expected = await learn(cluster.cluster.stub, make_cases(), BOUND_S)
        assert len(cluster.workers()) == 2
        load = load_of(cluster, expected)
        await load.warm(2)
        cluster.ray.kill_head()
        served = len(load.outcomes)
        await load.warm(served + 4)
        assert all(outcome.completed for outcome in load.outcomes), "they go on for a while"
        give_up_at = time.monotonic() + RECONNECT_S + ENDS_S
        while cluster.workers() or cluster.cluster.process.poll() is None:
            assert time.monotonic() < give_up_at, cluster.log[-30:]
            await asyncio.sleep(0.5)
        assert not check(await load.stop(), expected, may_be_lost=True)


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="not installed: redis-server")
async def test_with_its_state_in_redis_nobody_notices_the_head():
    async with headed({}, redis=True) as cluster:
        expected = await learn(cluster.cluster.stub, make_cases(), BOUND_S)
        before = {one.worker: one.incarnation for one in await cluster.cluster.status()}
        load = load_of(cluster, expected)
        await load.warm(2)
        cluster.ray.kill_head()
        served = len(load.outcomes)
        await asyncio.sleep(AWAY_S)
        assert len(load.outcomes) >= served + 4, "they go on without it"
        cluster.restart_head()
        await asyncio.sleep(RECONNECT_S)
        outcomes = await load.stop()
        assert not check(outcomes, expected, may_be_lost=False)
        assert {one.worker: one.incarnation for one in await cluster.cluster.status()} == before
        await cluster.cluster.assert_at_baseline()
        await _is_supervised(cluster, before["decode-0"])


async def _is_supervised(cluster: Headed, incarnation: str) -> None:
    """A worker that dies after the head has come back is replaced."""
    [process] = [one for one in cluster.workers() if "Decode" in _title(one)]
    process.kill()
    async with asyncio.timeout(ENDS_S):
        while not any(
            one.worker == "decode-0" and one.ready and one.incarnation != incarnation
            for one in await cluster.cluster.status()
        ):
            await asyncio.sleep(0.2)
    answer = await cluster.cluster.generate(range(5, 60), max_tokens=8, ignore_eos=True)
    assert len(answer.tokens) == 8
