"""Real workers whose prefixes do not fit on the device, and come back from the host."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from kvrelay.kv_transfer.verify_pages import VerifyPages
from kvrelay.router.config import PlacementMode
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.cluster.in_process import InProcess, in_process
from tests.pairwise import few

ROLES: dict[str, dict[str, Any]] = {
    "aggregated": {"aggregated": 1},
    "pair": {"placement": PlacementMode.DISAGGREGATED},
    "adaptive": {"placement": PlacementMode.ADAPTIVE},
}
PROMPTS = [[random.Random(seed).randrange(3, VOCAB_SIZE) for _ in range(300)] for seed in range(8)]
PAGE_BYTES = 16 * 3 * 2 * 2 * 16 * 4


async def ask_all(cluster: InProcess, max_tokens: int) -> list[list[int]]:
    """In two halves, of which each fills the device."""
    answers = []
    for half in (PROMPTS[:4], PROMPTS[4:]):
        answers += await asyncio.gather(
            *(
                cluster.generate(prompt, temperature=0, max_tokens=max_tokens, ignore_eos=True)
                for prompt in half
            )
        )
    return [answer.tokens for answer in answers]


async def tier_pages(cluster: InProcess, event: str) -> float:
    return await cluster.metric("kvrelay_tier_pages_total", tier="host", event=event)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "roles",
    [pytest.param(ROLES[name], marks=() if name == "pair" else pytest.mark.slow) for name in ROLES],
    ids=ROLES.keys(),
)
async def test_prefixes_come_back_with_the_same_tokens(tiny: Path, roles: dict[str, Any]):
    async with in_process(tiny, kv_memory=8 << 20, chunk_tokens=64, **roles) as cluster:
        expected = await ask_all(cluster, 40)
    # Two prompts fit, and a third does not: some are retracted.
    little: dict[str, Any] = {"kv_memory": 56 * PAGE_BYTES, "growth_min": 0.0, "growth_max": 0.0}
    async with in_process(
        tiny, host_kv_memory=8 << 20, chunk_tokens=64, **little, **roles
    ) as cluster:
        for _ in range(3):
            assert await ask_all(cluster, 40) == expected
        assert await tier_pages(cluster, "written") > 0
        assert await tier_pages(cluster, "loaded") > 0
        for worker in await cluster.status():
            pools = {pool.pool: pool for pool in worker.load.pools}
            host = pools["host"]
            states = (host.free, host.cached_evictable, host.cached_protected, host.in_flight)
            assert sum(states) == host.total == (8 << 20) // PAGE_BYTES
        await cluster.assert_at_baseline()


@few(1)
@pytest.mark.timeout(180)
@pytest.mark.parametrize("roles", [ROLES["aggregated"], ROLES["pair"]], ids=["aggregated", "pair"])
async def test_prefixes_of_a_model_with_windows_come_back(tmp_path: Path, roles: dict[str, Any]):
    """What a decode worker reads of the host has no windows: these come from the device."""
    model = make_checkpoint(tmp_path / "gemma3", "gemma3")
    common: dict[str, Any] = {"chunk_tokens": 64, "verify_pages": VerifyPages.ALL, **roles}
    async with in_process(model, kv_memory=16 << 20, **common) as cluster:
        expected = await ask_all(cluster, 12)
    page_bytes = 16 * 3 * 2 * 2 * 32 * 4
    little: dict[str, Any] = {"kv_memory": 56 * page_bytes, "growth_min": 0.0, "growth_max": 0.0}
    async with in_process(model, host_kv_memory=8 << 20, **little, **common) as cluster:
        for _ in range(3):
            assert await ask_all(cluster, 12) == expected
        assert await tier_pages(cluster, "loaded") > 0
        assert await cluster.metric("kvrelay_page_mismatches_total") == 0
        for worker in await cluster.status():
            pools = {pool.pool: pool for pool in worker.load.pools}
            for host in (pools["host"], pools["host_window"]):
                states = (host.free, host.cached_evictable, host.cached_protected, host.in_flight)
                assert sum(states) == host.total > 0
        await cluster.assert_at_baseline()
