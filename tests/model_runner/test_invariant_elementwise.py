"""What is computed row by row is the same to the last bit in every batch, by every thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from kvrelay.cpu_kernels import elementwise_rows as kernels
from kvrelay.cpu_kernels.arrays import Array
from kvrelay.cpu_kernels.gumbel import add_noise
from kvrelay.cpu_kernels.kernel_threads import KernelThreads
from kvrelay.model_runner.errors import UnsupportedOptionError
from kvrelay.model_runner.layers import elementwise as elementwise_layer
from kvrelay.model_runner.layers.elementwise import (
    Elementwise,
    HeadNormWeights,
    NormWeight,
    Rotation,
    TorchElementwise,
)
from kvrelay.model_runner.layers.elementwise_choice import make_elementwise

CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
ROWS = 200
SIZES = (1, 2, 3, 5, 8, 13, 17, 33, 64)
"""Of batches."""
WIDTHS = (6, 70, 1000)

RowFunction = Callable[[Elementwise, torch.Tensor], torch.Tensor]
"""Maps rows ``[T, N]`` of a model's dtype to rows."""


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def weight_of(size: int, dtype: torch.dtype) -> NormWeight:
    factor = (torch.arange(size) % 7 / 4 - 1).to(dtype)
    return NormWeight(factor, factor)


def norm(
    elementwise: Elementwise, x: torch.Tensor, weight_dtype: torch.dtype | None = None
) -> torch.Tensor:
    return elementwise.rms_norm(x, weight_of(x.shape[1], weight_dtype or x.dtype), 1e-6)


