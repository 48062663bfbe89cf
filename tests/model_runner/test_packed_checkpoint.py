"""Weights in few bits are, dequantized, what they were packed of, to the bit."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kvrelay.model_runner.checkpoint.checkpoint import Checkpoint
from kvrelay.model_runner.checkpoint.config_file import ConfigFile
from kvrelay.model_runner.checkpoint.packed_weight import unpack_bits
from kvrelay.model_runner.checkpoint.quantization_reader import read_quantization
from kvrelay.model_runner.config.quantization import PackedWeights
from kvrelay.model_runner.errors import CheckpointError
from kvrelay.model_runner.layers.linear import LinearFactory
from kvrelay.model_runner.layers.loader import WeightLoader
from kvrelay.model_runner.layers.nibble_linear import NibbleLinear
from kvrelay.model_runner.runner import ModelRunner
from tests.model_runner.fp8_models import SINGLE
from tests.model_runner.packed_models import (
    FORMATS,
    Pack,
    Tensors,
    fp8,
    gptq,
    gptq_config,
    ints8,
    mxfp4,
    nvfp4,
    packed_ints,
    write_packed,
)
from tests.model_runner.test_fp8_checkpoint import logits_of
from tests.model_runner.tiny_models import Models

CPU = torch.device("cpu")
SHAPE = (160, 96)


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> None:
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    save_file(tensors, folder / SINGLE)


def opened(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Checkpoint:
    quantization = read_quantization(ConfigFile.read(folder / "config.json"))
    return Checkpoint(folder, 1, dtype, CPU, quantization=quantization, **options)


def packed(folder: Path, form: str, **changes: torch.Tensor | None) -> torch.Tensor:
    """Write the product ``a.b_proj`` and return what it is; `changes` replace its tensors."""
    config, pack = FORMATS[form]
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
    weight[::5].abs_()  # zeros of 0
    tensors, meant = pack(weight)
    assert (meant - weight).abs().max() < 2, "it is near the weight that was packed"
    kept = {name: one for name, one in {**tensors, **changes}.items() if one is not None}
    write(folder, config, {f"a.b_proj.{name}": tensor for name, tensor in kept.items()})
    return meant


@pytest.mark.parametrize("form", FORMATS)
def test_numbers_of_every_format(form: str, tmp_path: Path) -> None:
    meant = packed(tmp_path, form)
    read: list[int] = []
    checkpoint = opened(tmp_path, on_read=read.append)
    assert "a.b_proj.weight" in checkpoint
    assert torch.equal(checkpoint.take("a.b_proj.weight", SHAPE), meant)
    checkpoint.finish()
    data = load_file(tmp_path / SINGLE)
    assert sum(read) == sum(one.nbytes for name, one in data.items() if "bias" not in name
                            and "input" not in name)  # fmt: skip
    rounded = opened(tmp_path, torch.bfloat16)
    twice = rounded.take_stacked({"a.b_proj.weight": SHAPE[0]}, SHAPE[1:])
    assert torch.equal(twice, meant.bfloat16())
    stored, numbers = rounded.packed_sizes()
    assert numbers == meant.numel()
    assert (
        stored
        == numbers
        * {"2": 2, "3": 3, "5": 5, "8": 8, "w8a8": 8}.get(
            form.split("-")[1] if "-" in form else "", 4
        )
        // 8
    )


def test_groups_of_a_product_that_was_not_calibrated(tmp_path: Path) -> None:
    """`actorder` leaves their index as it was made, and groups are neighbours."""
    meant = packed(tmp_path, "ct-4", weight_g_idx=torch.full((96,), -1, dtype=torch.int32))
    assert torch.equal(opened(tmp_path).take("a.b_proj.weight", SHAPE), meant)


def test_one_word_is_a_whole_dimension() -> None:
    words = torch.tensor([[0x76543210, 0x01234567]], dtype=torch.int32)
    numbers = unpack_bits(words.t(), 4, 8)
    assert numbers.tolist() == [list(range(8)), [7, 6, 5, 4, 3, 2, 1, 0]]


def test_a_head_keeps_its_bits(tmp_path: Path) -> None:
    packed(tmp_path, "gptq")
    linears = LinearFactory(cpu_kernels="packed")
    nothing: Any = None
    loader = WeightLoader(nothing, opened(tmp_path, torch.bfloat16), nothing, linears, nothing)
    assert isinstance(loader.head("a.b_proj", SHAPE), NibbleLinear)


def test_blocks_of_all_experts(tmp_path: Path) -> None:
    """gpt-oss stores rows of outputs, and the plain form of its weights has rows of inputs."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 10, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 131, (3, 10, 2), generator=generator, dtype=torch.uint8)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    plain = {f"{name}_bias": torch.ones(3, 10)}
    write(tmp_path, config, {f"{name}_blocks": blocks, f"{name}_scales": scales, **plain})
    checkpoint = opened(tmp_path)
    got = checkpoint.take(name, (3, 64, 10))
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(got, expected)
    assert torch.equal(checkpoint.take(f"{name}_bias", (3, 10)), torch.ones(3, 10))
    checkpoint.finish()
    assert checkpoint.packed_sizes() == (3 * 10 * 32, 3 * 10 * 64)


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("gptq", {"qweight": torch.zeros(11, 160, dtype=torch.int32)}, "has shape [11, 160], exp"),
        ("gptq", {"scales": torch.ones(160)}, "scales has shape [160, 1], expected [160, 160]"),
        ("gptq", {"g_idx": torch.full((96,), 3)}, "g_idx names others than 3 groups"),
        ("gptq", {"g_idx": torch.full((96,), -1)}, "g_idx names others than 3 groups"),
        ("gptq", {"g_idx": torch.ones(96)}, "g_idx is torch.float32, not torch.int32 or"),
        ("gptq", {"qweight": None}, "tensor a.b_proj.weight is missing"),
        ("gptq", {"qzeros": None}, "tensor a.b_proj.qzeros is missing"),
        ("gptq", {"bias": torch.ones(160)}, "a.b_proj.bias has no place"),
        ("ct-4", {"weight_shape": torch.tensor([160, 90])}, "weight_shape is not [160, 96]"),
        ("ct-4", {"weight_scale": torch.ones(150, 3)}, "weight_scale is not of 160 outputs"),
        ("ct-w8a8", {"weight": torch.ones(SHAPE)}, "weight is torch.float32, not torch.int8"),
        ("modelopt", {"pre_quant_scale": torch.ones(96)}, "pre_quant_scale has no place"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    form: str, changes: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    packed(tmp_path, form, **changes)
    checkpoint = opened(tmp_path)

    def load() -> None:
        checkpoint.take("a.b_proj.weight", SHAPE)
        checkpoint.finish()

    with pytest.raises(CheckpointError) as refusal:
        load()
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_three_bits_that_gptqmodel_stored_are_refused_unless_they_are_symmetric(
    tmp_path: Path,
) -> None:
    meta = {"quantizer": ["gptqmodel:4.0"]}
    packed(tmp_path, "gptq-3")
    config = {"quantization_config": gptq_config(3, meta=meta)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="bits of 3 without sym is not supported"):
        opened(tmp_path)


def test_the_digest_knows_what_was_stored(tmp_path: Path) -> None:
    """Every tensor and the format: the same bytes with other zeros are another model."""

    def digest(config: dict[str, Any] | None = None, **changes: torch.Tensor) -> str:
        packed(tmp_path, "gptq", **changes)
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
        checkpoint = opened(tmp_path)
        checkpoint.take("a.b_proj.weight", SHAPE)
        return checkpoint.digest

    first = digest()
    assert digest() == first
    scales = torch.ones(3, 160, dtype=torch.float16)
    v2 = gptq_config(4, checkpoint_format="gptq_v2")
    save_file({"a.b_proj.weight": packed(tmp_path, "gptq")}, tmp_path / SINGLE)
    plain = opened(tmp_path)
    plain.take("a.b_proj.weight", SHAPE)
    assert len({first, digest(scales=scales), digest(v2), plain.digest}) == 4


def _mixed(product: str) -> Pack | None:
    """Projections of queries, keys and values differ, which are one product in memory."""
    if product.endswith("layers.1.self_attn.k_proj"):
        return fp8
    if product.endswith("down_proj"):
        return None
    return packed_ints(4) if ".mlp." in product else ints8(False)


_MIXED = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "ignore": ["lm_head", "re:.*down_proj"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "format": "int-quantized",
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "int", "strategy": "token"},
        },
        "group_1": {
            "targets": ["re:.*mlp.*"],
            "format": "pack-quantized",
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
        },
        "group_2": {
            "targets": ["model.layers.1.self_attn.k_proj"],
            "format": "float-quantized",
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "float", "dynamic": True},
        },
    },
}


