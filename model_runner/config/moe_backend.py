"""The ways to compute experts. A process that only supervises reads them: no torch here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class MoEBackend(StrEnum):
    """The code that computes a layer's experts: the values of ``--moe-backend``."""

    AUTO = "auto"
    """Our kernels on a CPU that has them, else torch's grouped products where it has them."""
    CPU = "cpu"
    """Our own compiled kernels, on CPUs."""
    TORCH = "torch"
    """torch's grouped products; expert by expert where it has none for the dtype."""
    FLASHINFER = "flashinfer"
    """FlashInfer's CUTLASS kernel of a whole layer, on CUDA devices."""


@dataclass(frozen=True, slots=True)
class ClampedSilu:
    """The activation of gpt-oss: ``(up + 1) * gate * sigmoid(slope * gate)``."""

    slope: float = 1.702
    most: float = 7.0
    """A gate is at most so large; the other factor lies within plus and minus this."""
