"""Every architecture gives the logits of transformers, however its tokens are cut into forwards."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.mem_cache.geometry import KVGeometry, PageOrder
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.attention import torch_attention
from kvrelay.model_runner.attention.cpu_attention import CpuAttention
from kvrelay.model_runner.batch import ForwardBatch
from kvrelay.model_runner.layers.decoder import Decoder
from kvrelay.model_runner.runner import ModelRunner
from tests.model_runner.sequences import Sequences
from tests.model_runner.tiny_models import Models

WINDOWED = ["mistral-window", "qwen2-window", "qwen3-window", "gemma2", "gemma3"]
LATENT = ["deepseek-v2", "deepseek-v2-yarn", "deepseek-v3", "deepseek-v3-halves", "youtu"]
EXPERTS = [
    "deepseek-v2-experts",
    "deepseek-v2-groups",
    "deepseek-v3-experts",
    "glm4-lite-experts",
    "qwen2-experts",
    "qwen3-experts",
    "glm4-experts",
    "minimax-experts",
    "gpt-oss-experts",
]
NAMES = [
    "llama",
    "llama-tied",
    "llama-biased",
    "llama-mha",
    "llama-linear",
    "llama-llama3",
    "llama-yarn",
    "mistral",
    "qwen2",
    "qwen3",
    "granite",
    "olmo2",
    *WINDOWED,
    *LATENT,
]
OFTEN = [
    pytest.param(name, marks=pytest.mark.slow if name.startswith(("llama-", "granite")) else ())
    for name in NAMES
]
"""For tests in which what these have of their own, heads and positions, is computed as in any."""
HALVES = ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)]
"""Kernels of float16 take half a minute to compile, and few compute in it on a CPU."""


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [*NAMES, "olmo3"])
def test_whole_prompt(name: str, models: Models, tokens: list[int]) -> None:
    # Past yarn's and llama3's original context of 32, where their scaling is felt.
    running = Sequences(ModelRunner(models.folder(name), "float32", "cpu"), 1, 100)
    assert_close(running.forward({0: tokens[:100]}), models.logits(name, tokens[:100]))


@pytest.mark.parametrize(
    "name",
    ["llama", "llama-yarn", "mistral", "qwen2", "qwen3", "granite", "olmo3", *WINDOWED, *LATENT],
)
def test_chunks_then_decode(name: str, models: Models, tokens: list[int]) -> None:
    running = Sequences(ModelRunner(models.folder(name), "float32", "cpu"), 1, 60)
    cuts = [0, 1, 8, 30, 31, 50, 51, 52, 53]
    parts = [running.forward({0: tokens[a:b]}) for a, b in pairwise(cuts)]
    assert_close(torch.cat(parts), models.logits(name, tokens[:53]))


@pytest.mark.parametrize("name", [*EXPERTS, "mixtral-experts"])
def test_experts(name: str, models: Models, tokens: list[int]) -> None:
    # In float64: these small random models amplify float32's rounding tenfold, transformers' too.
    running = Sequences(ModelRunner(models.folder(name), "float64", "cpu"), 1, 60)
    parts = [running.forward({0: tokens[a:b]}) for a, b in pairwise([0, 1, 8, 50, 51, 52, 53])]
    assert_close(torch.cat(parts), models.logits_in_float64(name, tokens[:53]))


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("name", [*WINDOWED, *LATENT, "gpt-oss-experts"])
def test_evicted_pages_are_not_read(
    name: str,
    page_size: int,
    backend: str,
    models: Models,
    tokens: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if backend == "torch":
        monkeypatch.setattr(CpuAttention, "runs", staticmethod(lambda device, dtype: False))
    # Chunks that end inside of the first window, that cross it, that are longer than a window
    # and in blocks of it, that lie beyond it; then decode beside another sequence's chunks.
    monkeypatch.setattr(torch_attention, "MIN_BLOCK_TOKENS", 10)
    runner = ModelRunner(models.folder(name), "float32", "cpu")
    running = Sequences(runner, 2, 100, page_size)
    texts = [tokens[:100], tokens[20:100]]
    steps = [{0: (a, b)} for a, b in pairwise([0, 3, 7, 16, 50, 64, 66])]
    steps += [{0: (66 + i, 67 + i), 1: (4 * i, 4 * i + 4)} for i in range(17)]
    references = [models.logits(name, text) for text in texts]
    for step in steps:
        got = running.forward({i: texts[i][a:b] for i, (a, b) in step.items()})
        assert_close(got, torch.cat([references[i][a:b] for i, (a, b) in step.items()]))
    for pool, table in zip(running.pools, running.page_tables, strict=True):
        window = pool.geometry.window
        gone = 0 if window is None else max(0, 82 - window + 1) // page_size
        assert (table[0] < 0).sum() == gone


@pytest.mark.parametrize("order", list(PageOrder))
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_mixed_batches_on_shuffled_pages(
    page_size: int,
    order: PageOrder,
    dtype: str,
    models: Models,
    tokens: list[int],
) -> None:
    runner = ModelRunner(models.folder("llama"), dtype, "cpu")
    running = Sequences(runner, 3, 64, page_size, order)
    texts = [tokens[:50], tokens[50:100], tokens[20:60]]
    steps = [
        {0: (0, 20)},
        {0: (20, 21), 1: (0, 17)},
        {2: (0, 1), 0: (21, 22), 1: (17, 40)},
        {1: (40, 41), 0: (22, 23), 2: (1, 2)},
        {0: (23, 50), 2: (2, 40), 1: (41, 42)},
    ]
    references = [models.logits("llama", text) for text in texts]
    for step in steps:
        got = running.forward({i: texts[i][a:b] for i, (a, b) in step.items()})
        assert_close(got, torch.cat([references[i][a:b] for i, (a, b) in step.items()]))


def test_logits_of_the_asked_rows_only(models: Models, tokens: list[int]) -> None:
    running = Sequences(ModelRunner(models.folder("llama"), "float32", "cpu"), 2, 40)
    got = running.forward({0: tokens[:20], 1: tokens[20:30]}, logit_rows=[29, 19, 3])
    first, second = models.logits("llama", tokens[:20]), models.logits("llama", tokens[20:30])
    assert_close(got, torch.stack([second[9], first[19], first[3]]))


def test_no_rows_asked_still_writes_kv(models: Models, tokens: list[int]) -> None:
    running = Sequences(ModelRunner(models.folder("llama"), "float32", "cpu"), 1, 40)
    nothing = running.forward({0: tokens[:20]}, logit_rows=[])
    assert nothing.shape == (0, 131)
    assert nothing.dtype == torch.float32
    assert_close(running.forward({0: tokens[20:21]}), models.logits("llama", tokens[:21])[20:])


@pytest.mark.parametrize("order", list(PageOrder))
def test_only_own_pages_are_written(order: PageOrder, models: Models, tokens: list[int]) -> None:
    running = Sequences(ModelRunner(models.folder("llama"), "float32", "cpu"), 2, 12, 4, order)
    running.forward({0: tokens[:6]})
    running.forward({0: tokens[6:7]})
    own = running.page_tables[0][0].tolist()
    for layer in range(2):
        written = ~running.pools[0].layer(layer).isnan()
        per_page = written.sum(dim=(1, 2, 3, 4)).tolist()
        of_a_token = 2 * 2 * 16
        expected = {own[0]: 4 * of_a_token, own[1]: 3 * of_a_token}
        assert per_page == [expected.get(page, 0) for page in range(running.pools[0].total_pages)]


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek-v3"])
def test_warm_up_leaves_the_bound_pools_alone(name: str, models: Models) -> None:
    runner = ModelRunner(models.folder(name), "float32", "cpu")
    pools = [KVPool(geometry, 8, runner.device) for geometry in runner.make_geometries(4)]
    for pool in pools:
        pool.data.fill_(torch.nan)
    runner.bind(pools)
    runner.warm_up()
    runner.warm_up(rows_first=True)
    assert all(pool.data.isnan().all() for pool in pools)


def test_a_decode_worker_begins_with_what_rows_need(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill worker that starts beside it compiles what prompts need meanwhile."""
    runner = ModelRunner(models.folder("llama"), "float32", "cpu")
    runner.bind([KVPool(geometry, 8, runner.device) for geometry in runner.make_geometries(4)])
    tokens: list[int] = []
    forward = runner._decoder.forward

    def count(batch: ForwardBatch, backends: Any) -> Any:
        tokens.append(len(batch.positions))
        return forward(batch, backends)

    monkeypatch.setattr(runner._decoder, "forward", count)
    runner.warm_up(rows_first=True)
    assert tokens == sorted(tokens)
    tokens.clear()
    runner.warm_up()
    assert tokens == sorted(tokens, reverse=True)


