"""Products of --batch-invariant: of any shape, as exact as torch's, the same bits in any batch.

Many thousand rows are counted: another order of adding shows in less than one of a hundred, and
only where it changes what bfloat16 rounds to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from kvrelay.cpu_kernels.kernel_threads import KernelThreads
from kvrelay.model_runner.errors import UnsupportedOptionError
from kvrelay.model_runner.layers import linear as linear_layer
from kvrelay.model_runner.layers.fp8_weight import FP8, Fp8Weight
from kvrelay.model_runner.layers.linear import (
    FloatLinear,
    HeadwiseLinear,
    Linear,
    LinearFactory,
    PaddedLinear,
    PanelLinear,
    PlainLinear,
)
from tests.model_runner.product_units import UNITS, be_a_processor_of

SHAPES = [(131, 64), (96, 64), (10, 24), (12, 24), (24, 10), (24, 12), (40, 577), (7, 3), (64, 96)]
"""Outputs and inputs: heads of 10 and 12, a vocabulary of 131, odd inputs; of the tiny models."""
EDGES = [(0, 8), (8, 0), (1, 1)]
ROWS = 2048
SIZES = (1, 2, 3, 4, 5, 7, 8, 12, 13, 17, 33, 64, 100, 241, 321, 1000)
"""Of batches. Each is compared with the batch of all rows, row by row."""


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=[*UNITS, "float32"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """bfloat16 by each unit that this processor has, and float32."""
    if request.param == "float32":
        return torch.float32
    be_a_processor_of(request.param, monkeypatch)
    return torch.bfloat16


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def differing_rows(product: Callable[..., torch.Tensor], *rows: torch.Tensor) -> int:
    """How many rows of batches of all `SIZES` are not as in the batch of all rows."""
    whole = product(*rows)
    count = 0
    for size in SIZES:
        batches = zip(*(one.split(size) for one in rows), strict=True)
        got = torch.cat([product(*batch) for batch in batches])
        count += int((got != whole).flatten(1).any(1).sum())
    return count


def make(outputs: int, inputs: int, dtype: torch.dtype, threads: int = 1) -> Linear:
    factory = LinearFactory(batch_invariant=True, threads=KernelThreads(threads))
    return factory.make(normal(outputs, inputs).to(dtype), normal(outputs).to(dtype))


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_no_row_depends_on_the_batch(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    linear = make(outputs, inputs, dtype)
    x, residual = normal(ROWS, inputs).to(dtype), normal(ROWS, outputs).to(dtype)
    assert differing_rows(linear.add_to, residual, x) == 0
    assert differing_rows(linear, x) == 0


@pytest.mark.parametrize(("heads", "inputs", "outputs"), [(4, 12, 24), (4, 24, 10), (2, 64, 64)])
def test_no_row_of_heads_depends_on_the_batch(
    heads: int, inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    weight = normal(heads, inputs, outputs).to(dtype)
    linear = LinearFactory(batch_invariant=True).make_headwise(weight)
    x = normal(ROWS, heads, inputs).to(dtype)
    assert differing_rows(linear, x) == 0
    exact = HeadwiseLinear(weight.double())(x.double())
    torch.testing.assert_close(linear(x).double(), exact, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize(("outputs", "inputs"), [(131, 64), (40, 577)])
def test_no_row_depends_on_the_threads(
    outputs: int, inputs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_layer, "SHARED_WEIGHTS", 1)
    x, residual = normal(ROWS, inputs).to(dtype), normal(ROWS, outputs).to(dtype)
    results = []
    for threads in (1, 2, 3):
        torch.manual_seed(1)
        results.append(make(outputs, inputs, dtype, threads).add_to(residual, x))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [*SHAPES, *EDGES])
def test_as_exact_as_torch(outputs: int, inputs: int, biased: bool, dtype: torch.dtype) -> None:
    weight, x = normal(outputs, inputs).to(dtype), normal(64, inputs).to(dtype)
    bias = normal(outputs).to(dtype) if biased else None
    residual = normal(64, outputs).to(dtype)
    linear = LinearFactory(batch_invariant=True).make(weight, bias)
    exact = PlainLinear(weight.double(), None if bias is None else bias.double())
    got, total = linear(x), linear.add_to(residual, x)
    assert got.is_contiguous()
    close = partial(
        torch.testing.assert_close, rtol=torch.finfo(dtype).eps, atol=1e-6 * max(inputs, 1)
    )
    close(got.double(), exact(x.double()))
    close(total.double(), exact.add_to(residual.double(), x.double()))


def test_what_is_not_finite_stays_in_its_row(dtype: torch.dtype) -> None:
    linear, x = make(131, 66, dtype), normal(13, 66).to(dtype)
    expected = linear(x)
    x[3, 2], x[7, 0] = torch.nan, torch.inf
    got = linear(x)
    assert got[3].isnan().all()
    assert not got[7].isfinite().any()
    others = [row for row in range(13) if row not in (3, 7)]
    assert torch.equal(got[others], expected[others])


def test_whoever_multiplies_is_ours(dtype: torch.dtype) -> None:
    own = FloatLinear if dtype is torch.float32 else PanelLinear
    assert isinstance(make(48, 64, dtype), own)
    assert isinstance(make(131, 64, dtype), PaddedLinear)
    assert isinstance(make(48, 65, dtype), PaddedLinear)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_other_dtypes_are_refused_by_name(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(UnsupportedOptionError, match=f"--batch-invariant.* a product in {name}"):
        make(48, 64, dtype)


def test_other_devices_are_refused_by_name() -> None:
    factory, meta = LinearFactory(batch_invariant=True), torch.device("meta")
    weight = torch.empty(48, 64, dtype=torch.bfloat16, device=meta)
    with pytest.raises(UnsupportedOptionError, match="a product in bfloat16 on meta"):
        factory.make(weight)
    with pytest.raises(UnsupportedOptionError, match="a product in bfloat16 on meta"):
        factory.make_headwise(weight[None])


def test_products_of_fp8_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a GPU has; where weights are dequantized there are none."""
    monkeypatch.setattr(linear_layer, "fp8_products_lack", lambda weight, dtype: None)
    values = torch.empty(48, 64, dtype=FP8, device="meta")
    weight = Fp8Weight(values, torch.empty(48, 1, device="meta"), blocks=False)
    with pytest.raises(UnsupportedOptionError, match="a product in float8_e4m3fn on meta"):
        LinearFactory(batch_invariant=True).make_fp8(weight, None, torch.bfloat16)
