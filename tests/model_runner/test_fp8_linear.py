"""Products of FP8, the device's own replaced by one that checks its arguments and is exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from kvrelay.model_runner.layers import fp8_linear
from kvrelay.model_runner.layers import linear as linear_module
from kvrelay.model_runner.layers.fp8_linear import (
    BlockScaledLinear,
    RowScaledLinear,
    fp8_products_lack,
    quantize_blocks,
    quantize_rows,
)
from kvrelay.model_runner.layers.fp8_weight import FP8, Fp8Weight
from kvrelay.model_runner.layers.linear import LinearFactory
from kvrelay.model_runner.runner import ModelRunner
from tests.model_runner.fp8_models import FORMATS, of_blocks, of_channels, spread, write_fp8
from tests.model_runner.scaled_mm_double import scaled_mm
from tests.model_runner.sequences import Sequences
from tests.model_runner.tiny_models import Models


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "scaled_mm", scaled_mm)


def lack_shapes_alone(weight: Fp8Weight, _: torch.dtype) -> str | None:
    outputs, inputs = weight.values.shape
    fits = inputs % (128 if weight.blocks else 16) == outputs % 16 == 0
    return None if fits else "a shape"


def made_products(patch: pytest.MonkeyPatch) -> list[str]:
    """The names of the products in FP8 that are made from now on."""
    made: list[str] = []
    for kind in (RowScaledLinear, BlockScaledLinear):
        init = kind.__init__

        def noted(self: Any, *args: Any, init: Any = init, name: str = kind.__name__) -> None:
            made.append(name)
            init(self, *args)

        patch.setattr(kind, "__init__", noted)
    return made


def make_weight(outputs: int, inputs: int, blocks: bool, static: bool = False) -> Fp8Weight:
    torch.manual_seed(outputs + inputs)
    weight = torch.randn(outputs, inputs) * torch.rand(outputs, 1)
    scales = (of_blocks if blocks else of_channels)(weight)
    values = (weight / spread(scales, weight.shape)).to(FP8)
    return Fp8Weight(values, scales, blocks, torch.tensor(0.01) if static else None)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("kind", "outputs", "inputs"),
    [
        (RowScaledLinear, 48, 32),
        (RowScaledLinear, 128, 640),
        (BlockScaledLinear, 256, 128),
        (BlockScaledLinear, 192, 640),  # not whole blocks of outputs; five blocks of inputs
        (BlockScaledLinear, 128, 512),
    ],
)
@pytest.mark.parametrize("rows", [1, 4, 7])
def test_product(
    kind: Callable[[Fp8Weight, torch.Tensor | None], RowScaledLinear | BlockScaledLinear],
    outputs: int,
    inputs: int,
    rows: int,
    has_bias: bool,
) -> None:
    """Off by what FP8 rounds of inputs, 3 bits of mantissa, and by no more."""
    weight = make_weight(outputs, inputs, kind is BlockScaledLinear)
    x = torch.randn(rows, inputs).to(torch.bfloat16)
    bias = torch.randn(outputs).to(torch.bfloat16) if has_bias else None
    linear = kind(weight, bias)
    got = linear(x)
    assert got.shape == (rows, outputs)
    assert got.is_contiguous()
    exact = functional.linear(x.double(), weight.dequantize(torch.float64))
    bound = x.abs().double() @ weight.dequantize(torch.float64).abs().t() * 2**-4
    if bias is not None:
        exact += bias
    # Beside rounding the result to bfloat16, and inputs near zero to the smallest FP8.
    assert ((got - exact).abs() <= bound + exact.abs() * 2**-7 + 1e-2).all()
    residual = torch.randn(rows, outputs).to(torch.bfloat16)
    assert torch.equal(linear.add_to(residual, x), residual + got)
    alone = torch.cat([linear(row[None]) for row in x])
    assert torch.equal(alone, got), "a row's scales are its own"


def test_rows_keep_their_largest_number() -> None:
    x = torch.randn(5, 64) * torch.tensor([1e-6, 1.0, 1e4, 0.0, 3.0])[:, None]
    values, scales = quantize_rows(x)
    assert torch.equal(values.float().abs().amax(1), torch.tensor([448.0, 448, 448, 0, 448]))
    wide = values.float() * scales
    assert ((wide - x).abs() <= x.abs() * 2**-4 + scales * 2**-10).all()


def test_blocks_keep_their_largest_number() -> None:
    x = torch.randn(4, 256) * torch.tensor([1.0, 1e3]).repeat_interleave(128)
    values, scales = quantize_blocks(x)
    assert scales.shape == (4, 2)
    assert scales.stride() == (1, 4)
    wide = values.float() * scales.repeat_interleave(128, 1)
    assert ((wide - x).abs() <= x.abs() * 2**-4 + scales.max() * 2**-10).all()
    assert (values.float().view(4, 2, 128).abs().amax(-1) == 448).all()


def test_a_static_scale_cuts_off_what_is_too_large() -> None:
    x = torch.tensor([[1.0, -1000.0, 448.0, torch.nan]])
    values, scales = quantize_rows(x, torch.tensor(0.5))
    assert values.float()[0, :3].tolist() == [2.0, -448.0, 448.0]
    assert values.float()[0, 3].isnan()
    assert scales.tolist() == [[0.5]]


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    """The sampler refuses such rows; they must not become numbers."""
    x = torch.randn(2, 128)
    x[1, 3] = bad
    for values, scales in (quantize_rows(x), quantize_blocks(x)):
        wide = values.float() * scales
        assert wide[0].isfinite().all()
        assert wide[1].isnan().any()


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("name", "form", "most"),
    [
        *(("llama-biased", form, 0.15) for form in FORMATS if "block" not in form),
        *(("llama-wide", form, 0.15) for form in FORMATS if "static" not in form),
        ("deepseek-wide", "fp8-block", 0.2),
        ("deepseek-wide", "fp8-tensor", 0.2),
    ],
)
def test_a_model_s_logits_are_near_those_of_the_dequantized_weights(
    name: str,
    form: str,
    most: float,
    models: Models,
    tokens: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Near: inputs are rounded, too. Products that were given the wrong scales are far."""
    quantized, _ = write_fp8(models.folder(name), FORMATS[form], tmp_path)
    reference = Sequences(ModelRunner(quantized, "bfloat16", "cpu"), 1, 40)
    expected = reference.forward({0: tokens[:30]})
    monkeypatch.setattr(linear_module, "fp8_products_lack", lack_shapes_alone)
    made = made_products(monkeypatch)
    running = Sequences(ModelRunner(quantized, "bfloat16", "cpu"), 1, 40)
    got = running.forward({0: tokens[:30]})
    assert made
    error = (got - expected).norm() / expected.norm()
    assert 0 < error < most


