"""Experts computed together: the formula's numbers, alike in every batch, and by graphs."""

from __future__ import annotations

import inspect
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from kvrelay.cpu_kernels.kernel_threads import KernelThreads
from kvrelay.cpu_kernels.processor import describe_arithmetic
from kvrelay.engine.config import Speculation, WorkerConfig
from kvrelay.engine.worker.loading import load_model
from kvrelay.model_runner.config.fp8_weights import Fp8Weights, ScaleShape
from kvrelay.model_runner.config.model_config import Activation
from kvrelay.model_runner.config.moe_backend import ClampedSilu, MoEBackend
from kvrelay.model_runner.errors import UnsupportedOptionError
from kvrelay.model_runner.layers import linear as linear_layer
from kvrelay.model_runner.layers.elementwise import TorchElementwise
from kvrelay.model_runner.layers.elementwise_choice import make_elementwise
from kvrelay.model_runner.layers.experts import cpu_experts
from kvrelay.model_runner.layers.experts.cpu_experts import CpuExperts, ExpertScratch
from kvrelay.model_runner.layers.experts.expert_factory import ExpertFactory, experts_wait
from kvrelay.model_runner.layers.experts.expert_weights import (
    ExpertActivation,
    ExpertWeights,
    RoutedExperts,
)
from kvrelay.model_runner.layers.experts.flashinfer_experts import FlashInferExperts, FusedWorkspace
from kvrelay.model_runner.layers.experts.grouped_experts import GroupedExperts
from kvrelay.model_runner.layers.experts.sliced_experts import SlicedExperts
from kvrelay.model_runner.layers.fp8_weight import FP8, Fp8Weight
from kvrelay.model_runner.layers.linear import LinearFactory
from kvrelay.model_runner.runner import ModelRunner
from kvrelay.wire.worker_info import WorkerRole
from tests.model_runner import fused_moe_double, graph_double
from tests.model_runner.fake_cuda import DEVICE, fake_cuda
from tests.model_runner.product_units import UNITS, be_a_processor_of
from tests.model_runner.tiny_models import Models
from tests.pairwise import few

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
EXPERTS, EACH, TOKENS, HIDDEN, INNER = 7, 3, 45, 64, 32
GATES: dict[str, ExpertActivation] = {
    "silu": Activation.SILU,
    "gelu": Activation.GELU_TANH,
    "clamped": ClampedSilu(1.7, 0.6),
}
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float64: 1e-12}
WAYS: dict[str, tuple[torch.dtype, MoEBackend, str]] = {
    "own-float32": (torch.float32, MoEBackend.CPU, "auto"),
    "own-bfloat16": (torch.bfloat16, MoEBackend.CPU, "auto"),
    "grouped-float32": (torch.float32, MoEBackend.TORCH, "auto"),
    "grouped-bfloat16": (torch.bfloat16, MoEBackend.TORCH, "auto"),
    "sliced-float64": (torch.float64, MoEBackend.AUTO, "auto"),
    "sliced-bfloat16": (torch.bfloat16, MoEBackend.AUTO, "onednn"),
}
KINDS = {"own": CpuExperts, "grouped": GroupedExperts, "sliced": SlicedExperts}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def make_weights(
    dtype: torch.dtype, biased: bool, hidden: int = HIDDEN, inner: int = INNER
) -> list[ExpertWeights]:
    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape) * 0.2).to(dtype)

    return [
        ExpertWeights(
            normal(2 * inner, hidden),
            normal(hidden, inner),
            normal(2 * inner) if biased else None,
            normal(hidden) if biased else None,
        )
        for _ in range(EXPERTS)
    ]


def make_factory(
    dtype: torch.dtype,
    backend: MoEBackend = MoEBackend.AUTO,
    cpu_kernels: str = "auto",
    batch_invariant: bool = False,
    threads: int = 1,
) -> ExpertFactory:
    kernel_threads = KernelThreads(threads)
    linears = LinearFactory(batch_invariant, kernel_threads, cpu_kernels)
    elementwise = make_elementwise(dtype, CPU, batch_invariant)
    return ExpertFactory(backend, dtype, CPU, linears, elementwise, kernel_threads)


