"""The compiled side of the seam agrees with the plain one to bfloat16's precision."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvrelay.model_runner.layers import elementwise as elementwise_layer
from kvrelay.model_runner.layers.elementwise import (
    CpuElementwise,
    Elementwise,
    NormWeight,
    Rotation,
    TorchElementwise,
)
from kvrelay.model_runner.layers.elementwise_choice import make_elementwise
from kvrelay.model_runner.layers.linear import PackedLinear, PlainLinear

COMPILED, PLAIN = CpuElementwise(), TorchElementwise()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def assert_close(got: torch.Tensor, exact: torch.Tensor) -> None:
    """Within the rounding to bfloat16 of a float32 result."""
    torch.testing.assert_close(got.float(), exact, rtol=2**-7, atol=1e-6)


def same(weight: torch.Tensor) -> NormWeight:
    return NormWeight(weight, weight)


def test_rms_norm() -> None:
    x, weight = torch.randn(5, 70).bfloat16(), torch.randn(70).bfloat16()
    exact = PLAIN.rms_norm(x.float(), same(weight.float()), 1e-5)
    assert_close(COMPILED.rms_norm(x, same(weight), 1e-5), exact)


@pytest.mark.parametrize("dim", [12, 18])
def test_rotate_leaves_the_values_alone(dim: int) -> None:
    """And what lies behind the dimensions of a head that rotate."""
    heads = torch.randn(5, 7, dim).bfloat16()
    angles = torch.rand(5, 6) * 100
    exact = heads.float()
    PLAIN.rotate(exact, 4, Rotation(angles.cos(), angles.sin()))
    values = heads[:, 4:].clone()
    COMPILED.rotate(heads, 4, Rotation(angles.cos(), angles.sin()))
    assert_close(heads, exact)
    assert torch.equal(heads[:, 4:], values)


def test_silu_mul() -> None:
    gate_up = (torch.randn(5, 80) * 20).bfloat16()
    gate_up[0, :6] = torch.tensor([0.0, -0.0, 200.0, -200.0, 3e38, -3e38])
    assert_close(COMPILED.silu_mul(gate_up), PLAIN.silu_mul(gate_up.float()))


def test_gelu_mul() -> None:
    gate_up = (torch.randn(5, 80) * 5).bfloat16()
    gate_up[0, :6] = torch.tensor([0.0, -0.0, 200.0, -200.0, 3e38, -3e38])
    gate_up[1, :6] = torch.tensor([1e-4, -1e-4, 1.0, -1.0, 8.0, -2.0])
    assert_close(COMPILED.gelu_mul(gate_up), PLAIN.gelu_mul(gate_up.float()))


@pytest.mark.parametrize("elementwise", [COMPILED, PLAIN])
def test_rms_norm_by_a_weight_in_float32(elementwise: Elementwise) -> None:
    x, weight = torch.randn(5, 70).bfloat16(), 1 + torch.randn(70) * 1e-3
    exact = PLAIN.rms_norm(x.float(), same(weight), 1e-5)
    assert_close(elementwise.rms_norm(x, same(weight), 1e-5), exact)


def test_nan_is_not_hidden() -> None:
    x = torch.full((1, 8), torch.nan).bfloat16()
    assert COMPILED.silu_mul(x).isnan().all()
    assert COMPILED.gelu_mul(x).isnan().all()
    assert COMPILED.rms_norm(x, same(torch.ones(8).bfloat16()), 1e-5).isnan().all()


def every_second(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(2, -1)[..., ::2]


@pytest.mark.parametrize("spoil", [torch.Tensor.double, every_second], ids=["dtype", "strides"])
def test_what_kernels_would_misread_is_refused(
    spoil: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x, weight = torch.randn(5, 80).bfloat16(), torch.randn(80).bfloat16()
    heads, angles = torch.randn(5, 8, 10).bfloat16(), torch.rand(5, 5)
    spoilt = spoil(angles)
    for call in (
        lambda: COMPILED.rms_norm(spoil(x), same(weight), 1e-5),
        lambda: COMPILED.rms_norm(x, same(spoil(weight)), 1e-5),
        lambda: COMPILED.silu_mul(spoil(x)),
        lambda: COMPILED.gelu_mul(spoil(x)),
        lambda: COMPILED.rotate(spoil(heads), 4, Rotation(angles, angles)),
        lambda: COMPILED.rotate(heads, 4, Rotation(spoilt, angles)),
        lambda: COMPILED.rotate(heads, 4, Rotation(angles, spoilt)),
    ):
        with pytest.raises(AssertionError, match=r"contiguous|float64"):
            call()


@pytest.mark.parametrize("rows", [1, 2, 17])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_linear(rows: int, biased: bool) -> None:
    weight = torch.randn(40, 24).bfloat16()
    if not PackedLinear.supports(weight):
        pytest.skip("this torch or CPU has no bfloat16 in oneDNN")
    bias = torch.randn(40).bfloat16() if biased else None
    x, residual = torch.randn(rows, 24).bfloat16(), torch.randn(rows, 40).bfloat16()
    exact = PlainLinear(weight.float(), None if bias is None else bias.float())
    packed = PackedLinear(weight, bias)
    torch.testing.assert_close(packed(x).float(), exact(x.float()), rtol=2**-6, atol=2**-5)
    expected = exact.add_to(residual.float(), x.float())
    got = packed.add_to(residual, x).float()
    torch.testing.assert_close(got, expected, rtol=2**-6, atol=2**-5)


def rotated(elementwise: Elementwise, x: torch.Tensor) -> torch.Tensor:
    heads = x.view(len(x), -1, 10).clone()
    angles = torch.arange(5 * len(x)).view(-1, 5) / 7
    elementwise.rotate(heads, 3, Rotation(angles.cos(), angles.sin()))
    return heads


@pytest.mark.parametrize(
    "operation",
    [
        lambda elementwise, x: elementwise.rms_norm(x, same(x[0]), 1e-5),
        lambda elementwise, x: elementwise.silu_mul(x),
        lambda elementwise, x: elementwise.gelu_mul(x),
        rotated,
    ],
    ids=["rms_norm", "silu_mul", "gelu_mul", "rotate"],
)
def test_threads_share_rows(
    operation: Callable[[Elementwise, torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(100, 40).bfloat16()
    expected = operation(COMPILED, x)
    monkeypatch.setattr(elementwise_layer, "SHARED_ELEMENTS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(operation(CpuElementwise(), x), expected)


def methods_of(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


IMPLEMENTED = [
    *[
        (dtype, device, False)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for device in ("cpu", "cuda")
    ],
    (torch.bfloat16, "cpu", True),
    (torch.float32, "cpu", True),
]


@pytest.mark.parametrize(("dtype", "device", "batch_invariant"), IMPLEMENTED, ids=str)
def test_every_implementation_has_every_operation(
    dtype: torch.dtype, device: str, batch_invariant: bool
) -> None:
    made = make_elementwise(dtype, torch.device(device), batch_invariant)
    assert methods_of(Elementwise) <= methods_of(type(made))
