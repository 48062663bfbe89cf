"""What is computed row by row is the same to the last bit in every batch, by every thread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kvrelay.model_runner.checkpoint.config_reader import read_config
from kvrelay.model_runner.errors import UnsupportedOptionError
from kvrelay.model_runner.layers.elementwise import TorchElementwise
from kvrelay.model_runner.layers.elementwise_choice import make_elementwise
from kvrelay.model_runner.layers.elementwise_trial import (
    is_rowwise,
    row_functions,
    try_elementwise,
)
from kvrelay.model_runner.runner import ModelRunner
from tests.model_runner.tiny_models import Models

CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SIZES = (70, 1000)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """So many threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@DTYPES
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul", "sigmoid"])
def test_activations_of_every_number_of_rows(
    threads: int, dtype: torch.dtype, size: int, name: str
) -> None:
    function = getattr(make_elementwise(dtype, CPU, batch_invariant=True), name)
    dtype = torch.float32 if name == "sigmoid" else dtype
    assert is_rowwise(function, (torch.empty(1, 2 * size, dtype=dtype),), range(2, 65))


@DTYPES
@pytest.mark.parametrize("name", ["llama", "qwen3-window", "gemma2", "deepseek-v3-experts"])
def test_all_that_a_model_computes(
    threads: int, dtype: torch.dtype, name: str, models: Models
) -> None:
    elementwise = make_elementwise(dtype, CPU, batch_invariant=True)
    config = read_config(models.folder(name))
    for what, function, rows in row_functions(config, elementwise, dtype):
        assert is_rowwise(function, rows), what


def test_experts_without_a_shared_one(models: Models) -> None:
    config = read_config(models.folder("deepseek-v3-experts"))
    layers = tuple(
        replace(one, moe=one.moe and replace(one.moe, shared_intermediate_size=0))
        for one in config.layers
    )
    elementwise = make_elementwise(torch.float32, CPU, batch_invariant=True)
    try_elementwise(replace(config, layers=layers), elementwise, torch.float32)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul", "sigmoid"])
def test_they_differ_from_torchs_by_its_last_bits(size: int, name: str) -> None:
    invariant = make_elementwise(torch.float32, CPU, batch_invariant=True)
    x = torch.randn(5, 2 * size) * 5
    x[0, :6] = torch.tensor([0.0, -0.0, 100.0, -100.0, torch.nan, 3e38])
    expected = getattr(TorchElementwise(), name)(x)
    torch.testing.assert_close(
        getattr(invariant, name)(x), expected, rtol=1e-5, atol=1e-5, equal_nan=True
    )


def test_a_function_that_depends_on_its_neighbours_is_refused(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    def carry(elementwise: TorchElementwise, gate_up: torch.Tensor) -> torch.Tensor:
        return gate_up.chunk(2, dim=-1)[0].cumsum(0)

    monkeypatch.setattr(
        "kvrelay.model_runner.layers.elementwise.InvariantElementwise.silu_mul", carry
    )
    with pytest.raises(UnsupportedOptionError, match="--batch-invariant: the activation of"):
        ModelRunner(models.folder("llama"), "float32", "cpu", batch_invariant=True)


def test_the_trial_finds_what_torch_does(models: Models) -> None:
    """Its own sigmoid: eight elements are left over, sixteen are a vector on most machines."""
    found = not is_rowwise(TorchElementwise().sigmoid, (torch.empty(1, 8),), range(2, 65))
    elementwise = make_elementwise(torch.float32, CPU, batch_invariant=True)
    try_elementwise(read_config(models.folder("deepseek-v3-experts")), elementwise, torch.float32)
    if not found:
        pytest.skip("this machine's torch computes both by the same instructions")