def choose(tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    """Different experts for each token; the fourth expert is nobody's."""
    liking = torch.rand(tokens, EXPERTS)
    liking[:, 3] = -1
    return liking.topk(EACH).indices, torch.rand(tokens, EACH)


def plain(weight: torch.Tensor | Fp8Weight) -> torch.Tensor:
    assert isinstance(weight, torch.Tensor)
    return weight


def by_formula(
    weights: list[ExpertWeights],
    gate: ExpertActivation,
    x: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
) -> torch.Tensor:
    """In float64, one pair after the other."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, choice in torch.cartesian_prod(torch.arange(len(x)), torch.arange(chosen.shape[1])):
        one = weights[chosen[token, choice]]
        gate_up = plain(one.gate_up).double() @ x[token].double()
        gate_up += 0 if one.gate_up_bias is None else one.gate_up_bias.double()
        g, up = gate_up.chunk(2)
        if isinstance(gate, ClampedSilu):
            g, up = g.clamp(max=gate.most), up.clamp(-gate.most, gate.most)
            inner = (up + 1) * g * torch.sigmoid(gate.slope * g)
        elif gate is Activation.SILU:
            inner = functional.silu(g) * up
        else:
            inner = functional.gelu(g, approximate="tanh") * up
        result = plain(one.down).double() @ inner
        result += 0 if one.down_bias is None else one.down_bias.double()
        out[token] += shares[token, choice].double() * result
    return out


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.is_contiguous()
    error = (got.double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCES[got.dtype], float(error)


@few(7)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("hidden", "inner"), [(HIDDEN, INNER), (40, 20)])
def test_every_way_computes_the_formula(way: str, gate: str, hidden: int, inner: int) -> None:
    """Some sizes are no multiples of what kernels take."""
    dtype, backend, cpu_kernels = WAYS[way]
    weights = make_weights(dtype, gate == "clamped", hidden, inner)
    experts = make_factory(dtype, backend, cpu_kernels).make(weights, EXPERTS, GATES[gate])
    assert type(experts) is KINDS[way.partition("-")[0]]
    x, (chosen, shares) = torch.randn(TOKENS, hidden).to(dtype), choose()
    got = experts(x, chosen, shares)
    assert_near(got, by_formula(weights, GATES[gate], x, chosen, shares))
    assert torch.equal(experts(x, chosen, shares), got), "each time the same bits"


@pytest.mark.parametrize("way", WAYS)
def test_one_expert_gets_all(way: str) -> None:
    dtype, backend, cpu_kernels = WAYS[way]
    weights = make_weights(dtype, biased=False)
    experts = make_factory(dtype, backend, cpu_kernels).make(weights, EXPERTS, Activation.SILU)
    x, chosen, shares = torch.randn(5, HIDDEN).to(dtype), torch.full((5, 1), 4), torch.rand(5, 1)
    expected = by_formula(weights, Activation.SILU, x, chosen, shares)
    assert_near(experts(x, chosen, shares), expected)
    assert_near(experts(x[:1], chosen[:1], shares[:1]), expected[:1])


@few(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_depend_neither_on_the_batch_nor_on_threads(
    dtype: torch.dtype, unit: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of single products, added in the order of choices."""
    if dtype is torch.bfloat16:
        be_a_processor_of(unit, monkeypatch)
    for place in (linear_layer, cpu_experts):
        monkeypatch.setattr(place, "SHARED_WEIGHTS", 1)
    weights = make_weights(dtype, biased=True)
    factory = make_factory(dtype, batch_invariant=True, threads=threads)
    experts = factory.make(weights, EXPERTS, Activation.SILU)
    assert type(experts) is CpuExperts
    count = 400  # several blocks
    x, (chosen, shares) = torch.randn(count, HIDDEN).to(dtype), choose(count)
    whole = experts(x, chosen, shares)
    differing = 0
    for begin, size in ((0, 1), (1, 2), (7, 33), (60, 130), (399, 1)):
        some = slice(begin, begin + size)
        part = experts(x[some], chosen[some], shares[some])
        differing += int((part != whole[some]).any(1).sum())
    assert differing == 0
    linears, elementwise = LinearFactory(True), make_elementwise(dtype, CPU, True)
    for token in range(0, count, 37):
        total = torch.zeros(HIDDEN)
        for expert, share in zip(chosen[token], shares[token], strict=True):
            one = weights[expert]
            gate_up = linears.make(plain(one.gate_up), one.gate_up_bias)(x[token][None])
            result = linears.make(plain(one.down), one.down_bias)(elementwise.silu_mul(gate_up))
            total += share * result[0].float()
        assert torch.equal(whole[token], total.to(dtype))


def test_grouped_experts_are_captured() -> None:
    """The host neither reads choices nor decides by them: a graph is right for others."""
    weights = make_weights(torch.float32, biased=True)
    factory = make_factory(torch.float32, MoEBackend.TORCH)
    experts = factory.make(weights, EXPERTS, GATES["clamped"])
    check_graph(experts, weights, torch.float32)


def check_graph(
    experts: RoutedExperts,
    weights: list[ExpertWeights],
    dtype: torch.dtype,
    known: Callable[[ExpertWeights], ExpertWeights] = lambda one: one,
) -> None:
    hidden = plain(known(weights[0]).down).shape[0]
    x, (chosen, shares) = torch.randn(9, hidden).to(dtype), choose(9)
    out = torch.empty_like(x)
    graph = graph_double.capture(lambda: out.copy_(experts(x, chosen, shares)))
    x.copy_(torch.randn(9, hidden))
    others = choose(9)
    assert not torch.equal(chosen, others[0])
    chosen.copy_(others[0])
    shares.copy_(others[1])
    graph.replay()
    read = [known(one) for one in weights]
    assert_near(out, by_formula(read, GATES["clamped"], x, chosen, shares))


def test_a_graph_of_slices_would_be_wrong() -> None:
    weights = make_weights(torch.float64, biased=True)
    experts = make_factory(torch.float64).make(weights, EXPERTS, GATES["clamped"])
    with pytest.raises(AssertionError):
        check_graph(experts, weights, torch.float64)


def in_fp8(weights: list[ExpertWeights]) -> list[ExpertWeights]:
    """With scales of blocks."""

    def quantize(weight: torch.Tensor) -> Fp8Weight:
        rows, columns = (size // 128 for size in weight.shape)
        return Fp8Weight((weight * 100).to(FP8), torch.rand(rows, columns) + 0.5, blocks=True)

    return [
        replace(one, gate_up=quantize(plain(one.gate_up)), down=quantize(plain(one.down)))
        for one in weights
    ]


@pytest.mark.parametrize(
    ("form", "hidden", "inner"),
    [("bfloat16", 128, 128), ("bfloat16", 72, 40), ("fp8", 256, 128)],
)
def test_flashinfer_is_given_what_its_kernel_reads(form: str, hidden: int, inner: int) -> None:
    """In a graph, too; its memory stays where it was captured."""
    weights = make_weights(torch.bfloat16, biased=True, hidden=hidden, inner=inner)
    if form == "fp8":
        weights = in_fp8(weights)
    workspace = FusedWorkspace(fused_moe_double.PACKAGE)
    experts = make_fused(weights, workspace)
    check_graph(experts, weights, torch.bfloat16, lambda one: one.dequantize(torch.float64))
    [captured] = workspace._buffers
    chosen, shares = choose(257)
    experts(torch.zeros(257, hidden).bfloat16(), chosen, shares)
    assert len(workspace._buffers) == 2
    assert workspace._buffers[0] is captured


def make_fused(weights: list[ExpertWeights], workspace: FusedWorkspace) -> FlashInferExperts:
    return FlashInferExperts(
        iter(weights),
        EXPERTS,
        torch.bfloat16,
        GATES["clamped"],
        fused_moe_double.PACKAGE,
        workspace,
    )


def test_flashinfers_memory_is_enough_for_a_small_step_after_a_large_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In FP8 its size never falls: neither for layers in another dtype, nor for other models."""
    monkeypatch.setattr(fused_moe_double, "most_pairs", {})
    weights = make_weights(torch.bfloat16, biased=False, hidden=128, inner=128)
    workspace = FusedWorkspace(fused_moe_double.PACKAGE)
    in_bfloat16 = make_fused(weights, workspace)
    experts = make_fused(in_fp8(weights), workspace)
    draft = make_fused(in_fp8(weights), FusedWorkspace(fused_moe_double.PACKAGE))
    steps = [(experts, 1), (in_bfloat16, 257), (experts, 257), (experts, 1)]
    for one, tokens in (*steps, (draft, 513), (experts, 1)):
        chosen = torch.zeros(tokens, 1, dtype=torch.int64)
        one(torch.zeros(tokens, 128).bfloat16(), chosen, torch.ones(tokens, 1))


def test_flashinfer_takes_the_doubles_arguments() -> None:
    package = pytest.importorskip("flashinfer.fused_moe")
    for name, double in vars(fused_moe_double.PACKAGE).items():
        ours = list(inspect.signature(double).parameters)
        theirs = list(inspect.signature(getattr(package, name)).parameters)
        assert set(ours) <= set(theirs)
        assert ours[:7] == theirs[:7] or name.endswith("size")


@pytest.mark.parametrize(
    ("backend", "dtype", "device", "fp8", "said"),
    [
        ("auto", torch.bfloat16, CUDA, None, None),
        ("flashinfer", torch.bfloat16, CUDA, ScaleShape.BLOCK, None),
        ("torch", torch.float32, CPU, None, None),
        ("auto", torch.float32, CPU, None, "a CPU computes them"),
        ("auto", torch.bfloat16, CUDA, ScaleShape.CHANNEL, "--moe-backend flashinfer"),
        ("auto", torch.bfloat16, CUDA, ScaleShape.BLOCK, None),  # is dequantized
        ("auto", torch.float16, CUDA, ScaleShape.CHANNEL, "no grouped products of float16"),
        ("torch", torch.float64, CPU, None, "no grouped products of float64"),
    ],
)
def test_why_experts_have_no_graphs(
    backend: str,
    dtype: torch.dtype,
    device: torch.device,
    fp8: ScaleShape | None,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheme = None if fp8 is None else Fp8Weights(fp8)
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    lack = experts_wait(MoEBackend(backend), scheme, dtype, device)
    assert lack is None if said is None else lack is not None and said in lack
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    if backend == "auto" and said is None:
        waits = experts_wait(MoEBackend(backend), scheme, dtype, device)
        assert waits is not None
        assert "sm_90" in waits


@pytest.mark.parametrize(
    ("backend", "dtype", "invariant", "said"),
    [
        ("cpu", torch.float16, False, "--moe-backend cpu has no kernels"),
        ("torch", torch.float32, True, "--batch-invariant is not for --moe-backend torch"),
        ("flashinfer", torch.bfloat16, False, "--moe-backend flashinfer: they need a CUDA device"),
    ],
)
def test_ways_that_cannot_be_had(
    backend: str, dtype: torch.dtype, invariant: bool, said: str
) -> None:
    with pytest.raises(UnsupportedOptionError, match=said):
        make_factory(dtype, MoEBackend(backend), batch_invariant=invariant).make(
            make_weights(dtype, biased=False), EXPERTS, Activation.SILU
        )


REFUSED: list[tuple[MoEBackend, str, bool]] = [
    (MoEBackend.CPU, "float16", False),
    (MoEBackend.TORCH, "float32", True),
    (MoEBackend.FLASHINFER, "bfloat16", False),
]


@pytest.mark.parametrize(("backend", "dtype", "invariant"), REFUSED)
def test_ways_are_refused_before_weights_are_read_and_where_there_are_experts(
    backend: MoEBackend, dtype: str, invariant: bool, models: Models, tmp_path: Path
) -> None:
    shutil.copy(models.folder("deepseek-v3-experts") / "config.json", tmp_path)
    with pytest.raises(UnsupportedOptionError, match=f"--moe-backend {backend}"):
        ModelRunner(tmp_path, dtype, "cpu", batch_invariant=invariant, moe_backend=backend)
    dense = models.folder("llama")
    ModelRunner(dense, dtype, "cpu", batch_invariant=invariant, moe_backend=backend)


def test_a_draft_models_experts_are_computed_by_the_same_way(models: Models) -> None:
    config = WorkerConfig(
        "p0",
        WorkerRole.PREFILL,
        models.folder("llama"),
        "tiny",
        dtype="float16",
        kv_memory=1 << 20,
        draft_model_path=models.folder("deepseek-v3-experts"),
        speculation=Speculation.DRAFT,
        moe_backend=MoEBackend.CPU,
    )
    with pytest.raises(UnsupportedOptionError, match="--moe-backend cpu has no kernels"):
        load_model(config)


def test_an_expert_in_another_dtype_than_the_first_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    with fake_cuda(monkeypatch), torch.inference_mode():

        def quantized(*shape: int) -> Fp8Weight:
            scales = torch.empty([size // 128 for size in shape], device=DEVICE)
            return Fp8Weight(torch.empty(shape, dtype=FP8, device=DEVICE), scales, blocks=True)

        weights = [ExpertWeights(quantized(256, 128), quantized(128, 128)) for _ in range(3)]
        factory = ExpertFactory(
            MoEBackend.FLASHINFER,
            torch.bfloat16,
            DEVICE,
            LinearFactory(),
            TorchElementwise(),
            KernelThreads(1),
            fused_moe_double.PACKAGE,
        )
        assert len(list(factory._all_in_fp8(weights))) == 3
        plain = [torch.empty(shape, device=DEVICE) for shape in ((256, 128), (128, 128))]
        weights[2] = ExpertWeights(*plain)
        with pytest.raises(UnsupportedOptionError, match="expert 0 is in FP8, expert 2 is not"):
            list(factory._all_in_fp8(weights))


def test_bits_of_float32_are_one_ways_or_workers_do_not_pair(models: Models) -> None:
    """They do not follow from what multiplies bfloat16."""
    weights = make_weights(torch.float32, biased=False)
    for cpu_kernels in ("auto", "onednn"):
        factory = make_factory(torch.float32, cpu_kernels=cpu_kernels)
        assert type(factory.make(weights, EXPERTS, Activation.SILU)) is CpuExperts

    def arithmetic(name: str, dtype: str, backend: MoEBackend) -> str:
        return ModelRunner(models.folder(name), dtype, "cpu", moe_backend=backend).arithmetic

    experts, here = "deepseek-v3-experts", describe_arithmetic()
    assert arithmetic(experts, "float32", MoEBackend.AUTO) == here
    assert arithmetic(experts, "float32", MoEBackend.TORCH) == f"{here}+experts-torch"
    assert arithmetic("llama", "float32", MoEBackend.TORCH) == here
    assert arithmetic(experts, "bfloat16", MoEBackend.TORCH) == ""


def test_experts_by_torch_are_not_counted_as_ours() -> None:
    factory = make_factory(torch.float32, MoEBackend.TORCH)
    factory._linears.count(1, own=True)
    assert factory._linears.is_mostly_own
    factory.make(make_weights(torch.float32, biased=False), EXPERTS, Activation.SILU)
    assert not factory._linears.is_mostly_own


def test_scratch_is_freed_before_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    scratch, make = ExpertScratch(), torch.empty
    scratch.take(8, torch.float32)
    old, lived = weakref.ref(scratch._memory), []

    def noted(numbers: int, **options: Any) -> torch.Tensor:
        lived.append((numbers, old() is not None))
        return make(numbers, **options)

    monkeypatch.setattr(torch, "empty", noted)
    scratch.take(16, torch.float32)
    assert lived[-1] == (64, False)


def test_other_processors_leave_it_to_single_products(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("has_bfloat16_products", "has_float_products"):
        monkeypatch.setattr(cpu_experts, name, lambda: False)
    for dtype in (torch.float32, torch.bfloat16):
        made = make_factory(dtype).make(make_weights(dtype, False), EXPERTS, Activation.SILU)
        assert type(made) is SlicedExperts
    own = make_factory(torch.float32, batch_invariant=True)
    made = own.make(make_weights(torch.float32, False), EXPERTS, Activation.SILU)
    assert type(made) is CpuExperts
