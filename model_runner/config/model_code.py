"""Whose code computes a model: the values of ``--model-code``."""

from __future__ import annotations

from enum import StrEnum


class ModelCode(StrEnum):
    """The code that a model's forwards run."""

    AUTO = "auto"
    """Ours where it computes the architecture as config.json has it, else transformers'."""
    NATIVE = "native"
    """Ours."""
    TRANSFORMERS = "transformers"
    """transformers', over our pages and with our kernels."""
