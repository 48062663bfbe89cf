"""Models of transformers' code in the options, types and files that they are served with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers import MiniMaxM3VLConfig

from kvrelay.cpu_kernels.kernel_threads import KernelThreads
from kvrelay.model_runner.attention.kv_dtype import KVDtype
from kvrelay.model_runner.batch import PendingIds
from kvrelay.model_runner.config.model_code import ModelCode
from kvrelay.model_runner.config.model_config import Activation
from kvrelay.model_runner.config.moe_backend import MoEBackend
from kvrelay.model_runner.config.query_heads import QueryHeads
from kvrelay.model_runner.errors import (
    CheckpointError,
    NotNativeError,
    UnsupportedOptionError,
)
from kvrelay.model_runner.layers.elementwise import TorchElementwise
from kvrelay.model_runner.layers.experts.expert_factory import ExpertFactory
from kvrelay.model_runner.layers.linear import LinearFactory
from kvrelay.model_runner.runner import ModelRunner
from kvrelay.model_runner.transformers_model import own_parts, paged_attention
from kvrelay.model_runner.transformers_model.attention_interface import Scoring
from kvrelay.model_runner.transformers_model.configuration import read_transformers_config
from kvrelay.model_runner.transformers_model.layout import AttentionCall
from kvrelay.model_runner.transformers_model.own_parts import (
    JoinedLinear,
    OwnExperts,
    OwnGatedProduct,
    OwnLinear,
    OwnNorm,
    OwnParts,
    WatchedLinear,
    install_parts,
    watch_products,
)
from kvrelay.model_runner.transformers_model.refusals import ModelCodeError
from kvrelay.model_runner.transformers_model.transformers_decoder import TransformersDecoder
from tests.model_runner.sequences import Sequences
from tests.model_runner.tiny_models import Models
from tests.model_runner.transformers_model.kinds import SAME, compare, save_small, serve
from tests.pairwise import few

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def phi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phi")
    save_small("phi", folder)
    return folder


def test_auto_takes_our_code_where_there_is_any(phi: Path, models: Models) -> None:
    ours = ModelRunner(models.folder("llama"), "float32", "cpu")
    theirs = ModelRunner(phi, "float32", "cpu")
    assert (ours.config.architecture, theirs.config.architecture) == (
        "LlamaForCausalLM",
        "PhiForCausalLM",
    )
    with pytest.raises(NotNativeError):
        ModelRunner(phi, "float32", "cpu", model_code=ModelCode.NATIVE)


@few(1)
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 8}),
        ("granite", {"hidden_act": "gelu"}),
        ("olmo2", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    ],
)
def test_auto_takes_transformers_code_where_ours_lacks_an_option(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = save_small(kind, tmp_path, **changes)
    with pytest.raises(NotNativeError):
        ModelRunner(tmp_path, "float32", "cpu", model_code=ModelCode.NATIVE)
    assert compare(ModelRunner(tmp_path, "float32", "cpu"), model) < SAME


def test_other_code_is_another_model(models: Models) -> None:
    ours = ModelRunner(models.folder("llama"), "float32", "cpu")
    theirs = serve(models.folder("llama"))
    assert theirs.arithmetic == f"transformers {_version()}, {ours.arithmetic}"
    assert theirs.config_digest != ours.config_digest
    assert theirs.weights_digest == serve(models.folder("llama")).weights_digest


def test_folder_is_no_part_of_a_model(phi: Path, tmp_path: Path) -> None:
    _copy(phi, tmp_path, lambda tensors: None)
    assert read_transformers_config(tmp_path) == read_transformers_config(phi)


def _version() -> str:
    import transformers

    return str(transformers.__version__)


@pytest.mark.parametrize("name", ["llama-biased", "gemma2", "deepseek-v3-experts"])
def test_half_precision_is_close(name: str, models: Models, tokens: list[int]) -> None:
    running = Sequences(serve(models.folder(name), "bfloat16"), 1, 60)
    parts = [running.forward({0: tokens[:40]})]
    parts += [running.forward({0: tokens[i : i + 1]}) for i in range(40, 44)]
    expected = models.logits(name, tokens[:44])
    errors = (torch.cat(parts) - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.median() < 0.06


def test_products_norms_and_feed_forwards_are_ours(models: Models) -> None:
    decoder = serve(models.folder("llama"), "bfloat16")._decoder
    assert isinstance(decoder, TransformersDecoder)
    kinds = Counter(map(type, decoder._model.modules()))
    assert kinds[OwnGatedProduct] == 2
    assert kinds[JoinedLinear] == 2 * len(("q_proj", "k_proj", "v_proj"))
    assert kinds[OwnLinear] == 2 * len(("o_proj",)) + len(("lm_head",))
    assert kinds[OwnNorm] == 2 * 2 + 1
    assert not kinds[nn.Linear] + kinds[WatchedLinear]


def make_parts() -> OwnParts:
    linears, elementwise = LinearFactory(), TorchElementwise()
    cpu, threads = torch.device("cpu"), KernelThreads()
    experts = ExpertFactory(MoEBackend.AUTO, torch.float32, cpu, linears, elementwise, threads)
    return OwnParts(linears, elementwise, experts)


def test_experts_are_ours(models: Models) -> None:
    decoder = serve(models.folder("deepseek-v3-experts"), "bfloat16")._decoder
    assert isinstance(decoder, TransformersDecoder)
    assert Counter(map(type, decoder._model.modules()))[OwnExperts] == 1


def test_product_whose_weight_others_read_stays() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores, self.plain = nn.Linear(4, 8), nn.Linear(4, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total: torch.Tensor = functional.linear(x, self.scores.weight * 2) + self.plain(x)
            return total

    router, x = Router(), torch.ones(3, 4)
    with torch.inference_mode():
        watch_products(router)
        expected = router(x)
        install_parts(router, make_parts())
        torch.testing.assert_close(router(x), expected)
    assert [type(one) for one in router.children()] == [WatchedLinear, OwnLinear]


class _GatedProduct(nn.Module):
    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x).clamp(max=self.limit)
        made: torch.Tensor = self.down_proj(functional.silu(gate) * self.up_proj(x))
        return made


class _Experts:
    limit = 7.0

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate.clamp(max=self.limit)) * up


def test_clamped_activations_stay() -> None:
    kinds = []
    for limit in (7.0, torch.inf):
        parent = nn.Sequential(_GatedProduct(limit))
        watch_products(parent)
        with torch.inference_mode():
            install_parts(parent, make_parts())
        kinds.append(type(parent[0]))
    assert kinds == [_GatedProduct, OwnGatedProduct]
    experts = _Experts()
    assert own_parts._find_activation(experts) is None
    experts.limit = torch.inf
    assert own_parts._find_activation(experts) is Activation.SILU


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda calls: calls[:-1], "more often"),
        (lambda calls: (*calls, calls[-1]), "less often"),
        (lambda calls: (replace(calls[0], num_kv_heads=1), *calls[1:]), "not as at first"),
        (
            lambda calls: (replace(calls[0], heads=replace(calls[0].heads, scale=1.5)), *calls[1:]),
            "not as at first",
        ),
    ],
    ids=["more", "less", "heads", "scale"],
)
def test_calls_that_are_not_those_of_the_layout(change, words: str, phi: Path) -> None:
    runner = serve(phi)
    decoder = runner._decoder
    assert isinstance(decoder, TransformersDecoder)
    decoder._layout = replace(decoder._layout, calls=change(decoder._layout.calls))
    with pytest.raises(ModelCodeError, match=words):
        Sequences(runner, 1, 8).forward({0: [5, 6, 7]})


def test_latents_of_many_sequences_in_groups(models: Models, tokens: list[int]) -> None:
    """Of all at once, unless less was measured; also where the host does not know tokens yet."""
    runner = serve(models.folder("deepseek-v3-experts"))
    running = Sequences(runner, 3, 24)
    decoder = runner._decoder
    assert isinstance(decoder, TransformersDecoder)
    sizes = []
    forward = decoder._forward
    decoder._forward = lambda batch, backends: (  # type: ignore[method-assign]
        sizes.append(int(batch.seq_lens.sum())) or forward(batch, backends)  # type: ignore[func-returns-value]
    )
    got = running.forward({0: tokens[:19], 1: tokens[:3], 2: tokens[:4]})
    runner.run_largest(9, 2, 20)
    assert sizes == [26, 20, 2]
    new = running.batch({0: tokens[19:20], 1: tokens[3:4], 2: tokens[4:5]})
    unknown = new.input_ids.copy()
    unknown[[0, 2]] = -1
    sampled = torch.tensor([tokens[4], 3, tokens[19]])
    pending = PendingIds(np.array([0, 2]), np.array([2, 0]), sampled)
    last = runner.launch(replace(new, input_ids=unknown, pending=pending))
    assert sizes[3:] == [20, 9]
    expected = models.logits("deepseek-v3-experts", tokens[:20])
    wanted = torch.cat([expected[:19], expected[:3], expected[:4], expected[[19, 3, 4]]])
    got = torch.cat([got, last])
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize(
    ("backend", "dtype", "said"),
    [
        (MoEBackend.CPU, "float16", "--moe-backend cpu has no kernels for torch.float16"),
        (MoEBackend.FLASHINFER, "bfloat16", "--moe-backend flashinfer"),
    ],
)
def test_a_way_of_experts_that_there_is_not_is_no_fault_of_the_model(
    backend: MoEBackend, dtype: str, said: str, models: Models, phi: Path
) -> None:
    code, folder = ModelCode.TRANSFORMERS, models.folder("qwen3-experts")
    with pytest.raises(UnsupportedOptionError, match=said):
        ModelRunner(folder, dtype, "cpu", model_code=code, moe_backend=backend)
    ModelRunner(phi, dtype, "cpu", model_code=code, moe_backend=backend)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_in_blocks(softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    query, keys, values = (torch.randn(n, 11, 8, generator=generator) for n in (4, 2, 2))
    call = AttentionCall(QueryHeads(4, 8, 0.3, softcap), 2, 8, 8, False, 5)
    scoring = Scoring(0.3, softcap, torch.randn(4, generator=generator) if softcap else None, 5)
    arguments = (call, query[:, 4:], keys, values, None, torch.arange(11), scoring)
    whole = paged_attention.attend_in_blocks(*arguments)
    asked: list[int] = []
    attend = paged_attention.attend_one
    monkeypatch.setattr(
        paged_attention,
        "attend_one",
        lambda query, *rest: asked.append(query.shape[1]) or attend(query, *rest),  # type: ignore[func-returns-value]
    )
    monkeypatch.setattr(paged_attention, "_SCORE_BYTES", 3 * 4 * 4 * 11)
    torch.testing.assert_close(paged_attention.attend_in_blocks(*arguments), whole)
    assert asked == [3, 3, 1]


@pytest.mark.slow
def test_our_code_does_not_import_transformers(models: Models) -> None:
    """It takes seconds."""
    code = (
        "import sys; from kvrelay.model_runner.runner import ModelRunner;"
        f"ModelRunner({str(models.folder('llama'))!r}, 'float32', 'cpu');"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_largest_step(phi: Path) -> None:
    assert serve(phi).run_largest(9, 2, 30).shape == (11, 131)


def test_options_of_our_code_are_refused(phi: Path) -> None:
    with pytest.raises(UnsupportedOptionError, match="--batch-invariant"):
        ModelRunner(phi, "float32", "cpu", batch_invariant=True)
    with pytest.raises(UnsupportedOptionError, match="--kv-dtype"):
        ModelRunner(phi, "float32", "cpu", kv_dtype=KVDtype.FP8_E4M3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.fc1.bias"), "fc1.bias is missing"),
        (
            lambda tensors: tensors.update({"model.layers.1.mlp.extra.weight": torch.ones(2)}),
            "mlp.extra.weight has no place in this architecture",
        ),
        (
            lambda tensors: tensors.update({"model.layers.1.mlp.fc1.bias": torch.ones(7)}),
            r"fc1.bias has shape \[7\], expected \[96\]",
        ),
    ],
    ids=["missing", "left over", "misshapen"],
)
def test_tensors_that_do_not_fit(change, words: str, phi: Path, tmp_path: Path) -> None:
    _copy(phi, tmp_path, change)
    with pytest.raises(CheckpointError, match=words):
        serve(tmp_path)


def test_tensors_that_transformers_lists_ignore(
    phi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import PhiForCausalLM

    monkeypatch.setattr(PhiForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"\.extra"])
    monkeypatch.setattr(PhiForCausalLM, "_keys_to_ignore_on_load_missing", [r"fc1\.bias"])
    bias = "model.layers.{}.mlp.fc1.bias".format

    def leave(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.extra.weight"] = torch.ones(2)
        for layer in range(3):
            del tensors[bias(layer)]

    _copy(phi, tmp_path, leave)
    with pytest.raises(CheckpointError, match=r"layers.0.mlp.fc1.bias is missing \(and 2 more"):
        serve(tmp_path)
    _copy(tmp_path, tmp_path, lambda tensors: tensors.pop(bias(3)))
    serve(tmp_path)
    assert "model.extra.weight is left out" in caplog.text
    assert f"{bias(0)} is missing, which may be (and 3 more)" in caplog.text


def test_layers_that_draft_tokens_are_left_out(phi: Path, tmp_path: Path) -> None:
    mtp = {"model.layers.4.eh_proj.weight": torch.ones(2, 2)}
    _copy(phi, tmp_path, lambda tensors: tensors.update(mtp))
    assert serve(tmp_path).weights_digest == serve(phi).weights_digest


def test_another_weight_is_another_model(phi: Path, tmp_path: Path) -> None:
    _copy(phi, tmp_path, lambda tensors: tensors["lm_head.bias"][3].add_(0.5))
    assert serve(tmp_path).weights_digest != serve(phi).weights_digest


def test_quantized_weights_are_refused(phi: Path, tmp_path: Path) -> None:
    fields = json.loads((phi / "config.json").read_text())
    quantized = {**fields, "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    with pytest.raises(CheckpointError, match="quantization_config is not supported"):
        serve(tmp_path)


def test_quantized_weights_of_a_nested_configuration_are_refused(tmp_path: Path) -> None:
    fields = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3",
        "text_config": {"quantization_config": {"quant_method": "fp8"}},
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="quantization_config is not supported"):
        serve(tmp_path)


def test_a_model_for_images_is_told_from_an_unknown_name(tmp_path: Path) -> None:
    name = "MiniMaxM3SparseForConditionalGeneration"
    MiniMaxM3VLConfig(architectures=[name]).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=f"{name} .*: it takes more than text, and its"):
        read_transformers_config(tmp_path)


def _copy(source: Path, target: Path, change) -> None:
    (target / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / WEIGHTS)
    change(tensors)
    save_file(tensors, target / WEIGHTS, {"format": "pt"})
