"""The types of KV in pages. A process that only supervises reads them: no torch here."""

from __future__ import annotations

from enum import StrEnum


class KVDtype(StrEnum):
    """What pages store keys and values in: the values of ``--kv-dtype``."""

    AUTO = "auto"
    """The type that the model computes in."""
    FP8_E4M3 = "fp8_e4m3"
    """8 bits, with a scale a layer."""
