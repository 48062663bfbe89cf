"""The scales that keys and values are divided by before they are stored in FP8."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVScale:
    """One layer's scales: a number in a page times its scale is the key, or the value."""

    key: float = 1.0
    """The scale of keys, or of latents."""
    value: float = 1.0