def _by_layer(product: str) -> Pack:
    return gptq(8, ordered=True) if ".layers.1." in product else gptq(4)


def _modelopt(product: str) -> Pack | None:
    return nvfp4(True) if ".mlp." in product else None


@pytest.mark.parametrize(
    ("name", "config", "pack"),
    [
        ("llama", _MIXED, _mixed),
        ("llama", gptq_config(4, dynamic={r"+:.*\.layers\.1\.": {"bits": 8}}), _by_layer),
        ("deepseek-v3-experts", FORMATS["ct-8-channel"][0], lambda _: packed_ints(8, channel=True)),
        (
            "llama-biased",
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {
                    f"model.layers.{layer}.mlp.{name}_proj": {"quant_algo": "NVFP4"}
                    for layer in range(2)
                    for name in ("gate", "up", "down")
                },
            },
            _modelopt,
        ),
    ],
    ids=["compressed", "gptq", "experts", "modelopt"],
)
def test_a_model_is_that_of_the_dequantized_weights(
    name: str, config: dict[str, Any], pack: Any, models: Models, tokens: list[int], tmp_path: Path
) -> None:
    quantized, plain = write_packed(models.folder(name), config, pack, tmp_path)
    got, expected = (logits_of(folder, "float32", tokens) for folder in (quantized, plain))
    assert torch.equal(got, expected)
    assert not torch.equal(got, logits_of(models.folder(name), "float32", tokens))


