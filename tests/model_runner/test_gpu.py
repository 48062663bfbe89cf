"""What only a GPU can show: attention by FlashInfer's own kernels, models, and sampling there.

Never run yet. The bounds are what rounding to bfloat16 should need; a first run has to judge them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kvrelay.mem_cache.geometry import KVGeometry, PageOrder
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.attention.attention_choice import AttentionChoice
from kvrelay.model_runner.attention.flashinfer_attention import (
    FlashInfer,
    FlashInferAttention,
    import_flashinfer,
)
from kvrelay.model_runner.attention.torch_attention import TorchAttention
from kvrelay.model_runner.config.query_heads import QueryHeads
from kvrelay.model_runner.layers.elementwise import (
    HeadNormWeights,
    NormWeight,
    Rotation,
    TorchElementwise,
)
from kvrelay.model_runner.layers.flashinfer_elementwise import FlashInferElementwise
from kvrelay.model_runner.runner import ModelRunner
from tests.model_runner.sequences import Sequences
from tests.model_runner.test_attention import make_batch, make_pool, make_rows
from tests.model_runner.test_decoder import EXPERTS, NAMES
from tests.model_runner.tiny_models import Models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
needs_flashinfer = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="pip install 'kvrelay[cuda]'"
)
LENGTHS: list[list[tuple[int, int]]] = [
    [(1, 300), (1, 1), (1, 16)],
    [(70, 70), (1, 33), (30, 290), (4, 21)],
]
GROUPED = KVGeometry(2, 2, 128, torch.bfloat16, 16)
SHAPES = {
    "group of 1": (GROUPED, QueryHeads(2, 128, 0.09)),
    "group of 4": (GROUPED, QueryHeads(8, 128, 0.09)),
    "group of 5": (GROUPED, QueryHeads(10, 128, 0.09)),
    "group of 7": (GROUPED, QueryHeads(14, 128, 0.09)),
    "heads of 64": (replace(GROUPED, head_dim=64), QueryHeads(6, 64, 0.125)),
    "heads of 256": (replace(GROUPED, head_dim=256), QueryHeads(8, 256, 0.06)),
    "window": (replace(GROUPED, window=40), QueryHeads(8, 128, 0.09)),
    "soft cap": (GROUPED, QueryHeads(8, 128, 0.09, 30.0)),
    "latent": (
        KVGeometry(2, 1, 576, torch.bfloat16, 16, latent=True),
        QueryHeads(16, 512, 0.07),
    ),
}


@needs_flashinfer
@pytest.mark.parametrize("order", list(PageOrder))
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_that_of_torch(
    shape: str, lengths: list[tuple[int, int]], order: PageOrder
) -> None:
    geometry, heads = SHAPES[shape]
    agrees_with_torch(replace(geometry, order=order), heads, lengths)


@needs_flashinfer
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("shape", ["heads of 64", "window"])
def test_sinks_are_those_of_torch(shape: str, lengths: list[tuple[int, int]]) -> None:
    """By the logarithms of sums that kernels return."""
    geometry, heads = SHAPES[shape]
    agrees_with_torch(geometry, heads, lengths, torch.linspace(-3, 5, heads.num_heads))


def agrees_with_torch(
    geometry: KVGeometry,
    heads: QueryHeads,
    lengths: list[tuple[int, int]],
    sinks: torch.Tensor | None = None,
) -> None:
    device = torch.device("cuda", 0)
    total = 4 * geometry.pages_for(300) + 3
    batch = make_batch(lengths, geometry, total)
    torch.manual_seed(0)
    reference, rows = make_pool(geometry, batch, total), make_rows(batch, geometry, heads)
    pool = KVPool(geometry, total, device)
    pool.data.copy_(reference.data)
    (table,) = batch.page_tables
    backend = FlashInferAttention(FlashInfer(device), pool, heads)
    there = None if sinks is None else sinks.to(device)
    got = backend.plan(batch, table).attend(1, rows.to(device), there).cpu()
    expected = TorchAttention(reference, heads).plan(batch, table).attend(1, rows, sinks)
    torch.testing.assert_close(got, expected, rtol=0.03, atol=0.03)
    assert torch.equal(pool.data.cpu().nan_to_num(7), reference.data.nan_to_num(7))


ELEMENTWISE = TorchElementwise()


@needs_flashinfer
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("rows", [1, 37])
def test_what_is_beside_attention_is_that_of_torch(rows: int, offset: bool) -> None:
    """Norms, sums, rotation and activations: to one rounding of what float32 gives."""
    device = torch.device("cuda", 0)
    kernels = FlashInferElementwise(import_flashinfer(device))
    torch.manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).bfloat16()

    def check(got: torch.Tensor, exact: torch.Tensor) -> None:
        torch.testing.assert_close(got.float(), exact, rtol=2**-7, atol=2**-7)

    weight = NormWeight.of(random(2048) * 0.3, offset)
    wide = NormWeight.of(weight.stored.float(), offset)
    x, residual = random(rows, 2048), random(rows, 2048)
    check(kernels.rms_norm(x, weight, 1e-5), ELEMENTWISE.rms_norm(x.float(), wide, 1e-5))
    exact = ELEMENTWISE.add_rms_norm(x.float(), residual.float(), wide, 1e-5)
    for got, one in zip(kernels.add_rms_norm(x, residual, weight, 1e-5), exact, strict=True):
        check(got, one)
    head = NormWeight.of(random(128) * 0.3, offset)
    turned = random(rows, 14, 128)  # of which half a head rotates, as GLM-4.5's
    heads, angles = turned.clone(), torch.rand(rows, 32, device=device) * 100
    turned, rotation = turned.float(), Rotation(angles.cos(), angles.sin())
    ELEMENTWISE.rotate(turned, 12, rotation)
    kernels.rotate(heads, 12, kernels.prepare(rotation))
    check(heads, turned)
    heads, angles = random(rows, 14, 128), torch.rand(rows, 64, device=device) * 100
    turned, rotation = heads.float(), Rotation(angles.cos(), angles.sin())
    precise = NormWeight.of(head.stored.float(), offset)
    ELEMENTWISE.rms_norm_heads(turned, HeadNormWeights.of(precise, precise, 10, 2), 1e-5)
    kernels.rms_norm_heads(heads, HeadNormWeights.of(head, head, 10, 2), 1e-5)
    check(heads, turned)
    turned = heads.float()
    ELEMENTWISE.rotate(turned, 12, rotation)
    kernels.rotate(heads, 12, kernels.prepare(rotation))
    check(heads, turned)
    gate_up = random(rows, 2 * 5632)
    check(kernels.silu_mul(gate_up), ELEMENTWISE.silu_mul(gate_up.float()))
    check(kernels.gelu_mul(gate_up), ELEMENTWISE.gelu_mul(gate_up.float()))


def run_in_parts(runner: ModelRunner, tokens: Sequence[int]) -> torch.Tensor:
    """Logits of a prompt in chunks, of drafts that are verified, and token by token."""
    running = Sequences(runner, 1, 60)
    runner.warm_up()
    cuts = [0, 1, 8, 30, 50, 54, 55, 56]
    return torch.cat([running.forward({0: tokens[a:b]}).cpu() for a, b in pairwise(cuts)])


@pytest.mark.parametrize("name", [*NAMES, *EXPERTS])
def test_models_in_float32_are_those_of_transformers(
    name: str, models: Models, tokens: list[int]
) -> None:
    runner = ModelRunner(models.folder(name), "float32", "cuda:0")
    got = run_in_parts(runner, tokens)
    torch.testing.assert_close(got, models.logits(name, tokens[:56]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_models_in_bfloat16_choose_mostly_as_transformers(
    name: str, models: Models, tokens: list[int]
) -> None:
    """These random models amplify rounding: most of the likeliest tokens are the same."""
    runner = ModelRunner(models.folder(name), "bfloat16", "cuda:0", attention=AttentionChoice.TORCH)
    got, expected = run_in_parts(runner, tokens), models.logits(name, tokens[:56])
    assert (got.argmax(1) == expected.argmax(1)).float().mean() > 0.8
