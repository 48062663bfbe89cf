"""The modes of the loop on a running cluster: threads, NIXL, gRPC and the router included."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvrelay.engine.config import PrefixIndexKind, Speculation
from tests.cluster.in_process import in_process
from tests.cluster.running import Cluster

PROMPTS = [
    [(17 * index + 5 * place) % 500 for place in range(length)] * 2
    for index, length in enumerate((1, 7, 16, 30, 55, 100))
]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1, "seed": 11, "n": 3},
    {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.2, "logprobs": 2},
    {"temperature": 0, "prompt_logprobs": 1, "stop": ["q"]},
    {"temperature": 1, "seed": 3, "speculate": False, "n": 2},
]


async def choices_of(cluster: Cluster, prompt: list[int], sampling: dict[str, Any]) -> Any:
    """Tokens of every choice, their log-probabilities and the prompt's, and how they ended."""
    choices: dict[int, list[int]] = {}
    logprobs, scores, complete = [], [], None
    async for response in cluster.stream(prompt, max_tokens=24, ignore_eos=True, **sampling):
        delta = response.delta
        choices.setdefault(delta.choice, []).extend(delta.token_ids)
        logprobs += [(one.token_id, round(one.logprob, 3)) for one in delta.logprobs]
        scores += [(one.token_id, round(one.logprob, 3)) for one in delta.prompt_logprobs]
        complete = response.complete if response.HasField("complete") else None
    assert complete is not None
    ends = [str(end) for end in complete.choices]
    assert complete.usage.completion_tokens == sum(map(len, choices.values()))
    return choices, logprobs, scores, ends


async def all_outputs(cluster: Cluster) -> list[Any]:
    asked = [(prompt, sampling) for prompt in PROMPTS for sampling in SAMPLINGS]
    outputs = await asyncio.gather(*(choices_of(cluster, *one) for one in asked))
    await cluster.assert_at_baseline()
    return outputs


@pytest.fixture(scope="module")
async def plain(tiny: Path) -> list[Any]:
    """What one aggregated worker says that does one step after the other."""
    async with in_process(tiny, aggregated=1, overlap=False, kv_memory=64 << 20) as cluster:
        plain = await all_outputs(cluster)
        assert await cluster.metric("kvrelay_transfers_total") == 0
    for prompt, (choices, _, scores, _) in zip(PROMPTS, plain[3 :: len(SAMPLINGS)], strict=True):
        assert [token_id for token_id, _ in scores] == prompt[1:]
        assert list(choices) == [0]
    return plain


async def test_speculation_retractions_and_pairs_change_no_token(
    tiny: Path, plain: list[Any]
) -> None:
    """A plain aggregated worker, and a pair with all modes on, say the same in float32.

    NVIDIA/TensorRT-LLM#17701, vllm-project/vllm#42744.
    """
    async with in_process(
        tiny,
        kv_memory=64 << 20,
        speculation=Speculation.DRAFT,
        draft_model_path=tiny,
        debug_retract_every=9,
    ) as cluster:
        assert await all_outputs(cluster) == plain
        assert await cluster.metric("kvrelay_retractions_total") > 0
        assert await cluster.metric("kvrelay_releases_total", outcome="retracted") > 0
        drafted = await cluster.metric("kvrelay_draft_tokens_total")
        accepted = await cluster.metric("kvrelay_accepted_draft_tokens_total")
        assert 0 < accepted <= drafted


async def test_ngrams_and_little_memory_change_no_token(tiny: Path, plain: list[Any]) -> None:
    """sgl-project/sglang#26248, #30573: requests that are retracted say the same."""
    async with in_process(
        tiny,
        speculation=Speculation.NGRAM,
        prefix_index=PrefixIndexKind.NONE,
        kv_memory=2 << 20,
        growth_min=0.0,
        growth_max=0.1,
    ) as cluster:
        assert await all_outputs(cluster) == plain
        assert await cluster.metric("kvrelay_draft_tokens_total") > 0
