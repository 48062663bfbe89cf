"""Products with weights in panels: as exact as torch's, and the same bits for any rows beside."""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvrelay.cpu_kernels.processor import has_bfloat16_products, has_float_products
from kvrelay.cpu_kernels.products import tiles
from kvrelay.cpu_kernels.products.product import multiply
from kvrelay.cpu_kernels.products.tiles import TILE_NUMBERS, may_use_tiles
from kvrelay.model_runner.layers import linear as linear_layer
from kvrelay.model_runner.layers.linear import (
    LinearFactory,
    PackedLinear,
    PanelLinear,
    PlainLinear,
    WeightMemory,
)
from tests.pairwise import few

RoundInputs = Callable[[int], int]
SHAPES = [(16, 4), (48, 8), (1008, 52), (960, 576), (576, 1536), (48, 11008)]
"""Outputs and inputs: less than a panel, a part of one, those of SmolLM2-135M, and so many inputs
that a block of tiles has few rows."""
ROWS = 500
"""Three blocks of vectors, two of tiles; the last one is shorter."""
TRIED_ROWS = [*range(1, 66), 239, 240, 241, 319, 320, 321, 480, 481]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["floats", "vectors", "tiles"])
def round_inputs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RoundInputs:
    """Float32 is multiplied, pairs in the processor's vectors, or its tiles.

    The function rounds inputs up to whole tiles."""
    in_floats, in_tiles = request.param == "floats", request.param == "tiles"
    if in_floats:
        take_floats(monkeypatch)
    elif not has_bfloat16_products():
        pytest.skip("this CPU has no AVX512-BF16")
    elif in_tiles and not may_use_tiles():
        pytest.skip("this CPU has no AMX")
    monkeypatch.setattr(linear_layer, "may_use_tiles", lambda: in_tiles)
    step = TILE_NUMBERS if in_tiles else 1
    return lambda inputs: -(-inputs // step) * step


def take_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor without AVX512-BF16."""
    if not has_float_products():
        pytest.skip("this CPU has no AVX2")
    monkeypatch.setattr(linear_layer, "has_bfloat16_products", lambda: False)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def mean_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got - exact).abs().mean())


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_as_exact_as_torch(
    outputs: int, inputs: int, biased: bool, round_inputs: RoundInputs
) -> None:
    inputs = round_inputs(inputs)
    weight, bias = normal(outputs, inputs), normal(outputs) if biased else None
    x, residual = normal(64, inputs), normal(64, outputs)
    panels, torchs = PanelLinear(weight, bias, WeightMemory()), PlainLinear(weight, bias)
    product = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert mean_error(panels(x), product) <= 1.01 * mean_error(torchs(x), product)
    total = product + residual
    of_torch = mean_error(torchs.add_to(residual, x), total)
    assert mean_error(panels.add_to(residual, x), total) <= 1.01 * of_torch


@few(6)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_bits_do_not_depend_on_rows_or_threads(
    outputs: int,
    inputs: int,
    threads: int,
    round_inputs: RoundInputs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = round_inputs(inputs)
    weight, bias = normal(outputs, inputs), normal(outputs)
    x, residual = normal(ROWS, inputs), normal(ROWS, outputs)
    expected = PanelLinear(weight, bias, WeightMemory()).add_to(residual, x)
    monkeypatch.setattr(linear_layer, "SHARED_WEIGHTS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    linear = PanelLinear(weight, bias, WeightMemory())
    for rows in TRIED_ROWS:
        start = rows % 7
        some = slice(start, start + rows)
        assert torch.equal(linear.add_to(residual[some], x[some]), expected[some]), rows


@pytest.mark.parametrize("rows", [1, 5, 13, 31, 241])
def test_nothing_but_the_output_is_written(rows: int, round_inputs: RoundInputs) -> None:
    outputs, inputs, border = 48, round_inputs(8), 1000
    weight, x = normal(outputs, inputs), normal(rows, inputs)
    memory = np.full(rows * outputs + 2 * border, 0x1234, np.uint16)
    packed = linear_layer._pack_panels(weight, WeightMemory())
    multiply(
        1,
        linear_layer.find_unit(inputs),
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


@pytest.mark.parametrize("rows", [1, 5, 13, 31, 241])
def test_nothing_after_the_rows_is_read(rows: int, round_inputs: RoundInputs) -> None:
    outputs, inputs = 48, round_inputs(8)
    weight, x = normal(outputs, inputs), normal(rows, inputs)
    size = 4 * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    guard = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + size
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(guard), mmap.PAGESIZE, 0) == 0
    place = np.frombuffer(memory, np.int16, x.numel(), size - 2 * x.numel())
    before_the_guard = torch.from_numpy(place).view(torch.bfloat16).view(x.shape)
    before_the_guard.copy_(x)
    linear = PanelLinear(weight, None, WeightMemory())
    assert torch.equal(linear(before_the_guard), linear(x))


def test_sums_are_rounded_as_torch_rounds(round_inputs: RoundInputs) -> None:
    inputs = round_inputs(8)
    weight, x = torch.randint(-15, 16, (1008, inputs)), torch.randint(-99, 100, (24, inputs))
    exact = (x @ weight.T).float()
    halfway = (exact.view(torch.int32) & 0xFFFF) == 0x8000
    assert halfway.any()
    linear = PanelLinear(weight.bfloat16(), None, WeightMemory())
    assert torch.equal(linear(x.bfloat16()), exact.bfloat16())


def test_what_is_not_finite_stays_in_its_row(round_inputs: RoundInputs) -> None:
    weight, x = normal(48, round_inputs(8)), normal(13, round_inputs(8))
    linear = PanelLinear(weight, None, WeightMemory())
    expected = linear(x)
    x[3, 2], x[7, 0] = torch.nan, torch.inf
    got = linear(x)
    assert got[3].isnan().all()
    assert got[7].isinf().all()
    others = [row for row in range(13) if row not in (3, 7)]
    assert torch.equal(got[others], expected[others])


def test_the_factory_takes_panels_where_it_can(round_inputs: RoundInputs) -> None:
    even = round_inputs(8)
    for batch_invariant in (False, True):
        assert isinstance(LinearFactory(batch_invariant).make(normal(48, even)), PanelLinear)
    for odd in (
        normal(131, even),
        normal(48, even - 2),
        torch.randn(48, even),
        torch.randn(48, even).half(),
    ):
        assert not isinstance(LinearFactory().make(odd), PanelLinear)


@pytest.mark.parametrize("threads", [1, 2])
def test_tiles_and_torch_take_turns(threads: int) -> None:
    """oneDNN shapes the same tiles: neither may rely on what the other has left."""
    if not may_use_tiles():
        pytest.skip("this CPU has no AMX")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    weight, x = normal(960, 576), normal(100, 576)
    panels, packed = PanelLinear(weight, None, WeightMemory()), PackedLinear(weight, None)
    first = panels(x), packed(x)
    for rows in (100, 1, 17, 40, 3, 100):
        assert torch.equal(panels(x[:rows]), first[0][:rows])
        torch.testing.assert_close(packed(x[:rows]), first[1][:rows], rtol=2**-6, atol=2**-3)
    torch.testing.assert_close(*first, rtol=2**-6, atol=2**-3)
    torch.set_num_threads(before)


@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="elsewhere nobody asks"
)
def test_a_system_that_refuses_tiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A line in the log says so. (Vectors, which multiply then, are tested by `round_inputs`.)"""
    monkeypatch.setattr(tiles, "has_tiles", lambda: True)
    monkeypatch.setattr(tiles, "_ASK", 0)  # no such order
    assert not may_use_tiles.__wrapped__()
    assert "AMX" in caplog.text


def test_vectors_multiply_what_is_no_whole_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_bfloat16_products():
        pytest.skip("this CPU has no AVX512-BF16")
    weight, x = normal(48, 36), normal(40, 36)
    got = PanelLinear(weight, None, WeightMemory())(x)
    monkeypatch.setattr(linear_layer, "may_use_tiles", lambda: False)
    assert torch.equal(got, PanelLinear(weight, None, WeightMemory())(x))


def test_other_processors_leave_it_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_layer, "has_bfloat16_products", lambda: False)
    monkeypatch.setattr(linear_layer, "has_float_products", lambda: False)
    weight, x, residual = normal(48, 40), normal(40, 40), normal(40, 48)
    linear = LinearFactory().make(weight)
    assert isinstance(linear, PackedLinear | PlainLinear)
    total = residual.double() + x.double() @ weight.double().T
    torch.testing.assert_close(linear.add_to(residual, x).double(), total, rtol=2**-6, atol=2**-5)
    invariant = LinearFactory(batch_invariant=True).make(weight)
    alone = torch.cat([invariant(row[None]) for row in x])
    assert torch.equal(invariant(x), alone)
