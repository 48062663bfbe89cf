"""Checkpoints in FP8, written of others as the tools of each format write them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
INPUT_SCALE = 0.05
SINGLE = "model.safetensors"
Quantize = Callable[[torch.Tensor], torch.Tensor]


def of_tensor(weight: torch.Tensor) -> torch.Tensor:
    return (weight.abs().max() / LARGEST).view(1)


def of_channels(weight: torch.Tensor) -> torch.Tensor:
    return weight.abs().amax(1, keepdim=True) / LARGEST


def of_blocks(weight: torch.Tensor) -> torch.Tensor:
    rows, columns = (-(-size // 128) for size in weight.shape)
    padded = functional.pad(
        weight, (0, columns * 128 - weight.shape[1], 0, rows * 128 - weight.shape[0])
    )
    return padded.view(rows, 128, columns, 128).abs().amax((1, 3)) / LARGEST


def spread(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The scale of each weight."""
    if scales.dim() == 1:
        return scales.expand(shape)
    if scales.shape == (shape[0], 1):
        return scales.expand(shape)
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return wide[: shape[0], : shape[1]]


@dataclass(frozen=True)
class Format:
    """One way to write a checkpoint."""

    config: dict[str, Any]
    """`quantization_config`"""
    scales: Callable[[torch.Tensor], torch.Tensor]
    """Those of a weight ``[out, in]``."""
    scale_name: str = "weight_scale"
    static: bool = False
    kv_names: dict[str, float] = field(default_factory=dict)
    """Scales of keys and values, by the names below ``self_attn``."""


def compressed(
    strategy: str, inputs: dict[str, Any], weights: dict[str, Any] | None = None, **others: Any
) -> dict[str, Any]:
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**number, "strategy": strategy, "dynamic": False, **(weights or {})},
        "input_activations": {**number, **inputs},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
        **others,
    }


_BY_TOKEN = {"strategy": "token", "dynamic": True}
_STATIC = {"strategy": "tensor", "dynamic": False}
KV_SCHEME = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor",
    "dynamic": False,
}
FORMATS = {
    "fp8-tensor": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]},
        lambda weight: of_tensor(weight).view(()),
    ),
    "fp8-static": Format(
        {"quant_method": "fp8", "activation_scheme": "static"},
        of_tensor,
        static=True,
        kv_names={"kv_scale": 0.5},
    ),
    "fp8-block": Format(
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
        },
        of_blocks,
        "weight_scale_inv",
    ),
    "compressed-tensor": Format(
        compressed("tensor", _STATIC, kv_cache_scheme=KV_SCHEME),
        of_tensor,
        static=True,
        kv_names={"k_scale": 0.25, "v_scale": 0.125},
    ),
    "compressed-channel": Format(compressed("channel", _BY_TOKEN), of_channels),
    "compressed-block": Format(
        compressed(
            "block",
            {"strategy": "group", "group_size": 128, "dynamic": True},
            {"block_structure": [128, 128]},
        ),
        of_blocks,
    ),
}


def write_fp8(source: Path, form: Format, folder: Path) -> tuple[Path, Path]:
    """The checkpoint `source` in FP8, and the one of what its weights then are, both in `folder`.

    Products of layers are quantized; embeddings, norms, routers and the head are not.
    """
    quantized, plain = folder / "fp8", folder / "plain"
    for target in (quantized, plain):
        shutil.copytree(source, target)
    stored: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, weight in load_file(source / SINGLE).items():
        if not name.endswith("weight") or "_proj" not in name:
            stored[name] = meant[name] = weight
            continue
        scales = form.scales(weight)
        each = spread(scales.view(1) if scales.dim() == 0 else scales, weight.shape)
        stored[name] = (weight / each).to(FP8)
        stored[f"{name.removesuffix('weight')}{form.scale_name}"] = scales
        meant[name] = stored[name].to(torch.float32) * each
        if form.static:
            stored[f"{name.removesuffix('weight')}input_scale"] = torch.tensor(INPUT_SCALE)
        if name.endswith("o_proj.weight"):
            attention = name.removesuffix("o_proj.weight")
            stored |= {f"{attention}{kind}": torch.tensor(s) for kind, s in form.kv_names.items()}
    save_file(stored, quantized / SINGLE)
    save_file({name: weight.contiguous() for name, weight in meant.items()}, plain / SINGLE)
    config = json.loads((source / "config.json").read_text())
    (quantized / "config.json").write_text(
        json.dumps({**config, "quantization_config": form.config})
    )
    return quantized, plain
