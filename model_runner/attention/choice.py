"""The names of attention backends. A process that only supervises reads them: no torch here."""

from __future__ import annotations

from enum import StrEnum


class AttentionChoice(StrEnum):
    """What computes attention over pages: the values of ``--attention``."""

    AUTO = "auto"
    """The fastest that the device, the model and the installed packages allow."""
    FLASHINFER = "flashinfer"
    """FlashInfer's kernels, on CUDA devices."""
    TORCH = "torch"
    """Plain torch: any device, any dtype, slow."""
    CPU = "cpu"
    """Our own compiled kernels, on CPUs."""