def test_order_of_outputs() -> None:
    weight = make_weight(256, 64, blocks=False)
    order = np.random.default_rng(0).permutation(256)
    got = weight.reorder(order).dequantize(torch.float32)
    assert torch.equal(got, weight.dequantize(torch.float32)[torch.from_numpy(order)])


def test_order_within_blocks() -> None:
    weight = make_weight(256, 64, blocks=True)
    within = np.concatenate([np.arange(128)[::-1], np.arange(128, 256)])
    got = weight.reorder(within).dequantize(torch.float32)
    assert torch.equal(got, weight.dequantize(torch.float32)[torch.from_numpy(within)])
    across = np.roll(np.arange(256), 1)
    assert not weight.keeps_scales(across)
    with pytest.raises(AssertionError):
        weight.reorder(across)


def on_cuda(weight: Fp8Weight) -> Fp8Weight:
    """The same with a device that is not there."""
    values = torch.empty(weight.values.shape, dtype=FP8, device="meta")

    class Values:
        shape = values.shape
        device = torch.device("cuda", 0)

    return Fp8Weight(Values(), weight.scales, weight.blocks)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outputs", "inputs", "blocks", "capability", "cuda", "lack"),
    [
        (64, 128, False, (8, 9), "12.4", None),
        (64, 128, False, (9, 0), "12.4", None),
        (64, 128, True, (9, 0), "12.9", None),
        (64, 128, True, (9, 0), "13.0", None),
        (64, 128, False, (8, 0), "13.0", "need a GPU of sm_89 or later"),
        (64, 128, True, (10, 0), "13.0", "need a GPU of sm_90"),
        (64, 128, True, (9, 0), "12.8", "need torch for CUDA 12.9"),
        (64, 120, False, (9, 0), "13.0", "a weight of 64 outputs and 120 inputs"),
        (56, 128, False, (9, 0), "13.0", "a weight of 56 outputs and 128 inputs"),
        (64, 192, True, (9, 0), "13.0", "a weight of 64 outputs and 192 inputs"),
    ],
)
def test_what_devices_lack(
    outputs: int,
    inputs: int,
    blocks: bool,
    capability: tuple[int, int],
    cuda: str,
    lack: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    weight = on_cuda(make_weight(outputs, inputs, blocks))
    got = fp8_products_lack(weight, torch.bfloat16)
    assert got == lack if lack is None else lack in (got or "")
    assert "not float16" in (fp8_products_lack(weight, torch.float16) or "")


def test_a_cpu_dequantizes() -> None:
    weight = make_weight(64, 128, blocks=True)
    assert fp8_linear.fp8_products_lack(weight, torch.bfloat16) == "cpu multiplies no FP8"
    linear = LinearFactory().make_fp8(weight, None, torch.float32)
    x = torch.randn(3, 128)
    assert torch.equal(linear(x), functional.linear(x, weight.dequantize(torch.float32)))
