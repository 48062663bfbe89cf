"""Weights that compressed-tensors packs are the weights that it unpacks, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvrelay.model_runner.checkpoint.checkpoint import SINGLE_NAME, Checkpoint
from kvrelay.model_runner.config.quantization import PackedFormat, PackedWeights, Quantization

pytest.importorskip("compressed_tensors")
SHAPE = (96, 128)


def calibrated(weight: torch.Tensor, args: Any) -> dict[str, torch.Tensor]:
    """The weight with scales and zeros of its groups, as the library's own observers find them."""
    from compressed_tensors.quantization.utils import calculate_qparams

    groups = weight.view(len(weight), -1, args.group_size or weight.shape[1])
    low, high = groups.amin(-1), groups.amax(-1)
    options = {}
    factor = torch.tensor([1.0])
    if args.strategy == "tensor_group":
        factor = (448 * 6 / weight.abs().max()).view(1)
        options["global_scale"] = factor
    scale, zero = calculate_qparams(low, high, args, **options)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
    return {**state, "weight_global_scale": factor} if options else state


@pytest.mark.parametrize(
    ("form", "weights"),
    [
        (PackedFormat.PACKED_INTS, {"num_bits": 4, "group_size": 32}),
        (PackedFormat.PACKED_INTS, {"num_bits": 3, "group_size": 64, "symmetric": False}),
        (PackedFormat.PACKED_INTS, {"num_bits": 8, "strategy": "channel", "symmetric": False}),
        (PackedFormat.INTS, {"num_bits": 8, "strategy": "channel"}),
        (PackedFormat.NVFP4, {"num_bits": 4, "type": "float", "group_size": 16}),
        (PackedFormat.MXFP4, {"num_bits": 4, "type": "float", "group_size": 32}),
    ],
)
def test_numbers_are_the_library_s(
    form: PackedFormat, weights: dict[str, Any], tmp_path: Path
) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    if form is PackedFormat.NVFP4:
        weights = {**weights, "strategy": "tensor_group", "scale_dtype": torch.float8_e4m3fn}
    if form is PackedFormat.MXFP4:
        weights = {**weights, "strategy": "group", "scale_dtype": torch.uint8}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    compressor = BaseCompressor.get_value_from_registry(form.value)
    stored = compressor.compress(calibrated(weight, scheme.weights), scheme)
    expected = compressor.decompress(stored, scheme)["weight"]
    tensors = {f"proj.{name}": one.contiguous() for name, one in stored.items()}
    save_file(tensors, tmp_path / SINGLE_NAME)
    quantization = Quantization(PackedWeights(form, weights["num_bits"]))
    checkpoint = Checkpoint(
        tmp_path, 1, expected.dtype, torch.device("cpu"), quantization=quantization
    )
    assert torch.equal(checkpoint.take("proj.weight", SHAPE), expected)
    checkpoint.finish()
    assert (expected - weight).abs().max() < 0.7
