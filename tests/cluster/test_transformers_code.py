"""Models of transformers' code in a running pair: their tokens are those of their own forward."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvrelay.engine.config import Speculation
from kvrelay.kv_transfer.verify_pages import VerifyPages
from kvrelay.model_runner.config.model_code import ModelCode
from kvrelay.model_runner.transformers_model.self_proof import plain_logits
from tests.checkpoints import make_tokenizer
from tests.cluster.in_process import in_process
from tests.model_runner.transformers_model.kinds import save_small

TOKENS = 12
PROMPTS = [[3 + (13 * i + 7 * seed) % 120 for i in range(9 + 14 * seed)] for seed in range(3)]
SHARED = [*PROMPTS[2], 5, 6, 7]
"""Its first tokens are in the prefix index by then."""


def greedy(model: Any, prompt: Sequence[int]) -> list[int]:
    """The tokens by the model's own forward, the whole text anew for each."""
    text = list(prompt)
    for _ in range(TOKENS):
        text.append(int(plain_logits(model, text)[-1].argmax()))
    return text[len(prompt) :]


def slow(kind: str) -> Any:
    return pytest.param(kind, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "kind",
    [
        "phi",  # one pool of keys and values; it drafts for itself
        slow("gemma4_text"),  # two pools of unlike heads, one with a window
        slow("gpt_oss"),  # the same with sinks
        slow("mimo_v2_flash"),  # keys and values of unlike width
        slow("glm4_moe_lite"),  # latents
    ],
)
async def test_pair(kind: str, tmp_path: Path) -> None:
    model = save_small(kind, tmp_path)
    options: dict[str, Any] = {"debug_retract_every": 11}
    if kind == "phi":
        options = {
            "speculation": Speculation.DRAFT,
            "draft_model_path": tmp_path,
            "debug_retract_every": 3,  # there are fewer steps
        }
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    async with in_process(
        tmp_path,
        model_code=ModelCode.TRANSFORMERS,
        kv_memory=4 << 20,
        page_size=4,
        chunk_tokens=16,
        verify_pages=VerifyPages.ALL,
        **options,
    ) as cluster:

        async def ask(prompt: Sequence[int]) -> list[int]:
            answer = await cluster.generate(
                prompt, temperature=0, max_tokens=TOKENS, ignore_eos=True
            )
            return list(answer.tokens)

        answers = [*await asyncio.gather(*map(ask, PROMPTS)), await ask(SHARED)]
        assert await cluster.metric("kvrelay_transfers_total") > 0
        assert await cluster.metric("kvrelay_retractions_total") > 0
        assert (await cluster.metric("kvrelay_accepted_draft_tokens_total") > 0) == (kind == "phi")
        await cluster.assert_at_baseline()
    assert answers == [greedy(model, prompt) for prompt in (*PROMPTS, SHARED)]
