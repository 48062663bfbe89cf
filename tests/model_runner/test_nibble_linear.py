"""Products with weights in 4 bits: as exact as can be, and where it is promised the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvrelay.cpu_kernels.kernel_threads import KernelThreads
from kvrelay.model_runner.checkpoint.packed_weight import PackedWeight
from kvrelay.model_runner.layers.linear import LinearFactory, PanelLinear, WeightMemory, find_unit
from kvrelay.model_runner.layers.nibble_linear import NibbleLinear
from tests.model_runner.product_units import UNITS, be_a_processor_of
from tests.model_runner.test_invariant_linear import differing_rows
from tests.model_runner.tiny_models import Models
from tests.pairwise import few

SHAPES = [(96, 64, 32), (48, 96, 24), (32, 64, 64), (16, 40, 8)]
"""Outputs, inputs and inputs of a group; whole panels or half of one, whole tiles or not."""


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=UNITS)
def unit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    be_a_processor_of(request.param, monkeypatch)
    return str(request.param)


def packed(outputs: int, inputs: int, group: int, bits: int = 4) -> PackedWeight:
    codes = torch.randint(1 << bits, (outputs, inputs), dtype=torch.uint8)
    zeros = torch.randint(1 << bits, (outputs, inputs // group), dtype=torch.uint8)
    scales = torch.rand(outputs, inputs // group).half().float()
    return PackedWeight(codes, scales, zeros, bits=bits)


def linear(weight: PackedWeight, exact: bool, threads: int = 1) -> NibbleLinear:
    bias = torch.randn(len(weight.codes)).bfloat16()
    assert NibbleLinear.supports(weight, torch.bfloat16)
    unit = find_unit(weight.codes.shape[1])
    memory = WeightMemory().take
    return NibbleLinear(weight, bias, memory, KernelThreads(threads), unit, exact)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("outputs", "inputs", "group"), SHAPES)
def test_exact_products_are_those_of_bfloat16(
    outputs: int, inputs: int, group: int, threads: int, unit: str
) -> None:
    weight = packed(outputs, inputs, group)
    ours = linear(weight, exact=True, threads=threads)
    plain = PanelLinear(
        weight.dequantize(torch.bfloat16), ours._bias, WeightMemory(), KernelThreads(threads)
    )
    x, residual = torch.randn(500, inputs).bfloat16(), torch.randn(500, outputs).bfloat16()
    for rows in (1, 2, 7, 13, 33, 500):
        assert torch.equal(ours(x[:rows]), plain(x[:rows]))
        assert torch.equal(
            ours.add_to(residual[:rows], x[:rows]), plain.add_to(residual[:rows], x[:rows])
        )
    assert differing_rows(ours.add_to, residual, x) == 0


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("outputs", "inputs", "group"), SHAPES)
def test_few_rows_are_more_exact_than_rounded_weights(
    outputs: int, inputs: int, group: int, threads: int, unit: str
) -> None:
    weight = packed(outputs, inputs, group, bits=3)
    ours = linear(weight, exact=False, threads=threads)
    x, residual = torch.randn(64, inputs).bfloat16(), torch.randn(64, outputs).bfloat16()
    bias = ours._bias
    assert bias is not None
    means = x.double() @ weight.dequantize(torch.float64).T + bias.double()
    rounded = x.double() @ weight.dequantize(torch.bfloat16).double().T + bias.double()
    bound = (rounded.bfloat16() - means).abs().mean() * 1.1
    for rows in range(1, 20):
        batches = torch.cat([ours(part) for part in x.split(rows)])
        assert (batches - means).abs().mean() < bound
        added = torch.cat(
            [ours.add_to(*both) for both in zip(residual.split(rows), x.split(rows), strict=True)]
        )
        assert (added - means - residual).abs().mean() < 1.2 * bound


def test_what_the_kernel_does_not_have_is_dequantized(unit: str) -> None:
    weight = packed(32, 64, 32)
    unlike = [
        replace(weight, bits=8),
        replace(weight, groups=torch.arange(64) % 2),
        replace(weight, values=torch.arange(16.0), zeros=None),
        replace(weight, scales=weight.scales * 1.0001),
        packed(20, 64, 32),
        packed(32, 60, 20),
    ]
    factory = LinearFactory(cpu_kernels="packed")
    for one in unlike:
        assert not NibbleLinear.supports(one, torch.bfloat16)
        x = torch.randn(3, one.codes.shape[1]).bfloat16()
        expected = x.float() @ one.dequantize(torch.float32).T
        torch.testing.assert_close(
            factory.make_packed(one, None, torch.bfloat16)(x).float(), expected, rtol=0.02, atol=0.3
        )
    assert isinstance(factory.make_packed(weight, None, torch.bfloat16), NibbleLinear)
    assert factory.is_mostly_own


def test_the_fastest_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape of 4 bits is timed by itself: the same in bfloat16 may have another way."""
    from kvrelay.model_runner.layers.product_choice import ProductChoice, ProductWay

    asked: dict[Any, list[ProductWay]] = {}

    def find(_: ProductChoice, shape: Any, make: Any) -> ProductWay:
        ways: list[ProductWay] = list(make)
        asked[shape] = ways
        for one in make.values():
            one(torch.randn(64, 64).bfloat16(), None)(torch.randn(2, 64).bfloat16())
        return ways[-1] if len(shape) == 3 else ways[0]

    monkeypatch.setattr(ProductChoice, "find", find)
    factory = LinearFactory()
    weight = packed(64, 64, 32)
    made = factory.make_packed(weight, None, torch.bfloat16)
    assert asked[64, 64, 32][0] is ProductWay.PACKED
    assert isinstance(made, NibbleLinear) == (len(asked[64, 64, 32]) == 1)
    invariant = LinearFactory(batch_invariant=True).make_packed(weight, None, torch.bfloat16)
    assert isinstance(invariant, NibbleLinear)
    x = torch.randn(40, 64).bfloat16()
    assert differing_rows(invariant, x) == 0


@few(2)
@pytest.mark.parametrize("form", ["gptq", "awq", "ct-4-asymmetric"])
def test_a_model_keeps_its_bits(
    form: str, models: Models, tokens: list[int], tmp_path: Any
) -> None:
    """With --batch-invariant the logits are those of the dequantized model, in bfloat16."""
    from kvrelay.model_runner.runner import ModelRunner
    from tests.model_runner.packed_models import FORMATS, write_packed
    from tests.model_runner.sequences import Sequences

    config, pack = FORMATS[form]
    folders = write_packed(models.folder("llama-wide"), config, lambda _: pack, tmp_path)
    got, expected = (
        Sequences(ModelRunner(folder, "bfloat16", "cpu", batch_invariant=True), 1, 40).forward(
            {0: tokens[:20]}
        )
        for folder in folders
    )
    assert torch.equal(got, expected)
    running = Sequences(ModelRunner(folders[0], "bfloat16", "cpu", cpu_kernels="packed"), 1, 40)
    near = running.forward({0: tokens[:20]})
    torch.testing.assert_close(near, expected, rtol=0.05, atol=0.05)
