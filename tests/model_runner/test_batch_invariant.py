"""With --batch-invariant a token's logits are the same bits in every batch and every chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet

from kvrelay.model_runner.errors import UnsupportedOptionError
from kvrelay.model_runner.layers.batch_invariant import RowBounds, find_row_bounds
from kvrelay.model_runner.runner import ModelRunner
from tests.model_runner.sequences import Sequences
from tests.model_runner.test_decoder import EXPERTS, LATENT, NAMES
from tests.model_runner.tiny_models import Models

LENGTH = 60
QUICK = {
    "bfloat16": ("llama", "gemma2", "deepseek-v3-experts"),
    "float32": ("qwen3-window",),
}


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
    """Every architecture in both dtypes; most of them in the slow tests."""
    for dtype, quick in QUICK.items():
        for name in (*NAMES, *EXPERTS):
            marks = () if name in quick else (pytest.mark.slow,)
            yield pytest.param(name, dtype, marks=marks)


@pytest.mark.parametrize(("name", "dtype"), list(cases()))
def test_alone_equals_in_chunks_beside_others(
    name: str, dtype: str, models: Models, tokens: list[int]
) -> None:
    try:
        runner = ModelRunner(models.folder(name), dtype, "cpu", batch_invariant=True)
    except UnsupportedOptionError as error:
        if (name in [*LATENT, *EXPERTS]) and dtype == "float32":
            pytest.skip(f"latents in float32: {error}")  # as MKL happens to be here
        raise
    expected = alone(runner, tokens)
    assert torch.equal(in_chunks_beside_others(runner, tokens), expected)


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


def test_more_rows_than_a_block() -> None:
    weight = torch.randn(24, 40)
    rows = torch.randn(600, 24)
    bounds = find_row_bounds(lambda x: x @ weight, rows[:1])
    together = bounds.apply(lambda x: x @ weight, rows)
    one_by_one = [bounds.apply(lambda x: x @ weight, row[None]) for row in rows]
    assert torch.equal(together, torch.cat(one_by_one))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        pytest.param(lambda count: 0, RowBounds(1, 256), id="none"),
        pytest.param(lambda count: count < 4, RowBounds(4, 256), id="few"),
        pytest.param(lambda count: count, RowBounds(16, 16), id="any"),
    ],
)
def test_bounds_are_found(error: Callable[[int], float], expected: RowBounds) -> None:
    def product(x: torch.Tensor) -> torch.Tensor:
        return x.sum(1, keepdim=True) + 1e-3 * error(len(x))

    assert find_row_bounds(product, torch.empty(1, 8)) == expected


def test_a_product_that_depends_on_its_neighbours_is_refused() -> None:
    with pytest.raises(UnsupportedOptionError, match="--batch-invariant"):
        find_row_bounds(lambda x: x.cumsum(0), torch.empty(1, 8))


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_dtypes_are_refused(dtype: str, models: Models) -> None:
    with pytest.raises(UnsupportedOptionError, match="--batch-invariant"):
        ModelRunner(models.folder("llama"), dtype, "cpu", batch_invariant=True)
