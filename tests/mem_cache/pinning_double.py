"""A `Pinning` that pins up to a limit, and knows what is pinned."""

from __future__ import annotations


class LimitedPinning:
    """The double of a GPU's; it fails as CUDA does.

    Args:
        limit: bytes that can be pinned at a time.
    """

    def __init__(self, limit: int = 1 << 40) -> None:
        self._limit = limit
        self.pinned: dict[int, int] = {}
        """Bytes by their address."""
        self.refuses_to_unpin = False

    def pin(self, address: int, nbytes: int) -> None:
        assert address not in self.pinned, "it is pinned already"
        if sum(self.pinned.values()) + nbytes > self._limit:
            raise RuntimeError("out of memory (2)")
        self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        if self.refuses_to_unpin:
            raise RuntimeError("unspecified launch failure (719)")
        del self.pinned[address]