def norm_heads(
    elementwise: Elementwise, x: torch.Tensor, weight_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Of three heads, of which the last has no norm."""
    heads = torch.stack((x, x.flip(1), x), dim=1)
    weight = weight_of(x.shape[1], weight_dtype or x.dtype)
    elementwise.rms_norm_heads(heads, HeadNormWeights.of(weight, weight, 1, 1), 1e-6)
    return heads


def rotation(elementwise: Elementwise, x: torch.Tensor) -> Rotation:
    """By positions up to some thousands, each a row's own."""
    positions = (x[:, 0].float().abs() * 1000).long()
    frequencies = 1 / (10000.0 ** (torch.arange(x.shape[1] // 2) / x.shape[1] * 2))
    return elementwise.find_rotation(positions, frequencies, 1.1)


def angles(elementwise: Elementwise, x: torch.Tensor) -> torch.Tensor:
    turned = rotation(elementwise, x)
    return torch.cat((turned.cos, turned.sin), dim=1)


def rotate(elementwise: Elementwise, x: torch.Tensor) -> torch.Tensor:
    heads = torch.stack((x, x.flip(1), x), dim=1)
    # Not torch's angles beside the kernels': those are compared by themselves.
    elementwise.rotate(heads, 2, rotation(TorchElementwise(), x.round()))
    return heads


def activate(name: str, elementwise: Elementwise, x: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = getattr(elementwise, name)(x)
    return product


def in_float32(name: str, elementwise: Elementwise, x: torch.Tensor) -> torch.Tensor:
    """What a model computes in float32 whatever its dtype is."""
    return activate(name, elementwise, x.float())


FUNCTIONS: dict[str, RowFunction] = {
    "a norm": norm,
    "a norm with a weight in float32": partial(norm, weight_dtype=torch.float32),
    "norms of heads": norm_heads,
    "norms of heads with weights in float32": partial(norm_heads, weight_dtype=torch.float32),
    "angles": angles,
    "rotation": rotate,
    "silu": partial(activate, "silu_mul"),
    "gelu": partial(activate, "gelu_mul"),
    "sigmoid": partial(in_float32, "sigmoid"),
    "softmax": partial(in_float32, "softmax"),
    "sums of a few": lambda elementwise, x: elementwise.sum_rows(x[:, :8].float()),
    "softcap": lambda elementwise, x: elementwise.softcap(x.float(), 3.0),
}


@DTYPES
@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_row_depends_on_the_batch_or_the_threads(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = partial(
        FUNCTIONS[name], make_elementwise(dtype, CPU, True, threads=KernelThreads(1))
    )
    monkeypatch.setattr(elementwise_layer, "SHARED_ELEMENTS", 1)
    shared = partial(FUNCTIONS[name], make_elementwise(dtype, CPU, True, threads=KernelThreads(3)))
    for width in WIDTHS:
        x = (4 * torch.randn(ROWS, width)).to(dtype)
        expected = function(x)
        assert torch.equal(shared(x), expected), width
        for size in SIZES:
            got = torch.cat([function(part) for part in x.split(size)])
            assert torch.equal(got, expected), (width, size)


KERNELS: dict[str, Callable[[Array, Array], None]] = {
    "a norm": lambda x, out: kernels.norm_of_rows(1, x, x[0].copy(), 1e-6, out),
    "silu": lambda x, out: kernels.silu_mul_of_rows(1, x.reshape(1, -1), out[:1]),
    "gelu": lambda x, out: kernels.gelu_mul_of_rows(1, x.reshape(1, -1), out[:1]),
    "noise": lambda x, out: add_noise(
        x.ravel(), np.float32(4), np.float32(0.7), np.arange(x.size, dtype=np.uint32), out.ravel()
    ),
}
"""Each from ``x [2, N]`` float32 to an array of the same shape."""


@pytest.mark.parametrize("width", [4, 6, 8, 33])
@pytest.mark.parametrize("name", KERNELS)
def test_no_bit_depends_on_where_arrays_lie(name: str, width: int) -> None:
    """Compiled loops look whether what they write is near what they read."""
    size = 2 * width
    for seed in range(50):
        x = np.random.default_rng(seed).normal(0, 4, (2, width)).astype(np.float32)
        results = []
        for gap in (0, 1, 16, 60, 5000):
            memory = np.zeros(2 * size + gap, np.float32)
            source, out = (part.reshape(2, width) for part in (memory[:size], memory[-size:]))
            source[:] = x
            KERNELS[name](source, out)
            results.append(out)
        assert all(np.array_equal(results[0], one) for one in results[1:]), seed


@DTYPES
def test_rows_with_gaps_are_not_added_up(dtype: torch.dtype) -> None:
    """Kernels add them in another order than rows without gaps, and than a single row."""
    elementwise = make_elementwise(dtype, CPU, True)
    x = torch.randn(5, 131).to(dtype)
    with pytest.raises(AssertionError, match="not contiguous"):
        norm(elementwise, x[:, :70])
    assert torch.equal(norm(elementwise, x[:1, :70]), norm(elementwise, x[:1, :70].contiguous()))
    heads = torch.randn(5, 3, 131).to(dtype)[:, :, :70]
    weight = weight_of(70, dtype)
    with pytest.raises(AssertionError, match="not contiguous"):
        elementwise.rms_norm_heads(heads, HeadNormWeights.of(weight, weight, 1, 1), 1e-6)


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_columns_are_brought_together_first(name: str) -> None:
    elementwise, x = make_elementwise(torch.float32, CPU, True), 4 * torch.randn(131, 64)
    expected = activate(name, elementwise, x.t().contiguous())
    assert torch.equal(activate(name, elementwise, x.t()), expected)


@DTYPES
@pytest.mark.parametrize("name", FUNCTIONS)
def test_they_differ_from_torchs_by_its_last_bits(name: str, dtype: torch.dtype) -> None:
    function = FUNCTIONS[name]
    invariant, plain = make_elementwise(dtype, CPU, True), TorchElementwise()
    rtol, atol = (2e-5, 2e-5) if dtype is torch.float32 else (2**-7, 1e-5)
    for width in WIDTHS:
        x = (4 * torch.randn(5, width)).to(dtype)
        got = function(invariant, x)
        assert got.dtype is function(plain, x).dtype
        # In float32: torch rounds bfloat16 more often.
        exact = function(plain, x.float())
        torch.testing.assert_close(got.float(), exact, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul", "sigmoid"])
def test_what_is_large_or_no_number(name: str) -> None:
    x = torch.randn(5, 80) * 5
    x[0, :6] = torch.tensor([0.0, -0.0, 100.0, -100.0, torch.nan, 3e38])
    x[1, :4] = torch.tensor([-3e38, torch.inf, 1e-4, -1e-4])
    got = activate(name, make_elementwise(torch.float32, CPU, True), x)
    expected = activate(name, TorchElementwise(), x)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_nan_is_not_hidden() -> None:
    elementwise, x = make_elementwise(torch.float32, CPU, True), torch.full((2, 8), torch.nan)
    for name in ("softmax", "sigmoid", "silu_mul", "gelu_mul"):
        assert activate(name, elementwise, x).isnan().all(), name
    assert elementwise.softcap(x, 3.0).isnan().all()
    assert norm(elementwise, x).isnan().all()


@pytest.mark.parametrize(
    ("dtype", "device"),
    [(torch.float16, "cpu"), (torch.float64, "cpu"), (torch.bfloat16, "cuda")],
    ids=str,
)
def test_others_are_refused_by_name(dtype: torch.dtype, device: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=r"--batch-invariant.*norms and activations"):
        make_elementwise(dtype, torch.device(device), batch_invariant=True)
