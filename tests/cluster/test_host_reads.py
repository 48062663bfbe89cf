"""Real decode workers that read the host tier of a prefill worker by NIXL."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvrelay.kv_transfer.verify_pages import VerifyPages
from kvrelay.router.config import PlacementMode
from tests.cluster.in_process import in_process
from tests.cluster.running import Cluster, running
from tests.cluster.test_host_tier import PAGE_BYTES, PROMPTS
from tests.pairwise import few

LITTLE: dict[str, Any] = {
    "kv_memory": 56 * PAGE_BYTES,
    "host_kv_memory": 8 << 20,
    "chunk_tokens": 64,
    "growth_min": 0.0,
    "growth_max": 0.0,
    "placement": PlacementMode.DISAGGREGATED,
}
"""Two prompts fit on a device, all of them on a host."""


async def ask(cluster: Cluster) -> list[list[int]]:
    """All at once: most wait for the memory of the prefill worker."""
    answers = await asyncio.gather(
        *(
            cluster.generate(prompt, temperature=0, max_tokens=8, ignore_eos=True)
            for prompt in PROMPTS
        )
    )
    return [answer.tokens for answer in answers]


async def pages_read(cluster: Cluster) -> float:
    return await cluster.metric("kvrelay_transfer_host_pages_total")


@few(1)
@pytest.mark.timeout(180)
@pytest.mark.parametrize("verify", [VerifyPages.OFF, VerifyPages.ALL])
async def test_the_host_is_read_with_the_same_tokens(tiny: Path, verify: VerifyPages) -> None:
    async with in_process(tiny, verify_pages=verify, **LITTLE) as cluster:
        expected = await ask(cluster)
        for _ in range(10):
            assert await ask(cluster) == expected
            if await pages_read(cluster):
                break
        assert await pages_read(cluster) > 0
        lent = await cluster.metric("kvrelay_tier_pages_total", tier="host", event="lent")
        assert lent >= await pages_read(cluster)
        assert await cluster.metric("kvrelay_page_mismatches_total") == 0
        await cluster.assert_at_baseline()
        for worker in await cluster.status():
            host = {pool.pool: pool for pool in worker.load.pools}["host"]
            assert host.free + host.cached_evictable + host.in_flight == host.total


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("fault", ["prefill-0/kill:lending", "decode-0/kill:lending"])
async def test_a_worker_that_dies_while_the_host_is_read_costs_no_token(
    ray, tiny: Path, fault: str
) -> None:
    async with running(
        tiny, dtype="float32", debug_faults=fault, worker_timeout=3.0, **LITTLE
    ) as cluster:
        expected = await ask(cluster)
        before = {worker.incarnation for worker in await cluster.status()}
        for _ in range(10):
            assert await ask(cluster) == expected
            now = {worker.incarnation for worker in await cluster.status()}
            if now != before:
                break
        assert now != before, "nobody has died"
        for _ in range(2):
            assert await ask(cluster) == expected
        await cluster.assert_at_baseline()
