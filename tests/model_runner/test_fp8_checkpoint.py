"""Weights in FP8: on a CPU a model is that of the dequantized weights, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvrelay.model_runner.checkpoint.config_reader import read_config
from kvrelay.model_runner.config.fp8_weights import Fp8Weights, ScaleShape
from kvrelay.model_runner.config.quantization import Quantization
from kvrelay.model_runner.errors import CheckpointError
from kvrelay.model_runner.runner import ModelRunner
from tests.model_runner.fp8_models import FORMATS, SINGLE, compressed, write_fp8
from tests.model_runner.sequences import Sequences
from tests.model_runner.tiny_models import Models
from tests.pairwise import few

WEIGHT = "model.layers.1.mlp.down_proj.weight"


def logits_of(folder: Path, dtype: str, tokens: list[int]) -> torch.Tensor:
    running = Sequences(ModelRunner(folder, dtype, "cpu"), 1, 40)
    parts = [running.forward({0: tokens[:20]})]
    parts += [running.forward({0: [token]}) for token in tokens[20:24]]
    return torch.cat(parts)


@few(8)
@pytest.mark.parametrize(
    ("name", "form", "dtype"),
    [
        *(("llama-biased", form, "float32") for form in FORMATS),
        *(("deepseek-v3-experts", form, "float32") for form in FORMATS),
        *(("llama-wide", form, "bfloat16") for form in FORMATS),
        *(("deepseek-wide", form, "float32") for form in ("fp8-block", "fp8-static")),
    ],
)
def test_logits_are_those_of_the_dequantized_weights(
    name: str, form: str, dtype: str, models: Models, tokens: list[int], tmp_path: Path
) -> None:
    quantized, plain = write_fp8(models.folder(name), FORMATS[form], tmp_path)
    got, expected = (logits_of(folder, dtype, tokens) for folder in (quantized, plain))
    assert torch.equal(got, expected)
    # And rounding to FP8 was felt, so the test is not of nothing.
    assert not torch.equal(got, logits_of(models.folder(name), dtype, tokens))


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("fp8-tensor", Fp8Weights(ScaleShape.TENSOR)),
        ("fp8-static", Fp8Weights(ScaleShape.TENSOR, static_inputs=True)),
        ("fp8-block", Fp8Weights(ScaleShape.BLOCK)),
        ("compressed-tensor", Fp8Weights(ScaleShape.TENSOR, static_inputs=True)),
        ("compressed-channel", Fp8Weights(ScaleShape.CHANNEL)),
        ("compressed-block", Fp8Weights(ScaleShape.BLOCK)),
    ],
)
def test_what_config_json_says(
    form: str, expected: Fp8Weights, models: Models, tmp_path: Path
) -> None:
    quantized, plain = write_fp8(models.folder("llama"), FORMATS[form], tmp_path)
    assert read_config(quantized).quantization == Quantization(expected)
    assert read_config(plain).quantization is None


STEM = WEIGHT.removesuffix("weight")


def rewrite(folder: Path, stem: str = STEM, /, **changes: torch.Tensor | None) -> None:
    """Replace or (with None) remove tensors, by what follows `stem` in their names."""
    tensors = {**load_file(folder / SINGLE), **{f"{stem}{k}": v for k, v in changes.items()}}
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / SINGLE)


def test_the_digest_knows_scales(models: Models, tmp_path: Path) -> None:
    """Which are part of the weights; and FP8 is another model than its weights in bfloat16."""
    quantized, plain = write_fp8(models.folder("llama"), FORMATS["fp8-tensor"], tmp_path)
    before = ModelRunner(quantized, "bfloat16", "cpu").weights_digest
    assert before == ModelRunner(quantized, "bfloat16", "cpu").weights_digest
    assert before != ModelRunner(plain, "bfloat16", "cpu").weights_digest
    scale = load_file(quantized / SINGLE)[WEIGHT.replace("weight", "weight_scale")]
    rewrite(quantized, weight_scale=scale * 1.001)
    assert before != ModelRunner(quantized, "bfloat16", "cpu").weights_digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_scale": None}, "is torch.float8_e4m3fn without a known scale"),
        ({"weight_scale": torch.ones(2)}, "weight_scale has shape [2], expected [1, 1]"),
        ({"weight": torch.ones(64, 96)}, "has a scale, but is torch.float32"),
        ({"weight": torch.ones(64, 96).to(torch.float8_e5m2)}, "float8_e5m2 without a known"),
        ({"weight": torch.ones(64, 95).to(torch.float8_e4m3fn)}, "has shape [64, 95]"),
        ({"input_scale": torch.ones(1)}, "input_scale has no place in this architecture"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    changes: dict[str, torch.Tensor | None], message: str, models: Models, tmp_path: Path
) -> None:
    quantized, _ = write_fp8(models.folder("llama"), FORMATS["fp8-tensor"], tmp_path)
    rewrite(quantized, **changes)
    assert_refused(quantized, message)


def test_missing_input_scale(models: Models, tmp_path: Path) -> None:
    quantized, _ = write_fp8(models.folder("llama"), FORMATS["fp8-static"], tmp_path)
    rewrite(quantized, input_scale=None)
    assert_refused(quantized, "down_proj.input_scale is missing")


def test_float8_without_a_configuration(models: Models, tmp_path: Path) -> None:
    """It would be read as numbers 448 times too large, and more."""
    quantized, plain = write_fp8(models.folder("llama"), FORMATS["fp8-tensor"], tmp_path)
    (quantized / "config.json").write_text((plain / "config.json").read_text())
    assert_refused(quantized, "without a known scale")


def assert_refused(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        ModelRunner(folder, "float32", "cpu")
    assert "\n" not in str(refusal.value)
    assert message in str(refusal.value)


DYNAMIC = {"strategy": "token", "dynamic": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"bits": 4}, "quantization_config.quant_method is missing"),
        ({"quant_method": "hqq", "bits": 4}, "quantization_config.quant_method of 'hqq'"),
        ({"quant_method": "gptq", "bits": 5}, "quantization_config.bits of 5"),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down": {"bits": 6}}},
            "quantization_config.dynamic.+:.*down.bits of 6",
        ),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"(": {}}}, "quantization_config.dynamic"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "quantization_config.checkpoint_format of 'marlin'",
        ),
        (
            {"quant_method": "awq", "bits": 4, "version": "gemv"},
            "quantization_config.version of 'gemv'",
        ),
        ({"quant_method": "modelopt"}, "quantization_config.quant_algo is missing"),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
            "quantization_config.quant_algo of 'W4A8_AWQ'",
        ),
        ({**FP8, "fmt": "e5m2"}, "quantization_config.fmt of 'e5m2'"),
        ({**FP8, "activation_scheme": "none"}, "quantization_config.activation_scheme of 'none'"),
        (
            {**FP8, "weight_block_size": [64, 128]},
            "quantization_config.weight_block_size of [64, 128]",
        ),
        (
            {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [128, 128]},
            "quantization_config.activation_scheme of 'static'",
        ),
        (
            compressed("channel", DYNAMIC, format="marlin-24"),
            "quantization_config.format of 'marlin-24'",
        ),
        (
            compressed("channel", DYNAMIC, format="pack-quantized"),
            "quantization_config.config_groups.group_0.weights.type of 'float'",
        ),
        (compressed("channel", DYNAMIC, config_groups={}), "quantization_config.config_groups"),
        (
            compressed("channel", DYNAMIC, sparsity_config={"format": "sparse-24-bitmask"}),
            "quantization_config.sparsity_config.format of 'sparse-24-bitmask'",
        ),
        (
            compressed("channel", DYNAMIC, transform_config={"config_groups": {"u": {}}}),
            "quantization_config.transform_config",
        ),
        (
            compressed("channel", DYNAMIC, {"num_bits": 4}),
            "quantization_config.config_groups.group_0.weights.num_bits of 4",
        ),
        (
            compressed("channel", DYNAMIC, {"type": "int"}),
            "quantization_config.config_groups.group_0.weights.type of 'int'",
        ),
        (
            compressed("channel", DYNAMIC, {"symmetric": False}),
            "quantization_config.config_groups.group_0.weights.symmetric",
        ),
        (
            compressed("group", DYNAMIC),
            "quantization_config.config_groups.group_0.weights.strategy of 'group'",
        ),
        (
            compressed("block", DYNAMIC, {"block_structure": [64, 64]}),
            "quantization_config.config_groups.group_0.weights.block_structure of [64, 64]",
        ),
        (
            compressed("channel", {"type": "int", "dynamic": True}),
            "quantization_config.config_groups.group_0.input_activations.type of 'int'",
        ),
        (
            compressed("channel", DYNAMIC, kv_cache_scheme={"num_bits": 8, "type": "int"}),
            "quantization_config.kv_cache_scheme.type of 'int'",
        ),
    ],
)
def test_other_quantization_is_refused_by_the_field_s_name(
    config: dict[str, Any], field: str, models: Models, tmp_path: Path
) -> None:
    plain = json.loads((models.folder("llama") / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**plain, "quantization_config": config}))
    with pytest.raises(CheckpointError) as refusal:
        read_config(tmp_path)
    assert str(refusal.value).startswith(f"{path}: {field}")
    assert "\n" not in str(refusal.value)


def test_weights_alone_in_fp8_are_refused(models: Models, tmp_path: Path) -> None:
    config = compressed("channel", DYNAMIC)
    config["config_groups"]["group_0"]["input_activations"] = None
    plain = json.loads((models.folder("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**plain, "quantization_config": config}))
    with pytest.raises(CheckpointError, match=r"group_0\.input_activations is null"):
        read_config(tmp_path)
