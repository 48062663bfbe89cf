"""Experts on a GPU: the formula's numbers, as single launches and by a graph. Never run yet."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from kvrelay.cpu_kernels.kernel_threads import KernelThreads
from kvrelay.model_runner.attention.flashinfer_attention import import_flashinfer
from kvrelay.model_runner.config.moe_backend import MoEBackend
from kvrelay.model_runner.graphs.capture import CudaCapture
from kvrelay.model_runner.layers.elementwise import TorchElementwise
from kvrelay.model_runner.layers.experts.expert_factory import ExpertFactory, experts_wait
from kvrelay.model_runner.layers.experts.expert_weights import ExpertWeights
from kvrelay.model_runner.layers.fp8_weight import Fp8Weight
from kvrelay.model_runner.layers.linear import LinearFactory
from tests.model_runner.test_experts import (
    EXPERTS,
    GATES,
    by_formula,
    choose,
    in_fp8,
    make_weights,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
needs_flashinfer = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="pip install 'kvrelay[cuda]'"
)
DEVICE, HIDDEN, INNER, TOKENS = torch.device("cuda", 0), 256, 128, 33
TOLERANCES = {"bfloat16": 0.02, "fp8": 0.08}
"""Of the largest number; inputs of FP8 are rounded, too."""


@pytest.mark.parametrize("gate", ["silu", "clamped"])
def test_grouped_experts(gate: str) -> None:
    check_experts(MoEBackend.TORCH, "bfloat16", gate)


@needs_flashinfer
@pytest.mark.parametrize(
    ("form", "gate"), [("bfloat16", "silu"), ("bfloat16", "clamped"), ("fp8", "silu")]
)
def test_fused_experts(form: str, gate: str) -> None:
    if form == "fp8" and torch.cuda.get_device_capability(DEVICE) != (9, 0):
        pytest.skip("kernels of FP8 with scales of blocks are for sm_90")
    check_experts(MoEBackend.FLASHINFER, form, gate)


def check_experts(backend: MoEBackend, form: str, gate: str) -> None:
    torch.manual_seed(0)
    weights = make_weights(torch.bfloat16, gate == "clamped", HIDDEN, INNER)
    weights = in_fp8(weights) if form == "fp8" else weights
    known = [one.dequantize(torch.float64) for one in weights]
    package = None
    if backend is MoEBackend.FLASHINFER:
        package = import_flashinfer(DEVICE, "--moe-backend flashinfer").fused_moe
    factory = ExpertFactory(
        backend,
        torch.bfloat16,
        DEVICE,
        LinearFactory(),
        TorchElementwise(),
        KernelThreads(),
        package,
    )
    experts = factory.make(map(on_device, weights), EXPERTS, GATES[gate])
    x, (chosen, shares) = torch.randn(TOKENS, HIDDEN).bfloat16(), choose(TOKENS)
    given = [one.to(DEVICE) for one in (x, chosen, shares)]
    got = experts(*given)
    assert torch.equal(experts(*given), got), "each time the same bits"
    assert_near(got, by_formula(known, GATES[gate], x, chosen, shares), TOLERANCES[form])
    if experts_wait(backend, None, torch.bfloat16, DEVICE):
        return
    out = torch.empty_like(got)
    graph = CudaCapture()(lambda: out.copy_(experts(*given)))
    x, (chosen, shares) = torch.randn(TOKENS, HIDDEN).bfloat16(), choose(TOKENS)
    for room, new in zip(given, (x, chosen, shares), strict=True):
        room.copy_(new)
    graph.replay()
    assert_near(out, by_formula(known, GATES[gate], x, chosen, shares), TOLERANCES[form])


def on_device(weights: ExpertWeights) -> ExpertWeights:
    def move(weight: torch.Tensor | Fp8Weight) -> torch.Tensor | Fp8Weight:
        if isinstance(weight, torch.Tensor):
            return weight.to(DEVICE)
        return Fp8Weight(weight.values.to(DEVICE), weight.scales.to(DEVICE), weight.blocks)

    biases = (weights.gate_up_bias, weights.down_bias)
    first, second = (None if bias is None else bias.to(DEVICE) for bias in biases)
    return ExpertWeights(move(weights.gate_up), move(weights.down), first, second)


def assert_near(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = (got.cpu().double() - expected).abs().max() / expected.abs().max()
    assert error < tolerance, float(error)
