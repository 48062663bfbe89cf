"""`kvrelay.client` with two routers and real workers: a router is killed in mid-stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvrelay.client import AsyncClient
from tests.client.router_processes import ask_and_kill, router_processes
from tests.cluster.in_process import in_process

PROMPT = [5, 17, 3, 80, 41]
LENGTH = 200
SAMPLING: dict[str, Any] = {
    "max_tokens": LENGTH,
    "temperature": 1.0,
    "ignore_eos": True,
    "logprobs": 1,
}


@pytest.mark.slow  # `tests/client/test_two_routers.py` has it with scripted workers
@pytest.mark.parametrize("blocking", [False, True], ids=["asyncio", "threads"])
async def test_a_stream_goes_on_when_its_router_is_killed(
    tiny: Path, tmp_path: Path, blocking: bool
) -> None:
    """It sets no seed: the other router makes the same one of the request's id."""
    key = tmp_path / "key"
    key.write_text("one secret for all routers")
    async with (
        in_process(tiny, kv_memory=16 << 20) as cluster,
        router_processes(tiny, [cluster.discovery] * 2, [key] * 2) as routers,
    ):
        answer, killed_at = await ask_and_kill(routers, PROMPT, blocking=blocking, **SAMPLING)
        assert 0 < killed_at < LENGTH
        seed = answer.complete.seed
        expected = await cluster.generate(PROMPT, seed=seed, **SAMPLING)
        assert answer.token_ids == expected.tokens
        assert answer.text == expected.text
        assert [one.token_id for one in answer.outputs[0].logprobs] == expected.tokens
        for router in routers:
            if router.is_alive:
                async with AsyncClient(router.address, retry_seconds=0) as client:
                    again = client.generate(PROMPT, request_id=answer.request_id, **SAMPLING)
                    same = [token async for one in again for token in one.delta.token_ids]
                    other = await client.answer(PROMPT, **SAMPLING)
        assert same == answer.token_ids
        assert other.complete.seed != seed
        await cluster.assert_at_baseline()
