"""KV in FP8 crosses from worker to worker as it is: the tokens are those of one worker."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from kvrelay.engine.config import PrefixIndexKind
from kvrelay.model_runner.attention.kv_dtype import KVDtype
from tests.cluster.in_process import in_process

PROMPTS = [[(13 * i + 7 * seed) % 500 for i in range(20 + 17 * seed)] for seed in range(4)]
PAGE_SIZE = 4
OPTIONS: dict[str, Any] = {
    "kv_dtype": KVDtype.FP8_E4M3,
    "page_size": PAGE_SIZE,
    "kv_memory": 2 << 20,
    "prefix_index": PrefixIndexKind.NONE,
}

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


async def tokens_of(path: Path, aggregated: int = 0) -> tuple[list[list[int]], float]:
    """Each prompt's, and the bytes that were read from worker to worker for one page."""
    async with in_process(path, aggregated=aggregated, **OPTIONS) as cluster:
        answers = [
            cluster.generate(prompt, temperature=0, max_tokens=16, ignore_eos=True)
            for prompt in PROMPTS
        ]
        tokens = [answer.tokens for answer in await asyncio.gather(*answers)]
        if aggregated:
            return tokens, 0.0
        pages = await cluster.metric("kvrelay_transfer_pages_total")
        return tokens, await cluster.metric("kvrelay_transfer_bytes_total") / pages


async def test_a_pair_goes_on_as_one_worker_does(tiny: Path) -> None:
    pair, page_bytes = await tokens_of(tiny)
    assert (pair, 0.0) == await tokens_of(tiny, aggregated=1)
    model = AutoConfig.from_pretrained(tiny)
    numbers = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * PAGE_SIZE
    assert page_bytes == numbers, "of a byte each"
