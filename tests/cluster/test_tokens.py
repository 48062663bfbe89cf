"""The cluster's greedy tokens are transformers' tokens, in float32, one by one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NamedTuple

import pytest
from tokenizers import Tokenizer

from kvrelay.mem_cache.geometry import PageOrder
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.cluster.in_process import in_process
from tests.cluster.reference import Reference
from tests.cluster.running import Answer, Cluster, RunningCluster, running
from tests.pairwise import few

LENGTHS = (
    1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 200, 256, 300, 511,
    700, 1500,
)  # fmt: skip
NEW_TOKENS = 64


class Size(NamedTuple):
    """Of a run."""

    lengths: tuple[int, ...]
    """Of the prompts."""
    tokens: int


SOME = Size((1, 2, 15, 16, 17, 64, 129, 300), 16)
"""In `make test`: around a page's end, and the longest takes two chunks."""
ALL = Size(LENGTHS, NEW_TOKENS)
AT_ONCE = 8
TEXT = Path(__file__).parents[2] / "LICENSE"
SHAPES = [(1, 1, 16, SOME), (2, 2, 1, ALL)]


@pytest.fixture(scope="session")
def prompts(smollm2: Path) -> list[list[int]]:
    """Real text of every one of LENGTHS, each from another place."""
    ids = Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode(TEXT.read_text()).ids
    starts = [(index * 37) % (len(ids) - max(LENGTHS)) for index in range(len(LENGTHS))]
    return [ids[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)]


@pytest.fixture(scope="session")
def reference(smollm2: Path) -> Reference:
    return Reference(smollm2)


async def ask(cluster: Cluster, prompt: list[int], max_tokens: int = NEW_TOKENS) -> Answer:
    return await cluster.generate(prompt, temperature=0, max_tokens=max_tokens, ignore_eos=True)


async def ask_at_once(
    cluster: Cluster, prompts: list[list[int]], max_tokens: int = NEW_TOKENS
) -> list[list[int]]:
    """At most `AT_ONCE` requests at any time, longest first."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(prompt: list[int]) -> list[int]:
        async with gate:
            return (await ask(cluster, prompt, max_tokens)).tokens

    return await asyncio.gather(*(one(prompt) for prompt in prompts))


def pages_lacking(prompts: list[list[int]], outputs: list[list[int]], page_size: int) -> int:
    """Pages of prompts that are served one after the other, but for those of earlier prefixes."""
    known: set[tuple[int, ...]] = set()
    lacking = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        ends = range(page_size, len(prompt) + 1, page_size)
        lacking += -(-len(prompt) // page_size) - sum(tuple(prompt[:end]) in known for end in ends)
        whole = prompt + output[:-1]  # the last token's KV is never computed
        known |= {tuple(whole[:end]) for end in range(page_size, len(whole) + 1, page_size)}
    return lacking


async def assert_moved(cluster: RunningCluster, pages: int, page_size: int) -> None:
    """NIXL moved so many pages and nothing else."""
    assert await cluster.metric("kvrelay_transfer_pages_total") == pages
    page_bytes = 30 * 2 * 3 * page_size * 64 * 4
    assert await cluster.metric("kvrelay_transfer_bytes_total") == pages * page_bytes


def serving(smollm2: Path, prefill: int, decode: int, page_size: int, prefix_index: str):
    return running(
        smollm2,
        prefill=prefill,
        decode=decode,
        page_size=page_size,
        prefix_index=prefix_index,
        dtype="float32",
        chunk_tokens=256,
    )


@pytest.mark.slow  # test_decoder.py has these weights in `make test`, and tiny ones are handed over
@pytest.mark.parametrize(("prefill", "decode", "page_size", "size"), SHAPES)
@pytest.mark.timeout(900)
async def test_smollm2_eight_at_once(
    ray, smollm2, prompts, reference, prefill, decode, page_size, size
):
    asked = [prompts[LENGTHS.index(length)] for length in size.lengths]
    async with serving(smollm2, prefill, decode, page_size, "none") as cluster:
        outputs = await ask_at_once(cluster, asked, size.tokens)
        await cluster.assert_at_baseline()
        pages = sum(-(-len(prompt) // page_size) for prompt in asked)
        await assert_moved(cluster, pages, page_size)
    reference.assert_greedy(asked, outputs, size.tokens)


@pytest.mark.parametrize(
    ("prefill", "decode", "page_size", "size"),
    [
        pytest.param(1, 1, 1, SOME, marks=pytest.mark.slow),
        pytest.param(2, 2, 16, ALL, marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(900)
async def test_smollm2_alone(ray, smollm2, prompts, reference, prefill, decode, page_size, size):
    asked = [prompts[LENGTHS.index(length)] for length in size.lengths]
    async with serving(smollm2, prefill, decode, page_size, "radix") as cluster:
        outputs = [(await ask(cluster, prompt, size.tokens)).tokens for prompt in asked]
        await cluster.assert_at_baseline()
        # With several decode workers a prefix may be with another.
        if decode == 1:
            await assert_moved(cluster, pages_lacking(asked, outputs, page_size), page_size)
    reference.assert_greedy(asked, outputs, size.tokens)


TINY = [
    ("mistral", 1, 1, 1),
    ("mistral", 2, 2, 16),
    ("qwen2", 1, 1, 16),
    ("qwen2", 2, 2, 1),
    ("qwen3", 1, 1, 16),
    ("qwen3", 2, 2, 1),
    ("mistral-window", 1, 1, 16),
    ("gemma3", 2, 2, 4),
    ("deepseek", 1, 1, 16),
    ("qwen3-moe", 1, 1, 16),
    ("gpt-oss", 2, 2, 4),
    ("glm4-lite", 1, 1, 16),
]
QUICK = [
    ("mistral", 2, 2, 16),
    ("qwen2", 2, 2, 1),
    ("qwen3", 2, 2, 1),
    ("mistral-window", 1, 1, 16),
    ("gemma3", 2, 2, 4),
    ("deepseek", 1, 1, 16),
]


@few(2)
@pytest.mark.parametrize(
    ("architecture", "prefill", "decode", "page_size", "size"),
    [
        *((*shape, SOME) for shape in QUICK),
        *(pytest.param(*shape, ALL, marks=pytest.mark.slow) for shape in TINY),
    ],
)
async def test_tiny_models_equal_transformers(
    tmp_path, architecture, prefill, decode, page_size, size
):
    path = make_checkpoint(tmp_path / architecture, architecture)
    prompts = [[(7 * i + n) % VOCAB_SIZE for i in range(n)] for n in size.lengths]
    async with in_process(
        path,
        prefill=prefill,
        decode=decode,
        page_size=page_size,
        chunk_tokens=64,
        kv_memory=32 << 20,
    ) as cluster:
        outputs = await ask_at_once(cluster, prompts, size.tokens)
        for prompt, tokens in zip(prompts, outputs, strict=True):
            answer = await ask(cluster, prompt, size.tokens)
            assert answer.tokens == tokens, f"alone, {len(prompt)} tokens"
        await cluster.assert_at_baseline()
    Reference(path).assert_greedy(prompts, outputs, size.tokens)


async def test_layer_first_pools_hand_over_too(tiny):
    prompt = list(range(40))
    async with in_process(tiny, page_order=PageOrder.LAYER_FIRST) as cluster:
        output = (await ask(cluster, prompt)).tokens
        await cluster.assert_at_baseline()
    Reference(tiny).assert_greedy([prompt], [output], NEW_TOKENS)
