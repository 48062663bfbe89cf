"""A cluster whose router, prefill worker and decode worker are on three hosts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.cluster.reference import Reference
from tests.hosts.conftest import ThreeHosts
from tests.hosts.ray_nodes import ServedCluster, connected, options_on, serving, status

pytestmark = pytest.mark.alone
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