def test_geometries(models: Models) -> None:
    def geometries(name: str) -> tuple[KVGeometry, ...]:
        return ModelRunner(models.folder(name), "bfloat16", "cpu").make_geometries(16)

    full = KVGeometry(2, 2, 16, torch.bfloat16, 16)
    assert geometries("llama") == (full,)
    assert geometries("mistral-window") == (replace(full, window=20),)
    near, far = (replace(full, head_dim=24, num_layers=n) for n in (2, 1))
    assert geometries("gemma3") == (far, replace(near, window=9))
    latent = KVGeometry(2, 1, 24 + 8, torch.bfloat16, 16, latent=True)
    assert geometries("deepseek-v3") == (latent,)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "name", ["llama-biased", "qwen3", "mistral-window", "gemma2", "gemma3", "deepseek-v3"]
)
def test_half_precision_is_close(name: str, dtype: str, models: Models, tokens: list[int]) -> None:
    running = Sequences(ModelRunner(models.folder(name), dtype, "cpu"), 1, 60)
    parts = [running.forward({0: tokens[:40]})]
    parts += [running.forward({0: tokens[i : i + 1]}) for i in range(40, 50)]
    expected = models.logits(name, tokens[:50])
    error = (torch.cat(parts) - expected).norm() / expected.norm()
    assert error < (0.03 if dtype == "bfloat16" else 0.004)


