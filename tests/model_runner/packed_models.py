"""Weights in few bits, packed as plainly as can be, and checkpoints of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.model_runner.fp8_models import SINGLE, of_channels

Tensors = dict[str, torch.Tensor]
Pack = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""Packs a weight: tensors by what follows the product's name, and the weight that they mean."""
GROUP = 32
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def pack_bits(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of numbers, each row one long number in words of 32 bits."""
    words = -(-numbers.shape[1] * bits // 32)
    rows = []
    for row in numbers.tolist():
        whole = sum(number << (place * bits) for place, number in enumerate(row))
        rows.append([whole >> (32 * word) & 0xFFFFFFFF for word in range(words)])
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


@dataclass(frozen=True)
class Ints:
    """A weight ``[out, in]`` as integers from 0 to ``2 ** bits - 1``."""

    numbers: torch.Tensor
    scales: torch.Tensor
    """``[out, groups]``"""
    zeros: torch.Tensor
    """``[out, groups]``"""
    groups: torch.Tensor
    """``[in]``"""

    @property
    def meant(self) -> torch.Tensor:
        """The weight in float32."""
        each = (self.numbers - self.zeros[:, self.groups]).float()
        return each * self.scales[:, self.groups].float()


def quantize(
    weight: torch.Tensor,
    bits: int,
    *,
    group: int = GROUP,
    symmetric: bool = False,
    ordered: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Ints:
    """The nearest integers; `ordered`: inputs belong to groups in no order."""
    inputs = weight.shape[1]
    groups = torch.arange(inputs) // group
    if ordered:
        groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(1))]
    count, largest = inputs // group, 2**bits - 1
    low, high = (
        torch.stack([getattr(weight[:, groups == one], end)(1) for one in range(count)], 1)
        for end in ("amin", "amax")
    )
    scales = ((high - low) / largest).to(dtype)
    zeros = (-low / scales.float()).round().clamp(0, largest).long()
    if symmetric:
        scales = (torch.maximum(high, -low) / (largest / 2)).to(dtype)
        zeros = torch.full_like(zeros, 2 ** (bits - 1))
    each = weight / scales.float()[:, groups]
    numbers = (each + zeros[:, groups]).round().clamp(0, largest).long()
    return Ints(numbers, scales, zeros, groups)


def gptq(bits: int, v2: bool = False, **options: Any) -> Pack:
    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        ints = quantize(weight, bits, **options)
        zeros = pack_bits(ints.zeros.t(), bits)
        if not v2 and 32 % bits:
            zeros = pack_bits((ints.zeros.t() - 1) & (2**bits - 1), bits)
        elif not v2:
            zeros -= sum(1 << place for place in range(0, 32, bits))  # a whole word at once
        stored = {
            "qweight": pack_bits(ints.numbers, bits).t().contiguous(),
            "qzeros": zeros,
            "scales": ints.scales.t().contiguous(),
            "g_idx": ints.groups.int(),
            "bias": torch.zeros(len(weight)),
        }
        return stored, ints.meant

    return pack


def awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    ints = quantize(weight, 4)

    def pack(numbers: torch.Tensor) -> torch.Tensor:
        """Rows of outputs: of each eight first 0, 2, 4, 6, then 1, 3, 5, 7."""
        eights = numbers.unflatten(1, (-1, 8))[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        return pack_bits(eights.flatten(1), 4)

    stored = {"qweight": pack(ints.numbers.t()), "qzeros": pack(ints.zeros.t())}
    return {**stored, "scales": ints.scales.t().contiguous()}, ints.meant


def packed_ints(
    bits: int, *, asymmetric: bool = False, channel: bool = False, **options: Any
) -> Pack:
    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        group = weight.shape[1] if channel else GROUP
        ints = quantize(
            weight, bits, group=group, symmetric=not asymmetric, dtype=torch.bfloat16, **options
        )
        stored = {
            "weight_packed": pack_bits(ints.numbers, bits),
            "weight_scale": ints.scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if asymmetric:
            stored["weight_zero_point"] = pack_bits(ints.zeros.t(), bits).t().contiguous()
        if options.get("ordered"):
            stored["weight_g_idx"] = ints.groups.int()
        return stored, ints.meant

    return pack


def ints8(asymmetric: bool) -> Pack:
    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        ints = quantize(weight, 8, group=weight.shape[1], symmetric=not asymmetric)
        stored = {"weight": (ints.numbers - 128).to(torch.int8), "weight_scale": ints.scales}
        if asymmetric:
            stored["weight_zero_point"] = (ints.zeros - 128).to(torch.int8)
        return stored, ints.meant

    return pack


def fp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = of_channels(weight)
    values = (weight / scales).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scales}, values.float() * scales


def fp4(
    weight: torch.Tensor, scales: torch.Tensor, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of two numbers, the first one low, and the numbers times their groups' `scales`."""
    numbers = torch.tensor([*FP4, *(-number for number in FP4)])
    each = scales.repeat_interleave(group, 1)
    codes = ((weight / each)[..., None] - numbers).abs().argmin(-1).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, numbers[codes.int()] * each


def nvfp4(modelopt: bool) -> Pack:
    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        largest = weight.abs().unflatten(1, (-1, 16)).amax(-1) / 6
        factor = largest.max() / 448
        scales = (largest / factor).to(torch.float8_e4m3fn)
        inverse = 1 / factor
        # Each divides or multiplies as its tool does.
        each = scales.float() * factor if modelopt else scales.float() / inverse
        octets, meant = fp4(weight, each, 16)
        if modelopt:
            names = {"weight": octets, "weight_scale_2": factor, "input_scale": torch.ones(())}
        else:
            names = {"weight_packed": octets, "weight_global_scale": inverse.view(1)}
            names["input_global_scale"] = torch.ones(1)
        return {**names, "weight_scale": scales}, meant

    return pack


def mxfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    exponents = (weight.abs().unflatten(1, (-1, 32)).amax(-1) / 6).log2().ceil()
    octets, meant = fp4(weight, 2**exponents, 32)
    return {"weight_packed": octets, "weight_scale": (exponents + 127).to(torch.uint8)}, meant


def compressed(form: str, weights: Mapping[str, Any], **group: Any) -> dict[str, Any]:
    described = {"targets": ["Linear"], "format": form, **group}
    described["weights"] = {"type": "int", "strategy": "group", "dynamic": False, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "ignore": ["lm_head", "re:.*gate$"],
        "config_groups": {"group_0": described},
    }


def gptq_config(bits: int, **others: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": False, **others}


_CHANNEL = {"num_bits": 8, "strategy": "channel"}
FORMATS: dict[str, tuple[dict[str, Any], Pack]] = {
    "gptq": (gptq_config(4), gptq(4)),
    "gptq-2": (gptq_config(2, checkpoint_format="gptq_v2"), gptq(2, v2=True)),
    "gptq-3": (gptq_config(3), gptq(3)),
    "gptq-4-symmetric": (gptq_config(4, sym=True), gptq(4, symmetric=True)),
    "gptq-3-symmetric": (gptq_config(3, sym=True), gptq(3, v2=True, symmetric=True)),
    "gptq-8-ordered": (gptq_config(8, desc_act=True), gptq(8, ordered=True)),
    "awq": ({"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}, awq),
    "ct-4": (compressed("pack-quantized", {"num_bits": 4}), packed_ints(4)),
    "ct-4-asymmetric": (
        compressed("pack-quantized", {"num_bits": 4, "symmetric": False}),
        packed_ints(4, asymmetric=True),
    ),
    "ct-4-ordered": (
        compressed("pack-quantized", {"num_bits": 4, "actorder": "group"}),
        packed_ints(4, ordered=True),
    ),
    "ct-5-asymmetric": (
        compressed("pack-quantized", {"num_bits": 5, "symmetric": False}),
        packed_ints(5, asymmetric=True),
    ),
    "ct-8-channel": (compressed("pack-quantized", _CHANNEL), packed_ints(8, channel=True)),
    "ct-w8a8": (compressed("int-quantized", _CHANNEL), ints8(False)),
    "ct-w8a8-asymmetric": (compressed("naive-quantized", _CHANNEL), ints8(True)),
    "ct-nvfp4": (
        compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float"}),
        nvfp4(False),
    ),
    "ct-mxfp4": (compressed("mxfp4-pack-quantized", {"num_bits": 4, "type": "float"}), mxfp4),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4(True)),
}


def write_packed(
    source: Path, config: Mapping[str, Any], pack: Callable[[str], Pack | None], folder: Path
) -> tuple[Path, Path]:
    """The checkpoint `source` packed, and the one of what its weights then are, both in `folder`.

    Products of layers, by name, are packed as `pack` says; None leaves them as they are.
    """
    packed, plain = folder / "packed", folder / "plain"
    for target in (packed, plain):
        shutil.copytree(source, target)
    stored: Tensors = {}
    meant: Tensors = {}
    for name, weight in load_file(source / SINGLE).items():
        product = name.removesuffix(".weight")
        way = pack(product) if "_proj" in name and product != name else None
        if way is None:
            stored[name] = meant[name] = weight
            continue
        parts, meant[name] = way(weight)
        stored = {f"{product}.{part}": tensor for part, tensor in parts.items()} | stored
    save_file(stored, packed / SINGLE)
    save_file(meant, plain / SINGLE)
    described = json.loads((source / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**described, "quantization_config": config}))
    return packed, plain
