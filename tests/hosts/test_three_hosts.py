"""A cluster whose router, prefill worker and decode worker are on three hosts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable

import psutil
import pytest

from tests.cluster.reference import Reference
from tests.hosts.conftest import ThreeHosts
from tests.hosts.host import ENDS_S, Host
from tests.hosts.ray_nodes import (
    ServedCluster,
    connected,
    environment,
    options_on,
    serving,
    status,
)

pytestmark = pytest.mark.alone
CUT_S = 1.0
PROMPTS = [list(range(start, start + length)) for start, length in ((3, 1), (9, 40), (60, 200))]
TOKENS = 24


@pytest.fixture(scope="module")
async def served(three_hosts: ThreeHosts) -> AsyncIterator[ServedCluster]:
    head = three_hosts.network.hosts["head"]
    options = options_on(head, three_hosts.model)
    options += ["--ray-address", three_hosts.ray.address, "--placement", "disaggregated"]
    options += ["--prefill-on", "rack=p", "--decode-on", "rack=d"]
    with serving(head, *options) as process:
        yield await connected(process)


async def generated(cluster: ServedCluster) -> list[list[int]]:
    answers = [
        cluster.generate(prompt, max_tokens=TOKENS, temperature=0, ignore_eos=True)
        for prompt in PROMPTS
    ]
    return [answer.tokens for answer in await asyncio.gather(*answers)]


async def test_tokens_are_those_of_one_machine(three_hosts: ThreeHosts, served: ServedCluster):
    """Which are the reference's, as tests/cluster/test_tokens.py shows."""
    tokens = await generated(served)
    Reference(three_hosts.model).assert_greedy(PROMPTS, tokens, TOKENS)
    assert await served.metric("kvrelay_transfers_total", result="done") > 0
    await served.assert_at_baseline()


def test_each_worker_is_on_its_node_and_listens_at_its_address(
    three_hosts: ThreeHosts, served: ServedCluster
):
    hosts = three_hosts.network.hosts
    workers = status(hosts["head"], served.grpc_address)
    hosts_of = {worker["role"]: str(worker["address"]).rpartition(":")[0] for worker in workers}
    assert hosts_of == {"prefill": hosts["p"].address, "decode": hosts["d"].address}


@pytest.mark.parametrize(("sender", "receiver"), [("p", "d"), ("d", "p")])
async def test_what_one_worker_does_not_hear_of_the_other_is_served_when_that_heals(
    three_hosts: ThreeHosts, served: ServedCluster, sender: str, receiver: str
):
    """A short partition, in one direction; tests/hosts/test_faults.py has long ones, and others."""
    network = three_hosts.network
    hosts = network.hosts[sender], network.hosts[receiver]
    before = status(network.hosts["head"], served.grpc_address)
    network.cut(*hosts)
    answering = asyncio.create_task(generated(served))
    try:
        await asyncio.sleep(CUT_S)
        assert not answering.done(), "the link was not cut"
    finally:
        network.heal(*hosts)
    Reference(three_hosts.model).assert_greedy(PROMPTS, await answering, TOKENS)
    after = status(network.hosts["head"], served.grpc_address)
    assert [one["incarnation"] for one in before] == [one["incarnation"] for one in after]
    await served.assert_at_baseline()


def examiners_on(hosts: Iterable[Host]) -> list[str]:
    """The processes of `kvrelay doctor` that have not ended."""
    found = []
    for process in (one for host in hosts for one in host.processes()):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is none
            found += [word for word in process.cmdline() if "Examiner" in word]
    return found


@pytest.mark.slow
async def test_nodes_are_examined_beside_a_cluster_that_has_all_of_them(
    three_hosts: ThreeHosts, served: ServedCluster
):
    hosts = three_hosts.network.hosts
    words = (sys.executable, "-m", "kvrelay.deploy", "doctor", "--json")
    doctor = hosts["head"].spawn(
        *(*words, "--ray-address", three_hosts.ray.address, "--model", str(three_hosts.model)),
        environment=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    printed, _ = await asyncio.to_thread(doctor.communicate)
    found = json.loads(printed)
    assert doctor.returncode == 0, found["findings"]
    names = {f"{name} ({hosts[name].address})" for name in ("head", "p", "d")}
    assert {node["name"] for node in found["nodes"]} == names
    assert {(pair["reader"], pair["source"]) for pair in found["pairs"]} == {
        (one, other) for one in names for other in names - {one}
    }
    for pair in found["pairs"]:
        assert pair["bytes_per_second"] > 0
        assert (pair["backend"], pair["lanes"]) == ("UCX", ["tcp/eth0"])
    async with asyncio.timeout(ENDS_S):
        while examiners_on(hosts.values()):
            await asyncio.sleep(0.02)
    Reference(three_hosts.model).assert_greedy(PROMPTS, await generated(served), TOKENS)
    await served.assert_at_baseline()
