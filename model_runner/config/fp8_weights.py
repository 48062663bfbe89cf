"""How the weights of a checkpoint are quantized, as `read_quantization` finds it in config.json."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

BLOCK: Final = 128
"""Outputs, and inputs, that share a scale where blocks have scales."""


class ScaleShape(StrEnum):
    """What of a weight ``[out, in]`` shares a scale, by the names of compressed-tensors."""

    TENSOR = "tensor"
    """All of it."""
    CHANNEL = "channel"
    """An output."""
    BLOCK = "block"
    """A square of `BLOCK`; the last ones of a row and of a column may be smaller."""


@dataclass(frozen=True, slots=True)
class Fp8Weights:
    """Weights are stored as float8_e4m3fn; a weight is what is stored times its scale."""

    scales: ScaleShape
    static_inputs: bool = False
    """Whether the checkpoint has the scales of the products' inputs, too."""