def test_modelopt_s_own_file(
    models: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Older checkpoints describe their weights beside config.json."""
    config = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None}
    quantized, _ = write_packed(models.folder("llama"), {}, _modelopt, tmp_path)
    before = json.loads((models.folder("llama") / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(before))
    with pytest.raises(CheckpointError, match="uint8, not floating point"):
        ModelRunner(quantized, "float32", "cpu")
    (quantized / "hf_quant_config.json").write_text(json.dumps({"quantization": config}))
    with caplog.at_level(logging.INFO):
        ModelRunner(quantized, "float32", "cpu")
    assert "weights in few bits, 0.0 MiB, take 0.1 MiB where they become float32" in caplog.text


def test_gpt_oss_s_experts_in_blocks(models: Models, tokens: list[int], tmp_path: Path) -> None:
    """Its checkpoints have all experts of a layer in one tensor, and gates beside factors."""
    source = models.folder("gpt-oss-experts")
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    quantized, plain = write_packed(source, config, lambda _: None, tmp_path)
    stored = load_file(source / SINGLE)
    meant = dict(stored)
    for name in [one for one in stored if one.endswith(("gate_up_proj", "down_proj"))]:
        parts = [mxfp4(expert.T) for expert in stored.pop(name)]
        blocks = torch.stack([tensors["weight_packed"] for tensors, _ in parts])
        stored[f"{name}_blocks"] = blocks.view(*blocks.shape[:2], -1, 16)
        stored[f"{name}_scales"] = torch.stack([tensors["weight_scale"] for tensors, _ in parts])
        meant[name] = torch.stack([weight.T for _, weight in parts])
    save_file(stored, quantized / SINGLE)
    save_file(meant, plain / SINGLE)
    got, expected = (logits_of(folder, "float32", tokens) for folder in (quantized, plain))
    assert torch.equal(got, expected)
    assert not torch.equal(got, logits_of(source, "float32", tokens))


def test_a_product_is_named_as_it_is_stored(tmp_path: Path) -> None:
    """In a model for images its name begins otherwise, and patterns know that name."""
    config, pack = FORMATS["gptq-8-ordered"]
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
    tensors, meant = pack(weight)
    stored = {f"language_model.model.x.b_proj.{name}": one for name, one in tensors.items()}
    write(tmp_path, {**config, "bits": 4, "dynamic": {"+:language_model.*": {"bits": 8}}}, stored)
    assert torch.equal(opened(tmp_path).take("model.x.b_proj.weight", SHAPE), meant)


def test_names_count_before_patterns_and_patterns_in_the_order_of_their_texts(
    tmp_path: Path,
) -> None:
    """As in compressed-tensors, whatever group comes first."""
    targets = ["re:.*b_proj", "Linear", "re:.*a.*", "x.a.b_proj"]
    groups = {
        f"group_{bits}": {
            "targets": [target],
            "weights": {"num_bits": bits, "type": "int", "strategy": "channel"},
        }
        for bits, target in enumerate(targets, 1)
    }
    write(tmp_path, {**_MIXED, "format": "pack-quantized", "config_groups": groups}, {})
    checkpoint = opened(tmp_path)

    def bits(product: str) -> int:
        scheme = checkpoint.scheme_of(product)
        assert isinstance(scheme, PackedWeights)
        return scheme.bits

    products = ("x.a.b_proj", "y.a.b_proj", "y.b_proj", "y.q", "x.a.b_proj.z")
    assert list(map(bits, products)) == [4, 3, 1, 2, 3]
    assert bits("y.b_proj") == 1


def test_a_name_is_found_among_very_many(tmp_path: Path) -> None:
    """A large model's file may name each product of each expert."""
    names = [f"model.layers.{index}.down_proj" for index in range(1000)]
    layers = {name: {"quant_algo": "NVFP4"} for name in names}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    write(tmp_path, {**config, "quantized_layers": layers}, {})
    checkpoint = opened(tmp_path)
    began = time.process_time()
    assert all(map(checkpoint.scheme_of, names))
    assert checkpoint.scheme_of("model.layers.0.down_proj.x") is None
    assert time.process_time() - began < 5, "each one by one takes a minute"
