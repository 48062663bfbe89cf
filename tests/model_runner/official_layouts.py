"""Tiny checkpoints with the tensor names, and the configuration, that models are published with."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.model_runner.fp8_models import FORMATS, write_fp8
from tests.model_runner.tiny_models import Models

SINGLE = "model.safetensors"
Tensors = dict[str, torch.Tensor]


def rewrite(
    source: Path,
    folder: Path,
    config: Callable[[dict[str, Any]], dict[str, Any]],
    tensors: Callable[[Tensors], Tensors],
) -> Path:
    """The checkpoint `source` with another config.json and other names."""
    shutil.copytree(source, folder)
    save_file(tensors(load_file(source / SINGLE)), folder / SINGLE)
    before = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config(before)))
    return folder


def deepseek_v3(models: Models, folder: Path) -> tuple[Path, Path]:
    """DeepSeek-V3: FP8 blocks, and a layer behind the last that predicts a second token.

    The second folder has the weights that the first one means, by transformers' names.
    """
    quantized, plain = write_fp8(models.folder("deepseek-v3-experts"), FORMATS["fp8-block"], folder)

    def config(before: dict[str, Any]) -> dict[str, Any]:
        return {**before, "model_type": "deepseek_v3", "num_nextn_predict_layers": 1}

    return rewrite(quantized, folder / "published", config, add_mtp_layer), plain


def add_mtp_layer(tensors: Tensors) -> Tensors:
    layers = {
        int(found[1]) for name in tensors if (found := re.match(r"model\.layers\.(\d+)", name))
    }
    last, behind = f"model.layers.{max(layers)}.", f"model.layers.{max(layers) + 1}."
    hidden = tensors["model.norm.weight"]
    copied = {
        behind + name.removeprefix(last): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    own = {
        "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        "enorm.weight": hidden.clone(),
        "hnorm.weight": hidden.clone(),
        "eh_proj.weight": torch.randn(len(hidden), 2 * len(hidden)),
        "shared_head.norm.weight": hidden.clone(),
        "shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    return {**tensors, **copied, **{behind + name: tensor for name, tensor in own.items()}}


def kimi_k2(models: Models, folder: Path) -> Path:
    """Kimi K2: DeepSeek-V3's code, by a `model_type` of its own, with code beside the weights."""

    def config(before: dict[str, Any]) -> dict[str, Any]:
        code = {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
        added = {"model_type": "kimi_k2", "num_nextn_predict_layers": 0, "auto_map": code}
        choice = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
        return {**before, **added, **choice}

    return rewrite(models.folder("kimi-k2"), folder / "published", config, dict)


def gpt_oss(models: Models, folder: Path) -> tuple[Path, Path]:
    """gpt-oss: experts in blocks of MXFP4, all others not.

    The second folder has the weights that the first one means, by transformers' names.
    """
    generator = torch.Generator().manual_seed(5)
    blocks: Tensors = {}

    def pack(tensors: Tensors) -> Tensors:
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, inputs, outputs = tensors.pop(name).shape
            shape = (experts, outputs, inputs // 32)
            blocks[f"{name}_blocks"] = torch.randint(
                256, (*shape, 16), generator=generator, dtype=torch.uint8
            )
            blocks[f"{name}_scales"] = torch.randint(
                123, 126, shape, generator=generator, dtype=torch.uint8
            )
        return {**tensors, **blocks}

    def config(before: dict[str, Any]) -> dict[str, Any]:
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
        quantization = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
        return {**before, "quantization_config": quantization}

    def unpack(tensors: Tensors) -> Tensors:
        names = [name.removesuffix("_blocks") for name in blocks if name.endswith("_blocks")]
        for name in names:
            parts = (blocks[f"{name}_{part}"] for part in ("blocks", "scales"))
            tensors[name] = convert_moe_packed_tensors(*parts, dtype=torch.float32).contiguous()
        return tensors

    source = models.folder("gpt-oss-experts")
    published = rewrite(source, folder / "published", config, pack)
    return published, rewrite(source, folder / "plain", dict, unpack)


def gemma3(models: Models, folder: Path) -> Path:
    """Gemma 3 4B: a model for images, whose `text_config` names few of its fields."""
    shown = ("hidden_size", "intermediate_size", "num_hidden_layers", "sliding_window")

    def config(before: dict[str, Any]) -> dict[str, Any]:
        rest = {name: before[name] for name in (*shown, "vocab_size", "head_dim")}
        return {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "eos_token_id": [1, 7],
            "text_config": {
                **rest,
                "model_type": "gemma3_text",
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            },
            "vision_config": {"model_type": "siglip_vision_model"},
        }

    return rewrite(models.folder("gemma3-4b"), folder / "published", config, wrap)


def mistral_small_3(models: Models, folder: Path) -> Path:
    """Mistral Small 3.1: Mistral's decoder in a model for images, with a head of its own."""
    left_out = ("architectures", "eos_token_id", "bos_token_id", "transformers_version")

    def config(before: dict[str, Any]) -> dict[str, Any]:
        text = {name: value for name, value in before.items() if name not in left_out}
        theta = text.pop("rope_parameters")["rope_theta"]
        return {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "model_type": "mistral3",
            "text_config": {**text, "rope_theta": theta},
            "vision_config": {"model_type": "pixtral"},
        }

    return rewrite(models.folder("mistral"), folder / "published", config, wrap)


def qwen2_5_vl(models: Models, folder: Path) -> Path:
    """Qwen2.5-VL: the decoder's fields stand beside `vision_config`, not in a section."""

    def config(before: dict[str, Any]) -> dict[str, Any]:
        text = before.pop("text_config")
        mrope = {"type": "mrope", "mrope_section": text.pop("rope_parameters")["mrope_section"]}
        flat = {**text, **before, "rope_scaling": mrope, "rope_theta": 10000.0}
        return {**flat, "architectures": ["Qwen2_5_VLForConditionalGeneration"]}

    return rewrite(models.folder("qwen2.5-vl"), folder / "flat", config, dict)


def qwen2_5_vl_saved_before_transformers_5(models: Models, folder: Path) -> Path:
    """Qwen2.5-VL: the section names the whole model as its architecture."""

    def config(before: dict[str, Any]) -> dict[str, Any]:
        named = {"architectures": before["architectures"], "model_type": "qwen2_5_vl_text"}
        return {**before, "text_config": {**before["text_config"], **named}}

    return rewrite(models.folder("qwen2.5-vl"), folder / "nested", config, dict)


def wrap(tensors: Tensors) -> Tensors:
    """The names of a decoder in a model for images, beside a tower and a projector."""
    towers = {
        "vision_tower.vision_model.encoder.layers.0.layer_norm1.weight": torch.ones(4),
        "vision_tower.vision_model.post_layernorm.weight": torch.ones(4),
        "multi_modal_projector.linear_1.weight": torch.ones(4, 4),
    }
    return {**{f"language_model.{name}": one for name, one in tensors.items()}, **towers}
