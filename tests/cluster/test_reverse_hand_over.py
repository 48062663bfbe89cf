"""Long turns on real workers: a prefill worker reads what the decode worker has of them by NIXL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvrelay.kv_transfer.verify_pages import VerifyPages
from kvrelay.router.config import PlacementMode
from tests.cluster.in_process import in_process
from tests.cluster.reference import Reference
from tests.cluster.running import Cluster, running
from tests.cluster.test_sessions import FIRST, Chat, some_tokens, talk_at_once
from tests.pairwise import few


async def history_reads(cluster: Cluster, outcome: str) -> float:
    return await cluster.metric("kvrelay_history_reads_total", outcome=outcome)


@few(1)
@pytest.mark.parametrize("verify", [VerifyPages.OFF, VerifyPages.ALL])
async def test_long_turns_read_the_history_and_have_the_same_tokens(
    tiny: Path, verify: VerifyPages
) -> None:
    """Without a prefix index each turn reads all of it; in the first one nobody is readable yet."""
    async with in_process(
        tiny,
        chunk_tokens=32,
        kv_memory=8 << 20,
        verify_pages=verify,
        prefix_index="none",
        placement=PlacementMode.DISAGGREGATED,
    ) as cluster:
        chat = await Chat(cluster, "chat").open()
        await chat.say(FIRST)
        for number in range(6):
            await chat.say(some_tokens(number, 60))
        assert await history_reads(cluster, "valid") >= 1
        assert await history_reads(cluster, "failed") == 0
        await chat.close()
        await cluster.assert_at_baseline()


async def test_turns_without_a_session_read_the_last_answer(tiny: Path) -> None:
    reference, tokens = Reference(tiny), list[int]()
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}
    async with in_process(tiny, chunk_tokens=32, kv_memory=8 << 20) as cluster:
        for number in range(5):
            prompt = [*tokens, *some_tokens(number, 60)]
            output = (await cluster.generate(prompt, **greedy)).tokens
            reference.assert_greedy([prompt], [output], 60)
            tokens = [*prompt, *output]
        assert await history_reads(cluster, "valid") >= 1
        assert await history_reads(cluster, "failed") == 0
        await cluster.assert_at_baseline()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("fault", [
    "prefill-0/kill:borrowing", "decode-0/kill:borrowing:2", "prefill-0/fail:pull",
    "prefill-0/drop:done", "decode-0/drop:released",
])  # fmt: skip
async def test_a_worker_that_dies_while_a_session_is_borrowed_costs_no_token(
    ray, tiny: Path, fault: str
) -> None:
    """Or a read of it that fails, or a message that is lost."""
    async with running(
        tiny,
        dtype="float32",
        chunk_tokens=64,
        kv_memory=8 << 20,
        prefix_index="none",
        placement=PlacementMode.DISAGGREGATED,
        debug_faults=fault,
        worker_timeout=3.0,
    ) as cluster:
        chat = await Chat(cluster, "chat").open()
        await chat.say(FIRST)
        for number in range(5):
            await chat.say(some_tokens(number, 60))
        await chat.close()
        await cluster.assert_at_baseline()


@pytest.mark.slow  # `tests/engine/test_reverse_hand_over.py` has it in virtual time
async def test_many_sessions_in_too_little_memory_are_read_and_end(tiny: Path) -> None:
    """Neither side waits while it holds: all turns end, and every page comes back."""
    async with in_process(
        tiny, chunk_tokens=32, kv_memory=1 << 20, placement=PlacementMode.DISAGGREGATED
    ) as cluster:
        await talk_at_once(cluster, 8)
        assert await history_reads(cluster, "failed") == 0
        await cluster.assert_at_baseline()
