"""Products with weights in panels: as exact as torch's, and the same bits for any rows beside."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
import torch

from kvrelay.model_runner.kernels.product import multiply
from kvrelay.model_runner.layers import linear as linear_layer
from kvrelay.model_runner.layers.linear import LinearFactory, PackedLinear, PanelLinear, PlainLinear
from kvrelay.model_runner.layers.weight_memory import WeightMemory

needs_pairs = pytest.mark.skipif(
    not PanelLinear.supports(torch.empty(16, 4, dtype=torch.bfloat16)),
    reason="this CPU has no AVX512-BF16, or AMX, for which torch's products are",
)
SHAPES = [(16, 4), (48, 8), (1008, 52), (960, 576), (576, 1536)]
"""Outputs and inputs: less than a panel, a part of one, and those of SmolLM2-135M."""
ROWS = 500
"""Three blocks, the last one shorter."""
TRIED_ROWS = [*range(1, 66), 239, 240, 241, 480, 481]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def mean_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got - exact).abs().mean())


@needs_pairs
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_as_exact_as_torch(outputs: int, inputs: int, biased: bool) -> None:
    weight, bias = normal(outputs, inputs), normal(outputs) if biased else None
    x, residual = normal(64, inputs), normal(64, outputs)
    panels, torchs = PanelLinear(weight, bias, WeightMemory()), PlainLinear(weight, bias)
    product = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert mean_error(panels(x), product) <= 1.01 * mean_error(torchs(x), product)
    total = product + residual
    of_torch = mean_error(torchs.add_to(residual, x), total)
    assert mean_error(panels.add_to(residual, x), total) <= 1.01 * of_torch


@needs_pairs
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_bits_do_not_depend_on_rows_or_threads(
    outputs: int, inputs: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias = normal(outputs, inputs), normal(outputs)
    x, residual = normal(ROWS, inputs), normal(ROWS, outputs)
    expected = PanelLinear(weight, bias, WeightMemory()).add_to(residual, x)
    monkeypatch.setattr(linear_layer, "_SHARED_WEIGHTS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    linear = PanelLinear(weight, bias, WeightMemory())
    for rows in TRIED_ROWS:
        start = rows % 7
        some = slice(start, start + rows)
        assert torch.equal(linear.add_to(residual[some], x[some]), expected[some]), rows


@needs_pairs
@pytest.mark.parametrize("rows", [1, 5, 13, 31, 241])
def test_nothing_but_the_output_is_written(rows: int) -> None:
    outputs, inputs, border = 48, 8, 1000
    weight, x = normal(outputs, inputs), normal(rows, inputs)
    memory = np.full(rows * outputs + 2 * border, 0x1234, np.uint16)
    packed = linear_layer._pack_panels(weight, WeightMemory())
    multiply(
        1,
        x.data_ptr(),
        packed.data_ptr(),
        0,
        0,
        memory.ctypes.data + border * memory.itemsize,
        rows,
        inputs,
        outputs,
    )
    assert (memory[:border] == 0x1234).all()
    assert (memory[-border:] == 0x1234).all()
    written = torch.from_numpy(memory[border:-border].view(np.int16)).view(torch.bfloat16)
    assert torch.equal(written.view(rows, outputs), PanelLinear(weight, None, WeightMemory())(x))


@needs_pairs
@pytest.mark.parametrize("rows", [1, 5, 13, 31, 241])
def test_nothing_after_the_rows_is_read(rows: int) -> None:
    outputs, inputs = 48, 8
    weight, x = normal(outputs, inputs), normal(rows, inputs)
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    guard = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + mmap.PAGESIZE
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(guard), mmap.PAGESIZE, 0) == 0
    place = np.frombuffer(memory, np.int16, x.numel(), mmap.PAGESIZE - 2 * x.numel())
    before_the_guard = torch.from_numpy(place).view(torch.bfloat16).view(x.shape)
    before_the_guard.copy_(x)
    linear = PanelLinear(weight, None, WeightMemory())
    assert torch.equal(linear(before_the_guard), linear(x))


@needs_pairs
def test_sums_are_rounded_as_torch_rounds() -> None:
    weight, x = torch.randint(-15, 16, (1008, 8)), torch.randint(-99, 100, (24, 8))
    exact = (x @ weight.T).float()
    halfway = (exact.view(torch.int32) & 0xFFFF) == 0x8000
    assert halfway.any()
    linear = PanelLinear(weight.bfloat16(), None, WeightMemory())
    assert torch.equal(linear(x.bfloat16()), exact.bfloat16())


@needs_pairs
def test_what_is_not_finite_stays_in_its_row() -> None:
    weight, x = normal(48, 8), normal(13, 8)
    linear = PanelLinear(weight, None, WeightMemory())
    expected = linear(x)
    x[3, 2], x[7, 0] = torch.nan, torch.inf
    got = linear(x)
    assert got[3].isnan().all()
    assert got[7].isinf().all()
    others = [row for row in range(13) if row not in (3, 7)]
    assert torch.equal(got[others], expected[others])


@needs_pairs
def test_the_factory_takes_panels_where_it_can() -> None:
    for batch_invariant in (False, True):
        assert isinstance(LinearFactory(batch_invariant).make(normal(48, 8)), PanelLinear)
    for odd in (normal(131, 8), normal(48, 6), torch.randn(48, 8), torch.randn(48, 8).half()):
        assert not isinstance(LinearFactory().make(odd), PanelLinear)


@pytest.mark.parametrize(
    ("function", "answer"), [("has_bfloat16_products", False), ("has_bfloat16_tiles", True)]
)
def test_other_processors_leave_it_to_torch(
    function: str, answer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_layer, function, lambda: answer)
    weight, x, residual = normal(48, 40), normal(40, 40), normal(40, 48)
    linear = LinearFactory().make(weight)
    assert isinstance(linear, PackedLinear | PlainLinear)
    total = residual.double() + x.double() @ weight.double().T
    torch.testing.assert_close(linear.add_to(residual, x).double(), total, rtol=2**-6, atol=2**-5)
    invariant = LinearFactory(batch_invariant=True).make(weight)
    alone = torch.cat([invariant(row[None]) for row in x])
    assert torch.equal(invariant(x), alone)
