"""64 requests at once with one system prompt: computed once by each P, moved once to each D."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.checkpoints import VOCAB_SIZE
from tests.cluster.in_process import in_process
from tests.cluster.running import Cluster

NUMBER = 64
PAGE_SIZE = 16
PREFIX = random.Random(5).choices(range(VOCAB_SIZE), k=128 * PAGE_SIZE)
SUFFIX_PAGES = 1
OUTPUT = 4


def prompt(number: int) -> list[int]:
    rng = random.Random(number)
    return [*PREFIX, *(rng.randrange(VOCAB_SIZE) for _ in range(SUFFIX_PAGES * PAGE_SIZE))]


async def of_worker(cluster: Cluster, name: str, worker: str) -> float:
    return await cluster.metric(f"kvrelay_{name}_total", worker=worker)


async def assert_computed_once(cluster: Cluster, worker: str, generated: int = 0) -> float:
    """Return how many prompts a worker has had."""
    number = await of_worker(cluster, "prefix_lookups", worker)
    distinct = len(PREFIX) + number * SUFFIX_PAGES * PAGE_SIZE
    computed = await of_worker(cluster, "computed_tokens", worker) - number * generated
    assert number
    assert distinct <= computed <= 1.1 * distinct
    return number


async def assert_moved_once(cluster: Cluster, worker: str) -> float:
    """Return how many prompts a worker has taken over."""
    number = await of_worker(cluster, "prefix_lookups", worker)
    distinct = len(PREFIX) // PAGE_SIZE + number * SUFFIX_PAGES
    assert distinct <= await of_worker(cluster, "transfer_pages", worker) <= 1.1 * distinct
    return number


@pytest.mark.slow  # `tests/engine/test_prefix_waits.py` has it in virtual time
@pytest.mark.parametrize(
    "aggregated",
    [pytest.param(0, id="pairs"), pytest.param(2, id="aggregated", marks=pytest.mark.slow)],
)
async def test_one_system_prompt_is_computed_and_moved_once(tiny, aggregated) -> None:
    sides = {"aggregated": 2} if aggregated else {"prefill": 2, "decode": 2}
    page_bytes = 3 * 2 * 2 * PAGE_SIZE * 16 * 4
    async with in_process(
        tiny,
        kv_memory=2000 * page_bytes,
        chunk_tokens=64,
        prefix_wait=60.0,
        prefix_index_entries=0,  # every worker gets some: none is preferred for what it has
        **sides,
    ) as cluster:
        asking = (
            cluster.generate(prompt(number), temperature=0, max_tokens=OUTPUT, ignore_eos=True)
            for number in range(NUMBER)
        )
        answers = await asyncio.gather(*asking)
        assert all(len(answer.tokens) == OUTPUT for answer in answers)
        computed = moved = 0.0
        for worker in [worker.worker for worker in await cluster.status()]:
            if "decode" in worker:
                moved += await assert_moved_once(cluster, worker)
            else:
                generated = OUTPUT - 1 if aggregated else 0
                computed += await assert_computed_once(cluster, worker, generated)
        assert computed == NUMBER
        assert moved == (0 if aggregated else NUMBER)
        again = await cluster.generate(prompt(0), temperature=0, max_tokens=OUTPUT, ignore_eos=True)
        assert again.tokens == answers[0].tokens
        await cluster.assert_at_baseline()
