"""The quantization of a checkpoint's weights by the names of its products."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from kvrelay.model_runner.config.fp8_weights import Fp8Weights


class PackedFormat(StrEnum):
    """A form in which numbers of few bits are stored, by the names of config.json."""

    GPTQ = "gptq"
    """GPTQ's integers; a zero is stored less one."""
    GPTQ_V2 = "gptq_v2"
    """The same with zeros as they are."""
    GPTQ_SYMMETRIC = "gptq-symmetric"
    """The same with all zeros in the middle, whatever is stored: writers do not agree on it."""
    AWQ = "awq"
    """AutoAWQ's integers of 4 bits, in the layout "gemm"."""
    PACKED_INTS = "pack-quantized"
    """compressed-tensors' integers, packed into words."""
    INTS = "int-quantized"
    """compressed-tensors' integers of 8 bits."""
    NVFP4 = "nvfp4-pack-quantized"
    """compressed-tensors' floats of 4 bits: 16 have a scale in FP8, all together have another."""
    MXFP4 = "mxfp4-pack-quantized"
    """compressed-tensors' floats of 4 bits: 32 have a power of two."""
    NVFP4_MODELOPT = "NVFP4"
    """ModelOpt's names for the tensors of NVFP4; the second scale is not inverted."""
    MXFP4_BLOCKS = "mxfp4"
    """gpt-oss: all experts of a layer together, in blocks of 32 numbers with a power of two."""


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """The storage of a weight in few bits."""

    format: PackedFormat
    bits: int


Scheme: TypeAlias = Fp8Weights | PackedWeights


@dataclass(frozen=True, slots=True)
class Quantization:
    """How products are stored that are quantized: the stored tensors tell which these are."""

    default: Scheme | None
    """The scheme of products that neither `exact` nor a rule names."""
    exact: Mapping[str, Scheme] = field(default_factory=dict, hash=False)
    """The schemes of products by their whole names, which count before rules."""
    rules: tuple[tuple[re.Pattern[str], Scheme], ...] = ()
    """Patterns that match the begin of a product's name. The first one counts."""

    def scheme_of(self, name: str) -> Scheme | None:
        """The scheme of the product `name`, such as ``model.layers.0.mlp.down_proj``."""
        if name in self.exact:
            return self.exact[name]
        return next((scheme for rule, scheme in self.rules if rule.match(name)), self.default)
