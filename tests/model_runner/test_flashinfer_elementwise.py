"""Elementwise operations and writes by FlashInfer, its kernels replaced by doubles that check."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from kvrelay.mem_cache.geometry import KVGeometry, PageOrder
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.attention import flashinfer_append
from kvrelay.model_runner.attention.attention_choice import AttentionChoice
from kvrelay.model_runner.attention.flashinfer_append import AppendKernel, appends
from kvrelay.model_runner.attention.fp8_pages import FP8
from kvrelay.model_runner.attention.new_tokens import NewTokens
from kvrelay.model_runner.layers import flashinfer_elementwise
from kvrelay.model_runner.layers.elementwise import (
    HeadNormWeights,
    NormWeight,
    Rotation,
    TorchElementwise,
)
from kvrelay.model_runner.layers.elementwise_choice import make_elementwise
from kvrelay.model_runner.layers.flashinfer_elementwise import FlashInferElementwise
from kvrelay.model_runner.runner import ModelRunner
from tests.model_runner import flashinfer_elementwise_double as double
from tests.model_runner.fake_cuda import fake_cuda
from tests.model_runner.sequences import Sequences
from tests.model_runner.test_attention import make_batch
from tests.model_runner.test_fake_cuda import run_on_device
from tests.model_runner.test_flashinfer_attention import use_double
from tests.model_runner.tiny_models import Models

CPU = torch.device("cpu")
PLAIN, BY_FLASHINFER = TorchElementwise(), FlashInferElementwise(double.PACKAGE)
BF16, FLOAT = torch.bfloat16, torch.float32
EPS = 1e-5
NORMS = {"rmsnorm", "fused_add_rmsnorm"}
GEMMA = {"gemma_rmsnorm", "gemma_fused_add_rmsnorm"}
ROTATE = {"apply_rope_with_cos_sin_cache_inplace"}
APPEND, APPEND_LATENTS = {"append_paged_kv_cache"}, {"append_paged_mla_kv_cache"}
SILU, GELU = {"silu_and_mul"}, {"gelu_tanh_and_mul"}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    double.calls.clear()


def assert_close(got: torch.Tensor, exact: torch.Tensor) -> None:
    """Within one rounding of a float32 result to the dtype of `got`."""
    tolerance = 2**-8 if got.dtype is BF16 else 1e-5
    torch.testing.assert_close(got.float(), exact.float(), rtol=tolerance, atol=1e-5)


def norm_weight(size: int, dtype: torch.dtype, offset: bool) -> NormWeight:
    return NormWeight.of((torch.randn(size) * 0.3).to(dtype), offset)


def precise(weight: NormWeight) -> NormWeight:
    return NormWeight.of(weight.stored.float(), weight.has_unit_offset)


@pytest.mark.parametrize("dtype", [BF16, FLOAT])
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("rows", [1, 7])
def test_norms(rows: int, offset: bool, dtype: torch.dtype) -> None:
    x, residual = torch.randn(rows, 64).to(dtype), torch.randn(rows, 64).to(dtype)
    weight = norm_weight(64, dtype, offset)
    assert_close(
        BY_FLASHINFER.rms_norm(x, weight, EPS), PLAIN.rms_norm(x.float(), precise(weight), EPS)
    )
    expected = PLAIN.add_rms_norm(x.float(), residual.float(), precise(weight), EPS)
    for got, exact in zip(
        BY_FLASHINFER.add_rms_norm(x, residual, weight, EPS), expected, strict=True
    ):
        assert_close(got, exact)
    assert set(double.calls) == (GEMMA if offset else NORMS)


@pytest.mark.parametrize("dtype", [BF16, FLOAT])
@pytest.mark.parametrize("offset", [False, True])
def test_norms_of_heads_leave_values_alone(offset: bool, dtype: torch.dtype) -> None:
    heads = torch.randn(5, 8, 64).to(dtype)
    query, key = norm_weight(64, dtype, offset), norm_weight(64, dtype, offset)
    exact, values = heads.float(), heads[:, 6:].clone()
    PLAIN.rms_norm_heads(exact, HeadNormWeights.of(precise(query), precise(key), 4, 2), EPS)
    BY_FLASHINFER.rms_norm_heads(heads, HeadNormWeights.of(query, key, 4, 2), EPS)
    assert_close(heads, exact)
    assert torch.equal(heads[:, 6:], values)
    assert double.calls == {"gemma_rmsnorm" if offset else "rmsnorm": 2}


@pytest.mark.parametrize("dtype", [BF16, FLOAT])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("dim", [64, 128])
def test_rotation_leaves_values_alone(dim: int, rows: int, dtype: torch.dtype) -> None:
    """And what lies behind the dimensions of a head that rotate."""
    heads, angles = torch.randn(rows, 7, dim).to(dtype), torch.rand(rows, 32) * 100
    exact, values = heads.float(), heads[:, 5:].clone()
    rotation = Rotation(angles.cos(), angles.sin())
    PLAIN.rotate(exact, 5, rotation)
    BY_FLASHINFER.rotate(heads, 5, BY_FLASHINFER.prepare(rotation))
    torch.testing.assert_close(heads.float(), exact, rtol=2**-8, atol=2**-7)
    assert torch.equal(heads[:, 5:], values)
    assert set(double.calls) == ROTATE


@pytest.mark.parametrize("dtype", [BF16, FLOAT])
@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
def test_activations(name: str, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(5, 2 * 48) * 5).to(dtype)
    gate_up[0, :3] = torch.tensor([0.0, 200.0, -200.0])
    assert_close(getattr(BY_FLASHINFER, name)(gate_up), getattr(PLAIN, name)(gate_up.float()))
    assert set(double.calls) == (SILU if name == "silu_mul" else GELU)


def test_what_kernels_cannot_read_is_computed_by_torch() -> None:
    """Rows that are no multiple of 16 bytes, and heads whose dimensions have no kernel."""
    x, weight = torch.randn(3, 20).to(BF16), norm_weight(20, BF16, False)
    assert torch.equal(BY_FLASHINFER.rms_norm(x, weight, EPS), PLAIN.rms_norm(x, weight, EPS))
    got = BY_FLASHINFER.add_rms_norm(x, x, weight, EPS)
    assert torch.equal(got[0], PLAIN.rms_norm(x + x, weight, EPS))
    assert torch.equal(got[1], x + x)
    # 24 numbers of 2 bytes are three vectors, but the second half of a row is half of them.
    gate_up = torch.randn(3, 24).to(BF16)
    assert torch.equal(BY_FLASHINFER.silu_mul(gate_up), PLAIN.silu_mul(gate_up))
    assert torch.equal(BY_FLASHINFER.gelu_mul(gate_up), PLAIN.gelu_mul(gate_up))
    for dim, count in ((48, 3), (64, 1)):
        heads, angles = torch.randn(3, 4, dim).to(BF16), torch.rand(3, dim // 2)
        expected, rotation = heads.clone(), Rotation(angles.cos(), angles.sin())
        PLAIN.rotate(expected, count, rotation)
        BY_FLASHINFER.rotate(heads, count, BY_FLASHINFER.prepare(rotation))
        assert torch.equal(heads, expected)
    heads, part = torch.randn(3, 4, 20).to(BF16), norm_weight(20, BF16, False)
    expected, weights = heads.clone(), HeadNormWeights.of(part, part, 2, 1)
    PLAIN.rms_norm_heads(expected, weights, EPS)
    BY_FLASHINFER.rms_norm_heads(heads, weights, EPS)
    assert torch.equal(heads, expected)
    assert not double.calls


def test_who_has_flashinfer_uses_it() -> None:
    device = torch.device("cuda")
    assert isinstance(make_elementwise(BF16, device, flashinfer=object()), FlashInferElementwise)
    assert type(make_elementwise(BF16, device)) is TorchElementwise


GROUPED = KVGeometry(2, 2, 64, BF16, 5)
LATENT = KVGeometry(2, 1, 576, BF16, 5, latent=True)


@pytest.mark.parametrize(
    ("geometry", "value_dim", "has_kernel"),
    [
        (GROUPED, 64, True),
        (replace(GROUPED, head_dim=512), 512, True),
        (replace(GROUPED, head_dim=96), 96, False),
        (replace(GROUPED, dtype=FP8), 64, True),
        # 16 threads copy a head of 128, 8 one of 64: a block has 1,024.
        (replace(GROUPED, head_dim=128, num_kv_heads=64), 128, True),
        (replace(GROUPED, head_dim=128, num_kv_heads=65), 128, False),
        (replace(GROUPED, num_kv_heads=128), 64, True),
        (replace(GROUPED, num_kv_heads=129), 64, False),
        (LATENT, 512, True),
        (LATENT, 448, False),
        (replace(LATENT, head_dim=320), 256, False),
    ],
)
def test_which_pools_are_written_by_flashinfer(
    geometry: KVGeometry, value_dim: int, has_kernel: bool
) -> None:
    assert appends(geometry, value_dim) == has_kernel


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(
        st.integers(1, 30).flatmap(lambda all_: st.tuples(st.integers(1, all_), st.just(all_))),
        min_size=1,
        max_size=4,
    ),
    page_size=st.integers(1, 9),
    order=st.sampled_from(PageOrder),
    kind=st.sampled_from([GROUPED, LATENT, replace(GROUPED, dtype=FP8)]),
)
def test_what_is_written_is_what_torch_writes(
    lengths: list[tuple[int, int]], page_size: int, order: PageOrder, kind: KVGeometry
) -> None:
    geometry = replace(kind, page_size=page_size, order=order)
    total = 4 * geometry.pages_for(30) + 3
    batch = make_batch(lengths, geometry, total)
    (table,) = batch.page_tables
    generator = torch.Generator().manual_seed(1)
    shape = (len(batch.positions), 3 + geometry.parts * geometry.num_kv_heads, geometry.head_dim)
    # Queries lie before them: rows are not contiguous.
    new = torch.randn(shape, generator=generator).to(geometry.dtype)[:, 3:]
    pools = [KVPool(geometry, total, CPU) for _ in range(2)]
    for pool in pools:
        pool.data.view(torch.uint8).fill_(7)
    kernel = AppendKernel(double.PACKAGE, geometry, 512 if geometry.latent else geometry.head_dim)
    kernel.locate(batch, table, CPU).write(pools[0].layer(1), new)
    NewTokens(batch, table, pools[1]).write(pools[1].layer(1), new)
    got, expected = (pool.data.view(torch.uint8) for pool in pools)
    assert torch.equal(got, expected)
    assert not (expected == 7).all()


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("llama", NORMS | ROTATE | APPEND | SILU),
        ("qwen3", NORMS | ROTATE | APPEND | SILU),
        ("gemma3", GEMMA | ROTATE | GELU),  # its heads' 24 dimensions have no kernel for writes
        ("deepseek-v3", NORMS | ROTATE | APPEND_LATENTS | SILU),
        ("deepseek-v3-experts", NORMS | ROTATE | APPEND_LATENTS | SILU),
    ],
)
def test_what_a_model_calls(
    name: str, called: set[str], models: Models, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_double(monkeypatch)
    runner = ModelRunner(
        models.folder(name), "float32", "cpu", attention=AttentionChoice.FLASHINFER
    )
    running = Sequences(runner, 1, 60)
    double.calls.clear()
    running.forward({0: tokens[:9]})
    assert set(double.calls) == called
    layers = sum(one.num_layers for one in runner.config.pool_layers)
    adds = [count for one, count in double.calls.items() if "fused_add" in one]
    assert adds == [2 * layers]  # all sums but none before the first norm
    assert sum(double.calls[one] for one in ROTATE) == layers


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("llama-wide", NORMS | ROTATE | APPEND | SILU),
        # 64 dimensions of a head rotate; its latents of 256 are written by torch.
        ("deepseek-flashinfer", NORMS | ROTATE | SILU),
        ("qwen3", NORMS | SILU),
        ("gemma2", GEMMA | GELU),
    ],
)
@pytest.mark.usefixtures("guard")
def test_kernels_take_real_dimensions_alone(
    name: str, called: set[str], models: Models, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 on the fake device, with the kernels' own limits on either side."""
    folder = models.folder(name)
    limits = (flashinfer_elementwise.ROTATED_DIMS, flashinfer_append.APPENDED_DIMS)
    latents = flashinfer_append.APPENDED_LATENTS
    assert limits == (double.ROTATED_DIMS, double.APPENDED_DIMS)
    assert latents == double.APPENDED_LATENTS
    use_double(monkeypatch)
    for module in (flashinfer_elementwise, double):
        monkeypatch.setattr(module, "ROTATED_DIMS", limits[0])
    for each in (flashinfer_append, double):
        monkeypatch.setattr(each, "APPENDED_DIMS", limits[1])
        monkeypatch.setattr(each, "APPENDED_LATENTS", latents)
    with fake_cuda(monkeypatch):
        run_on_device(folder, "flashinfer", tokens)
    assert set(double.calls) == called


