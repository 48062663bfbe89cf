"""A node leaves: its workers drain, and Ray places their successors elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.checkpoints import make_checkpoint
from tests.hosts.conftest import ThreeHosts
from tests.hosts.host import Host
from tests.hosts.lan import lan
from tests.hosts.ray_nodes import (
    HANGS_S,
    RayHosts,
    connected,
    kvrelay,
    options_on,
    serving,
    status,
)
from tests.hosts.served_hosts import drained
from tests.hosts.skips import WHY_NO_HOSTS

pytestmark = [pytest.mark.alone, pytest.mark.slow]
PROMPT = list(range(5, 105))
TOKENS = 150
SLOW = "decode-0/delay:forward:1:0.1s:always"
SOON_GONE = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "5"}
"""Ray gives the places of a node away when it has ended, which takes it 30 s else."""
SUCCESSOR_S = 8
"""A successor has gone on with the request by then, if it may start."""


def end_ray(host: Host) -> None:
    """Ask a node's Ray to end, as Kubernetes does after the hook."""
    [started] = [process for process in host.processes() if _is_ray_start(process)]
    started.terminate()


def _is_ray_start(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()  # its name may be that of the script
        return {"start", "--block"} <= set(words) and "python" in Path(words[0]).name
    except psutil.Error:  # it has just ended
        return False


def until_node(host: Host) -> None:
    """Wait until a host's Ray can be found on it."""
    give_up_at = time.monotonic() + HANGS_S
    while not host.run("ps", "-C", "raylet", "-o", "pid=", check=False):
        assert time.monotonic() < give_up_at, f"{host.name} is no node"
        time.sleep(0.1)


@pytest.fixture
def four_hosts() -> Iterator[ThreeHosts]:
    """A head and a node a role, of which one leaves; and a host that is no node yet."""
    if WHY_NO_HOSTS:
        pytest.skip(WHY_NO_HOSTS)
    with lan(["head", "p", "d", "e"]) as network:
        ray = RayHosts.start(network.hosts["head"], variables=SOON_GONE)
        for name in ("p", "d"):
            ray.add(network.hosts[name], {"rack": name})
        yield ThreeHosts(network, ray, make_checkpoint(network.shared / "tiny"))


async def test_a_node_leaves_under_load_and_another_one_goes_on(four_hosts: ThreeHosts):
    network, ray = four_hosts.network, four_hosts.ray
    head, node, other = (network.hosts[name] for name in ("head", "d", "e"))
    options = [*options_on(head, four_hosts.model), "--ray-address", ray.address]
    options += ["--prefill-on", "rack=p", "--decode-on", "rack=d", "--drain-grace", "1"]
    # Slow in the first process alone: the request is still there when the node leaves.
    options += ["--placement", "disaggregated", "--debug-faults", SLOW]
    options += ["--failover-wait", f"{HANGS_S:g}"]
    # Nobody waits for the lease of a worker that has drained: it would take longer than anything.
    options += ["--worker-lease", f"{10 * HANGS_S:g}"]
    log: list[str] = []
    with serving(head, *options) as process:
        cluster = await connected(process)
        with drained(process, log):
            going = asyncio.create_task(
                cluster.generate(PROMPT, max_tokens=TOKENS, temperature=0, ignore_eos=True)
            )
            while not await cluster.metric("kvrelay_output_tokens_total"):
                await asyncio.sleep(0.02)
            done = await asyncio.to_thread(kvrelay, node, "leave", "--timeout", "30")
            assert done.returncode == 0, done
            assert "Ray places nothing more here; 1 workers drain." in done.stdout
            assert "decode-0 has left." in done.stdout
            assert not going.done()
            await asyncio.sleep(SUCCESSOR_S)
            assert not going.done(), "the successor was placed on the node that leaves"
            end_ray(node)
            ray.add(other, {"rack": "d"})
            finished, _ = await asyncio.wait({going}, timeout=HANGS_S)
            assert finished, log[-40:]
            tokens = going.result().tokens
            workers = status(head, cluster.grpc_address)
            [decode] = [one for one in workers if one["role"] == "decode"]
            assert str(decode["address"]).startswith(f"{other.address}:")
            again = await cluster.generate(
                PROMPT, max_tokens=TOKENS, temperature=0, ignore_eos=True
            )
            assert tokens == again.tokens
            assert len(tokens) == TOKENS


def test_a_machine_without_workers_leaves_at_once(four_hosts: ThreeHosts):
    until_node(four_hosts.network.hosts["d"])
    done = kvrelay(four_hosts.network.hosts["d"], "leave")
    assert done.returncode == 0, done
    assert "0 workers drain" in done.stdout
    done = kvrelay(four_hosts.network.hosts["e"], "leave")
    assert done.returncode == 1
    assert "no Ray runs on this machine" in done.stderr
