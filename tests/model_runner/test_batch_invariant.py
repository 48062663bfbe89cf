"""With --batch-invariant a token's logits are the same bits in every batch and every chunk."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from torch.utils._python_dispatch import TorchDispatchMode

from kvrelay.model_runner.attention.kv_dtype import KVDtype
from kvrelay.model_runner.errors import UnsupportedOptionError
from kvrelay.model_runner.runner import ModelRunner
from tests.model_runner.product_units import UNITS, be_a_processor_of
from tests.model_runner.sequences import Sequences
from tests.model_runner.test_decoder import EXPERTS, LATENT, NAMES
from tests.model_runner.tiny_models import Models
from tests.pairwise import few

LENGTH = 60
QUICK = {
    "bfloat16": {
        ("llama", "floats"),
        ("deepseek-v3-experts", "floats"),
        ("llama", "pairs"),
        ("deepseek-v3-experts", "pairs"),
        ("gemma2", "tiles"),
    },
    "float32": {("qwen3-window", "tiles"), ("deepseek-v3-experts", "tiles")},
}

MOVES = {
    "_to_copy",
    "cat",
    "clone",
    "contiguous",
    "copy_",
    "detach",
    "embedding",
    "empty",
    "empty_like",
    "flatten",
    "index",
    "index_put_",
    "lift_fresh",
    "new_empty",
    "ones_like",
    "resolve_conj",
    "resolve_neg",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "stack",
    "to",
    "unbind",
    "unsqueeze",
    "view",
    "zeros_like",
}
"""Operators that copy, or round to another dtype."""
ROUNDED_ONCE = {"add", "div", "mul"}
"""Of two numbers each."""
CHOICES = {"gather", "masked_fill", "scatter_", "topk"}
"""Of experts, by numbers of the token alone."""


class Operators(TorchDispatchMode):
    """Notes what torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.names.add(str(func).split(".")[1])
        return func(*args, **(kwargs or {}))


def alone(runner: ModelRunner, tokens: list[int]) -> torch.Tensor:
    """Logits ``[LENGTH, vocab]``, token by token."""
    running = Sequences(runner, 1, LENGTH)
    return torch.cat([running.forward({0: [token]}) for token in tokens[:LENGTH]])


def in_chunks_beside_others(runner: ModelRunner, tokens: list[int]) -> torch.Tensor:
    """The same: some chunks, then tokens, each in a batch with other sequences."""
    running = Sequences(runner, 4, LENGTH)
    parts = []
    for a, b in pairwise([0, 30, 31, 48, *range(49, LENGTH + 1)]):
        others = {i: tokens[(a + i) : (b + i)] for i in (1, 2, 3)}
        parts.append(running.forward({**others, 0: tokens[a:b]})[-(b - a) :])
    return torch.cat(parts)


def cases() -> Iterator[ParameterSet]:
    """Every architecture in both dtypes, and by each unit; most of them in the slow tests."""
    for dtype, quick in QUICK.items():
        for name in (*NAMES, *EXPERTS):
            units = UNITS if dtype == "bfloat16" else UNITS[-1:]
            for unit in units:
                marks = () if (name, unit) in quick else (pytest.mark.slow,)
                yield pytest.param(name, dtype, unit, marks=marks)


@few(3)
@pytest.mark.parametrize(("name", "dtype", "unit"), list(cases()))
def test_alone_equals_in_chunks_beside_others(
    name: str,
    dtype: str,
    unit: str,
    models: Models,
    tokens: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if dtype == "bfloat16":
        be_a_processor_of(unit, monkeypatch)
    runner = ModelRunner(models.folder(name), dtype, "cpu", batch_invariant=True)
    expected = alone(runner, tokens)
    assert torch.equal(in_chunks_beside_others(runner, tokens), expected)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen3-window", "bfloat16"),
        *(
            pytest.param(name, dtype, marks=pytest.mark.slow)
            for name, dtype in [("llama", "float32"), (LATENT[0], "bfloat16")]
        ),
    ],
)
def test_kv_in_fp8_is_read_as_it_was_written(
    name: str, dtype: str, models: Models, tokens: list[int]
) -> None:
    runner = ModelRunner(
        models.folder(name), dtype, "cpu", batch_invariant=True, kv_dtype=KVDtype.FP8_E4M3
    )
    expected = alone(runner, tokens)
    assert torch.equal(in_chunks_beside_others(runner, tokens), expected)


@pytest.mark.slow  # tiny models have it in `make test`
def test_a_real_model(smollm2: Path, tokens: list[int]) -> None:
    runner = ModelRunner(smollm2, "bfloat16", "cpu", batch_invariant=True)
    expected = alone(runner, tokens)
    assert torch.equal(in_chunks_beside_others(runner, tokens), expected)


@pytest.mark.parametrize("name", ["llama", LATENT[0]])
def test_a_resumed_stream_computes_its_output_as_a_prompt(
    name: str, models: Models, tokens: list[int]
) -> None:
    runner = ModelRunner(models.folder(name), "bfloat16", "cpu", batch_invariant=True)
    whole = Sequences(runner, 1, LENGTH).forward({0: tokens[:LENGTH]})
    assert torch.equal(whole, alone(runner, tokens))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["qwen3-window", "gemma2", "deepseek-v2-groups", EXPERTS[-1]])
def test_torch_only_moves_and_rounds(
    name: str, dtype: str, models: Models, tokens: list[int]
) -> None:
    """What it computes beside that is not one by design, were it the same today."""
    runner = ModelRunner(models.folder(name), dtype, "cpu", batch_invariant=True)
    running = Sequences(runner, 2, LENGTH)
    with Operators() as operators:
        running.forward({0: tokens[:30], 1: tokens[:5]})
        running.forward({0: tokens[30:31], 1: tokens[5:6]})
    assert operators.names - MOVES - ROUNDED_ONCE - CHOICES == set()


@pytest.mark.parametrize("name", ["qwen3-window", "gemma2", "gemma3", "deepseek-v2-yarn"])
def test_float32_is_as_transformers_computes(name: str, models: Models, tokens: list[int]) -> None:
    runner = ModelRunner(models.folder(name), "float32", "cpu", batch_invariant=True)
    got = Sequences(runner, 1, LENGTH).forward({0: tokens[:LENGTH]})
    torch.testing.assert_close(got, models.logits(name, tokens[:LENGTH]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_dtypes_are_refused(dtype: str, models: Models) -> None:
    with pytest.raises(UnsupportedOptionError, match="--batch-invariant"):
        ModelRunner(models.folder("llama"), dtype, "cpu", batch_invariant=True)