def _in_float32(stored: torch.Tensor, _: bool) -> NormWeight:
    return NormWeight(stored.float(), stored.float())


def _cosines_alone(self: FlashInferElementwise, rotation: Rotation) -> Rotation:
    rows = torch.arange(len(rotation.cos), dtype=torch.int32)
    return replace(rotation, table=rotation.cos, rows=rows)


def _as_float32(self: FlashInferElementwise, rotation: Rotation) -> Rotation:
    made = PREPARE(self, rotation)
    assert made.table is not None
    return replace(made, table=made.table.bfloat16())


def _any_row(_: torch.Tensor, size: int) -> bool:
    return True


def _wide_places(self: AppendKernel, *args: Any) -> object:
    tokens = LOCATE(self, *args)
    tokens._sequences["positions"] = tokens._sequences["positions"].long()
    return tokens


def _next_page(self: AppendKernel, *args: Any) -> object:
    tokens = LOCATE(self, *args)
    tokens._sequences["positions"] += self.page_size
    return tokens


PREPARE, LOCATE = FlashInferElementwise.prepare, AppendKernel.locate


@pytest.mark.parametrize(
    ("owner", "name", "fault", "message"),
    [
        (NormWeight, "of", _in_float32, "of the input's dtype"),
        (FlashInferElementwise, "prepare", _cosines_alone, "turns as a whole"),
        (FlashInferElementwise, "prepare", _as_float32, "float32"),
        (flashinfer_elementwise, "_fills_vectors", _any_row, "broken vectors"),
        (AppendKernel, "locate", _wide_places, "another type"),
        (AppendKernel, "locate", _next_page, "past the sequence"),
    ],
    ids=["weight", "half_table", "narrow_table", "odd_rows", "int64", "slots"],
)
def test_planted_faults_are_found(
    owner: object,
    name: str,
    fault: Callable[..., object],
    message: str,
    models: Models,
    tokens: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_double(monkeypatch)
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(AssertionError, match=message):
        run_bfloat16(models.folder("deepseek-v3"), tokens)


def run_bfloat16(folder: Path, tokens: list[int]) -> None:
    """With a latent of 24 dimensions and a query's rank of 20."""
    runner = ModelRunner(folder, "bfloat16", "cpu", attention=AttentionChoice.FLASHINFER)
    Sequences(runner, 1, 60).forward({0: tokens[:9]})


def test_a_sum_that_is_used_again_is_found(
    models: Models, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel overwrites both of its arguments."""
    add = FlashInferElementwise.add_rms_norm

    def stale(
        self: FlashInferElementwise,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: NormWeight,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        before = residual.clone()
        return add(self, x, residual, weight, eps)[0], before

    use_double(monkeypatch)
    monkeypatch.setattr(FlashInferElementwise, "add_rms_norm", stale)
    runner = ModelRunner(
        models.folder("llama"), "float32", "cpu", attention=AttentionChoice.FLASHINFER
    )
    got = Sequences(runner, 1, 60).forward({0: tokens[:9]})
    with pytest.raises(AssertionError):
        assert_close(got, models.logits("llama", tokens[:9]))


def test_checks_of_fake_tensors() -> None:
    """Without contents, too."""
    with FakeTensorMode():
        x = torch.empty(3, 64, dtype=BF16)
        assert double.rmsnorm(x, torch.empty(64, dtype=BF16)).shape == (3, 64)
        with pytest.raises(AssertionError, match="unaligned address"):
            double.rmsnorm(torch.empty(3, 72, dtype=BF16)[:, 4:68], torch.empty(64, dtype=BF16))
        with pytest.raises(AssertionError, match="no strides"):
            double.silu_and_mul(torch.empty(3, 128, dtype=BF16)[:, :64])
        with pytest.raises(AssertionError, match="no blocks"):
            double.silu_and_mul(torch.empty(0, 128, dtype=BF16))


@pytest.mark.parametrize("function", double.FUNCTIONS, ids=lambda one: one.__name__)
def test_the_doubles_have_the_parameters_of_the_package(function: Callable[..., object]) -> None:
    """Of the one that is installed, which needs no GPU for that."""
    package: object = pytest.importorskip("flashinfer", exc_type=ImportError)
    real = getattr(package, function.__name__)
    theirs = list(inspect.signature(real).parameters)
    ours = list(inspect.signature(function).parameters)
    assert set(ours) <= set(theirs)
    # Those that are passed by their places.
    positional = ours[:5] if "append" in function.__name__ else ours[:3]
    assert positional == theirs[: len(positional)]
