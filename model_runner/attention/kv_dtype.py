"""The dtypes of KV in pages. A process that only supervises reads them: no torch here."""

from __future__ import annotations

from enum import StrEnum


class KVDtype(StrEnum):
    """The dtypes in which pages store keys and values: the values of ``--kv-dtype``."""

    AUTO = "auto"
    """The dtype that the model computes in."""
    FP8_E4M3 = "fp8_e4m3"
    """8 bits, with a scale a layer."""
