"""The measured speed of a lower tier, which decides between loading and computing."""

from __future__ import annotations

from typing import Final

_NEWEST: Final = 0.25
"""The weight of the latest copy in the average."""
_LEAST_BYTES: Final = 1 << 16
"""The least bytes of a copy that counts: smaller copies show their start, not the rate."""


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
        """Estimate the seconds to copy `nbytes`, which must include all bytes before them."""
        return nbytes / self.bytes_per_second
