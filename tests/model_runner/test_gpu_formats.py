"""What only a GPU can show of FP8, of graphs, and of prompts over latents.

Never run yet. The bounds are what rounding should need; a first run has to judge them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from kvrelay.model_runner.attention.attention_choice import AttentionChoice
from kvrelay.model_runner.attention.expanded_latents import SplittingAttention
from kvrelay.model_runner.attention.kv_dtype import KVDtype
from kvrelay.model_runner.config.cuda_graphs import GraphOptions, GraphSizes
from kvrelay.model_runner.layers.fp8_linear import (
    BlockScaledLinear,
    RowScaledLinear,
    fp8_products_lack,
)
from kvrelay.model_runner.layers.fp8_weight import Fp8Weight
from kvrelay.model_runner.runner import ModelRunner
from tests.model_runner.fp8_models import FORMATS, write_fp8
from tests.model_runner.scaled_mm_double import scaled_mm
from tests.model_runner.sequences import Sequences
from tests.model_runner.test_fp8_linear import make_weight
from tests.model_runner.tiny_models import Models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
needs_flashinfer = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="pip install 'kvrelay[cuda]'"
)
DEVICE = "cuda:0"
GRAPHS = GraphOptions(GraphSizes((1, 2, 4)), page_size=16, most_each=4)


def moved(weight: Fp8Weight) -> Fp8Weight:
    return Fp8Weight(weight.values.to(DEVICE), weight.scales.to(DEVICE), weight.blocks)


@pytest.mark.parametrize("rows", [1, 3, 64, 130])
@pytest.mark.parametrize(
    ("blocks", "outputs", "inputs"),
    [(False, 48, 32), (False, 1024, 640), (True, 256, 128), (True, 576, 640), (True, 256, 1024)],
)
def test_products_are_those_of_the_double(
    blocks: bool, outputs: int, inputs: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same rounded inputs: that scales are where the kernels look for them."""
    weight = make_weight(outputs, inputs, blocks)
    if lack := fp8_products_lack(moved(weight), torch.bfloat16):
        pytest.skip(lack)
    kind = BlockScaledLinear if blocks else RowScaledLinear
    x = torch.randn(rows, inputs).to(torch.bfloat16)
    got = kind(moved(weight), None)(x.to(DEVICE)).cpu()
    monkeypatch.setattr(functional, "scaled_mm", scaled_mm)
    torch.testing.assert_close(got, kind(weight, None)(x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("form", FORMATS)
def test_models_in_fp8_are_near_those_of_the_dequantized_weights(
    form: str, models: Models, tokens: list[int], tmp_path: Path
) -> None:
    folder, _ = write_fp8(models.folder("llama-wide"), FORMATS[form], tmp_path)
    logits = [
        Sequences(ModelRunner(folder, "bfloat16", device), 1, 40).forward({0: tokens[:30]}).cpu()
        for device in (DEVICE, "cpu")
    ]
    error = (logits[0] - logits[1]).norm() / logits[1].norm()
    assert error < (0.3 if FORMATS[form].static else 0.15)


@needs_flashinfer
def test_kv_in_fp8_by_flashinfer_is_that_of_plain_torch(models: Models, tokens: list[int]) -> None:
    """With heads of 128; prompts, drafts that are verified, and decode."""
    results = []
    for attention in (AttentionChoice.FLASHINFER, AttentionChoice.TORCH):
        runner = ModelRunner(
            models.folder("llama-wide"),
            "bfloat16",
            DEVICE,
            attention=attention,
            kv_dtype=KVDtype.FP8_E4M3,
        )
        running = Sequences(runner, 1, 60, 16)
        cuts = [(0, 30), (30, 34), (34, 35), (35, 36)]
        results.append(torch.cat([running.forward({0: tokens[a:b]}).cpu() for a, b in cuts]))
    error = (results[0] - results[1]).norm() / results[1].norm()
    assert error < 0.05


@needs_flashinfer
@pytest.mark.parametrize("name", ["llama-wide", "deepseek-flashinfer"])
def test_graphs_give_the_logits_of_single_launches(
    name: str, models: Models, tokens: list[int]
) -> None:
    """In steps that are padded, in steps that are not, with drafts, and beside others."""
    results = []
    for graphs in (GRAPHS, None):
        runner = ModelRunner(
            models.folder(name),
            "bfloat16",
            DEVICE,
            attention=AttentionChoice.FLASHINFER,
            graphs=graphs,
        )
        running = Sequences(runner, 4, 60, 16)
        runner.warm_up()
        runner.capture_graphs()
        got = [running.forward({0: tokens[:20], 1: tokens[:7], 2: tokens[:30]}, []).cpu()]
        for step in range(12):
            counts = {0: 1 + 3 * (step % 4 == 2), 2: 1 + step % 2}
            if step % 3:
                counts[1] = 1
            ends = running.seq_lens
            new: dict[int, Sequence[int]] = {
                i: tokens[ends[i] : ends[i] + count] for i, count in counts.items()
            }
            got.append(running.forward(new).cpu())
        results.append(torch.cat(got))
    error = (results[0] - results[1]).norm() / results[1].norm()
    assert error < 0.02


@needs_flashinfer
def test_prompts_over_latents(models: Models, tokens: list[int]) -> None:
    """By keys and values made of latents, as by absorption in plain torch."""
    results = []
    for attention in (AttentionChoice.FLASHINFER, AttentionChoice.TORCH):
        runner = ModelRunner(
            models.folder("deepseek-flashinfer"), "bfloat16", DEVICE, attention=attention
        )
        running = Sequences(runner, 2, 120, 16)
        for backend in runner._backends:
            if isinstance(backend, SplittingAttention):
                backend._heads = replace(backend._heads, least_new_tokens=50)
        parts = [running.forward({0: tokens[:100], 1: tokens[:3]}).cpu()]
        parts.append(running.forward({0: tokens[100:101], 1: tokens[3:103]}).cpu())
        results.append(torch.cat(parts))
    error = (results[0] - results[1]).norm() / results[1].norm()
    assert error < 0.05
