"""The names of attention backends. A process that only supervises reads them: no torch here."""

from __future__ import annotations

from enum import StrEnum


class AttentionChoice(StrEnum):
    """The backends that compute attention over pages: the values of ``--attention``."""

    AUTO = "auto"
    """The fastest backend that the device, the model and the installed packages allow."""
    FLASHINFER = "flashinfer"
    """FlashInfer's kernels, on CUDA devices."""
    TORCH = "torch"
    """Plain torch: any device, any dtype, slow."""
    CPU = "cpu"
    """Our own compiled kernels, on CPUs."""


class AttentionSplits(StrEnum):
    """FlashInfer's ways to divide a sequence's KV: the values of ``--attention-splits``."""

    BATCH = "batch"
    """By the batch, so that the whole GPU is busy. Last bits then depend on the batch."""
    NONE = "none"
    """Not at all, so that results are alike in every batch."""
