"""What keys and values are divided by before they are stored in FP8."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVScale:
    """Of one layer: what is read of a page times it is the key, or the value."""

    key: float = 1.0
    """Also that of a latent."""
    value: float = 1.0
