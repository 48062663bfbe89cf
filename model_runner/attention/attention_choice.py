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


class AttentionSplits(StrEnum):
    """How FlashInfer divides the KV of a sequence: the values of ``--attention-splits``."""

    BATCH = "batch"
    """By what is in the batch, so that all of the GPU is busy. Last bits depend on it."""
    NONE = "none"
    """Not at all, and so alike in every batch."""
