"""How fast a lower tier gives pages back, as measured: what decides between load and compute."""

from __future__ import annotations

from typing import Final

_NEWEST: Final = 0.25
"""What the latest copy counts of the average."""
_LEAST_BYTES: Final = 1 << 16
"""Smaller copies tell of their start, not of the rate."""


class TierSpeed:
    """The rate of copies from a tier, an average that follows the latest ones.

    Args:
        bytes_per_second: measured before the first copy.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second

    def observe(self, nbytes: int, seconds: float) -> None:
        """Learn from a copy that has ended well."""
        if nbytes >= _LEAST_BYTES and seconds > 0:
            self.bytes_per_second += _NEWEST * (nbytes / seconds - self.bytes_per_second)

    def seconds(self, nbytes: int) -> float:
        """Expected seconds until so many bytes are copied, those included that come before."""
        return nbytes / self.bytes_per_second
