"""Whole forwards have the same bits with any number of threads, and while it changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from kvrelay.cpu_kernels.kernel_threads import KernelThreads
from kvrelay.model_runner.attention import cpu_attention, fp8_pages
from kvrelay.model_runner.attention.kv_dtype import KVDtype
from kvrelay.model_runner.layers import elementwise, linear
from kvrelay.model_runner.runner import ModelRunner
from tests.model_runner.sequences import Sequences
from tests.model_runner.test_decoder import LATENT
from tests.model_runner.tiny_models import Models

TINY = ("llama", "gemma2", "qwen3-window", LATENT[0])


def changing() -> Callable[[], int]:
    """One layer by one thread, the next one by three, and so on."""
    numbers = itertools.cycle([2, 1, 3])
    return lambda: next(numbers)


OFFERS: list[Callable[[], Callable[[], int]]] = [lambda: lambda: 2, lambda: lambda: 3, changing]


def all_logits(
    runner: ModelRunner, tokens: list[int], scale: int, offer: Callable[[], int]
) -> torch.Tensor:
    """Of chunks of several sizes, also behind others, with rows beside them, and of rows."""
    running, size = Sequences(runner, 4, 12 * scale), scale
    steps: list[dict[int, Sequence[int]]] = [
        {0: tokens[: 6 * size]},
        {0: tokens[6 * size : 8 * size], 1: tokens[3 : 3 + size]},
        {0: tokens[8 * size : 8 * size + 1], 1: tokens[5:6], 2: tokens[: 5 * size]},
        {0: [7], 1: [8], 2: tokens[9 : 9 + size // 2], 3: tokens[1:5]},
        {0: [9], 1: [10], 2: [11], 3: [12]},
    ]
    with runner.kernel_threads.widened(offer):
        return torch.cat([running.forward(step) for step in steps])


def has_the_same_bits(runner: ModelRunner, tokens: list[int], scale: int) -> None:
    expected = all_logits(runner, tokens, scale, lambda: 1)
    for make in OFFERS:
        assert torch.equal(all_logits(runner, tokens, scale, make()), expected)


@pytest.fixture
def all_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is small."""
    monkeypatch.setattr(linear, "SHARED_WEIGHTS", 1)
    monkeypatch.setattr(elementwise, "SHARED_ELEMENTS", 1)
    monkeypatch.setattr(cpu_attention, "SHARED_PRODUCTS", 1)
    monkeypatch.setattr(cpu_attention, "_SHARED_TOKENS", 1)
    monkeypatch.setattr(fp8_pages, "_SHARED_NUMBERS", 1)


@pytest.mark.usefixtures("all_shared")
@pytest.mark.parametrize("kv_dtype", [KVDtype.AUTO, KVDtype.FP8_E4M3])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("name", TINY)
def test_tiny_models(
    name: str, batch_invariant: bool, kv_dtype: KVDtype, models: Models, tokens: list[int]
) -> None:
    runner = ModelRunner(
        models.folder(name),
        "bfloat16",
        "cpu",
        kernel_threads=KernelThreads(1),
        batch_invariant=batch_invariant,
        kv_dtype=kv_dtype,
    )
    has_the_same_bits(runner, tokens * 10, 9)


@pytest.mark.usefixtures("all_shared")
@pytest.mark.parametrize("name", ["gemma2", LATENT[0]])
def test_tiny_models_in_float32(name: str, models: Models, tokens: list[int]) -> None:
    """Batch invariant: else torch computes most of it."""
    runner = ModelRunner(
        models.folder(name),
        "float32",
        "cpu",
        kernel_threads=KernelThreads(1),
        batch_invariant=True,
    )
    assert runner.shares_prompts
    has_the_same_bits(runner, tokens * 10, 9)


@pytest.mark.slow  # tiny models have it in `make test`
def test_a_real_model_in_chunks_that_threads_share(smollm2: Path, tokens: list[int]) -> None:
    runner = ModelRunner(smollm2, "bfloat16", "cpu", kernel_threads=KernelThreads(1))
    has_the_same_bits(runner, tokens * 10, 44)
