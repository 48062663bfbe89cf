"""The quantization of a checkpoint's weights, as `read_quantization` finds it in config.json."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

BLOCK: Final = 128
"""The outputs, and the inputs, that share a scale where blocks have scales."""


class ScaleShape(StrEnum):
    """The part of a weight ``[out, in]`` with one scale, by compressed-tensors' names."""

    TENSOR = "tensor"
    """The whole weight."""
    CHANNEL = "channel"
    """An output."""
    BLOCK = "block"
    """A square of `BLOCK`; the last squares of a row and of a column may be smaller."""


@dataclass(frozen=True, slots=True)
class Fp8Weights:
    """The storage of weights as float8_e4m3fn; a weight is the stored number times its scale."""

    scales: ScaleShape
    static_inputs: bool = False
    """Whether the checkpoint has the scales of the products' inputs, too."""