def test_a_multiplier_of_embeddings_is_not_rounded(models: Models, tmp_path: Path) -> None:
    shutil.copytree(models.folder("granite"), tmp_path, dirs_exist_ok=True)
    described = json.loads((tmp_path / "config.json").read_text())
    described["embedding_multiplier"] = 12.3  # 12.3125 in bfloat16
    (tmp_path / "config.json").write_text(json.dumps(described))
    decoder = ModelRunner(tmp_path, "bfloat16", "cpu")._decoder
    assert isinstance(decoder, Decoder)
    assert decoder._embed(torch.arange(50)).equal(decoder._embedding[:50] * 12.3)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "name", ["deepseek-v2-experts", "deepseek-v3-experts", "minimax-experts", "gpt-oss-experts"]
)
def test_experts_in_half_precision(
    name: str, dtype: str, models: Models, tokens: list[int]
) -> None:
    """Close for most tokens: rounding sends some of them to other experts."""
    running = Sequences(ModelRunner(models.folder(name), dtype, "cpu"), 1, 60)
    got, expected = running.forward({0: tokens[:50]}), models.logits(name, tokens[:50])
    errors = (got - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.median() < (0.06 if dtype == "bfloat16" else 0.01)


def test_smollm2_greedy_tokens_equal_transformers(smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM

    prompt = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    expected = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=12,
        do_sample=False,
    )[0].tolist()
    running = Sequences(ModelRunner(smollm2, "float32", "cpu"), 1, 40, 16)
    got, new = list(prompt), prompt
    while len(got) < len(expected):
        new = [int(running.forward({0: new})[-1].argmax())]
        got += new
    assert got == expected
