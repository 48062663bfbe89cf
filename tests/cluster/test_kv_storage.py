"""Real workers that share a folder: what one has computed, another reads, with the same tokens."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from kvrelay.router.config import PlacementMode
from tests.checkpoints import VOCAB_SIZE
from tests.cluster.in_process import InProcess, in_process
from tests.cluster.running import Cluster, running
from tests.pairwise import few

PROMPTS = [[random.Random(seed).randrange(3, VOCAB_SIZE) for _ in range(300)] for seed in range(6)]
PAGES = 300 // 16
ROLES: dict[str, dict[str, Any]] = {
    "aggregated": {"aggregated": 1},
    "pair": {"placement": PlacementMode.DISAGGREGATED},
}


async def ask(cluster: Cluster, max_tokens: int = 8) -> list[list[int]]:
    """All at once."""
    answers = await asyncio.gather(
        *(
            cluster.generate(prompt, temperature=0, max_tokens=max_tokens, ignore_eos=True)
            for prompt in PROMPTS
        )
    )
    return [answer.tokens for answer in answers]


async def storage_pages(cluster: Cluster, event: str) -> float:
    return await cluster.metric("kvrelay_tier_pages_total", tier="storage", event=event)


async def written(cluster: Cluster, pages: int) -> None:
    """Wait until storage has so many."""
    while await storage_pages(cluster, "written") < pages:
        await asyncio.sleep(0.02)


def options(folder: Path) -> dict[str, Any]:
    return {
        "kv_memory": 8 << 20,
        "host_kv_memory": 8 << 20,
        "kv_storage": str(folder),
        "kv_storage_size": 32 << 20,
        "chunk_tokens": 64,
    }


async def check_pools(cluster: InProcess) -> None:
    for worker in await cluster.status():
        pools = {pool.pool: pool for pool in worker.load.pools}
        storage = pools["storage"]
        states = (storage.free, storage.cached_evictable, storage.cached_protected)
        assert sum(states) + storage.in_flight == storage.total > 0
        assert not worker.load.storage_error


@few(1)
@pytest.mark.timeout(180)
@pytest.mark.parametrize("roles", ROLES.values(), ids=ROLES.keys())
async def test_a_worker_that_never_saw_a_prefix_reads_it(
    tiny: Path, tmp_path: Path, roles: dict[str, Any]
) -> None:
    """While the one that wrote it still runs, and after that by one that has its folder."""
    async with in_process(tiny, **options(tmp_path), **roles) as first:
        expected = await ask(first)
        assert await ask(first) == expected
        await written(first, len(PROMPTS) * PAGES)
        async with in_process(tiny, **options(tmp_path), **roles) as second:
            assert await ask(second) == expected
            assert await storage_pages(second, "loaded") > 0
            await check_pools(second)
            await second.assert_at_baseline()
        await check_pools(first)
    async with in_process(tiny, **options(tmp_path), **roles) as successor:
        assert await ask(successor) == expected
        assert await storage_pages(successor, "loaded") > 0


def damage(folder: Path) -> None:
    """Write over a part of every page."""
    for segment in folder.glob("*/writer-*/segment-*"):
        with segment.open("r+b") as file:
            for offset in range(10_000, segment.stat().st_size, 10_000):
                file.seek(offset)
                file.write(b"broken")


@pytest.mark.timeout(180)
async def test_what_is_broken_in_the_folder_is_computed(tiny: Path, tmp_path: Path) -> None:
    async with in_process(tiny, aggregated=1, **options(tmp_path)) as first:
        expected = await ask(first)
        assert await ask(first) == expected
        await written(first, len(PROMPTS) * PAGES)
    damage(tmp_path)
    async with in_process(tiny, aggregated=1, **options(tmp_path)) as second:
        assert await ask(second) == expected
        assert await storage_pages(second, "broken") > 0
        await second.assert_at_baseline()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("fault", [
    "prefill-0/kill:storing", "prefill-0/kill:storing:2", "prefill-0/kill:fetching",
])  # fmt: skip
async def test_a_worker_that_is_killed_at_its_storage_costs_no_token(
    ray, tiny: Path, tmp_path: Path, fault: str
) -> None:
    """Its successor has its folder, and reads what was whole there."""
    shared = {**options(tmp_path), "dtype": "float32", "placement": PlacementMode.DISAGGREGATED}
    async with running(tiny, **shared) as cluster:
        expected = await ask(cluster)
        if "fetching" in fault:
            assert await ask(cluster) == expected
            await written(cluster, len(PROMPTS) * PAGES)
    async with running(tiny, debug_faults=fault, worker_timeout=3.0, **shared) as cluster:
        for _ in range(3):
            assert await ask(cluster) == expected
        assert await storage_pages(cluster, "broken") == 0
        await cluster.assert_at_baseline()
