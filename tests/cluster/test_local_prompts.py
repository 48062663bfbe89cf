"""A real cluster whose decode workers compute prompts, too."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import pytest

from kvrelay.router.config import PlacementMode
from tests.checkpoints import VOCAB_SIZE
from tests.cluster.in_process import in_process
from tests.cluster.running import Cluster, running

PROMPTS = [
    [random.Random(seed).randrange(3, VOCAB_SIZE) for _ in range(16 + 13 * seed)]
    for seed in range(16)
]
NEW_TOKENS = 24


async def ask_all(cluster: Cluster) -> list[list[int]]:
    answers = await asyncio.gather(
        *(
            cluster.generate(prompt, temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
            for prompt in PROMPTS
        )
    )
    return [answer.tokens for answer in answers]


async def computed_by(cluster: Cluster, role: str) -> float:
    return await cluster.metric("kvrelay_placements_total", computed_by=role)


async def test_tokens_do_not_depend_on_placement(tiny):
    options = {"chunk_tokens": 64, "kv_memory": 8 << 20}
    async with in_process(tiny, **options) as cluster:
        expected = await ask_all(cluster)
        assert await computed_by(cluster, "decode") == 0
    async with in_process(tiny, placement=PlacementMode.ADAPTIVE, **options) as cluster:
        assert await ask_all(cluster) == expected
        assert await computed_by(cluster, "decode") > 0
        assert await computed_by(cluster, "prefill") > 0
        await cluster.assert_at_baseline()


@pytest.mark.slow  # test_chaos_alone.py kills a worker that computes prompts in `make test`
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.timeout(180)
async def test_tokens_do_not_depend_on_placement_or_on_a_lost_prefill_worker(ray, tiny):
    async with in_process(tiny, chunk_tokens=64, kv_memory=8 << 20) as cluster:
        expected = await ask_all(cluster)
        assert (await computed_by(cluster, "prefill"), await computed_by(cluster, "decode")) == (
            len(PROMPTS),
            0,
        )
    async with running(
        tiny,
        dtype="float32",
        chunk_tokens=64,
        kv_memory=8 << 20,
        placement=PlacementMode.ADAPTIVE,
    ) as cluster:
        assert await ask_all(cluster) == expected
        assert await computed_by(cluster, "decode") > 0
        assert await computed_by(cluster, "prefill") > 0
        await cluster.assert_at_baseline()
        asked = asyncio.create_task(ask_all(cluster))
        await asyncio.sleep(0.05)
        os.kill(cluster.deployment.cluster.workers["prefill-0"].pid, signal.SIGKILL)
        assert await asked == expected
        # Nobody waits until it is back.
        assert await ask_all(cluster) == expected
        await cluster.assert_at_baseline()
