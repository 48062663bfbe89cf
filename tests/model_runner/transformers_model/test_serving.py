"""Models of transformers' code in the options, types and files that they are served with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from kvrelay.cpu_kernels.kernel_threads import KernelThreads
from kvrelay.model_runner.attention.kv_dtype import KVDtype
from kvrelay.model_runner.config.model_code import ModelCode
from kvrelay.model_runner.config.moe_backend import MoEBackend
from kvrelay.model_runner.errors import (
    CheckpointError,
    UnknownArchitectureError,
    UnsupportedOptionError,
)
from kvrelay.model_runner.layers.elementwise import TorchElementwise
from kvrelay.model_runner.layers.experts.expert_factory import ExpertFactory
from kvrelay.model_runner.layers.linear import LinearFactory
from kvrelay.model_runner.runner import ModelRunner
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
from kvrelay.model_runner.transformers_model.transformers_decoder import TransformersDecoder
from tests.model_runner.sequences import Sequences
from tests.model_runner.tiny_models import Models
from tests.model_runner.transformers_model.kinds import save_small, serve

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
    with pytest.raises(UnknownArchitectureError):
        ModelRunner(phi, "float32", "cpu", model_code=ModelCode.NATIVE)


def test_other_code_is_another_model(models: Models) -> None:
    ours = ModelRunner(models.folder("llama"), "float32", "cpu")
    theirs = serve(models.folder("llama"))
    assert theirs.arithmetic == f"transformers {_version()}, {ours.arithmetic}"
    assert theirs.config_digest != ours.config_digest
    assert theirs.weights_digest == serve(models.folder("llama")).weights_digest


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


def _copy(source: Path, target: Path, change) -> None:
    (target / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / WEIGHTS)
    change(tensors)
    save_file(tensors, target / WEIGHTS, {"format": "pt"})
