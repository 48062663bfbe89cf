"""Pools of the host in pinned memory, from and to which a GPU copies by itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from kvrelay.device.device_streams import Pinning
from kvrelay.mem_cache.pool import KVPool

logger = logging.getLogger(__name__)


class PinnedPools:
    """Pools of the host, pinned from the constructor to `close`.

    Pin them before NIXL registers them. UCX pins host memory that is not pinned yet, until the
    agent that registered it ends, and memory cannot be pinned twice.

    Args:
        pools: of the host.
        pinning: of the device that copies; None: the host copies, and nothing is pinned.

    Raises:
        RuntimeError: they cannot all be pinned; then none is.
    """

    def __init__(self, pools: Sequence[KVPool], pinning: Pinning | None) -> None:
        self._pinning = pinning
        self._pinned: list[KVPool] = []
        begun = time.monotonic()
        try:
            for pool in pools if pinning is not None else ():
                self._pin(pool)
        except RuntimeError:
            self.close()
            raise
        if self._pinned:
            seconds = time.monotonic() - begun
            logger.info("%d MiB of the host are pinned, in %.1f s", self.nbytes >> 20, seconds)

    @property
    def nbytes(self) -> int:
        """The number of bytes that are pinned now."""
        return sum(pool.nbytes for pool in self._pinned)

    def close(self) -> None:
        """Unpin all memory. Copies must have ended. Errors of the device are logged."""
        while self._pinned:
            pool = self._pinned.pop()
            assert self._pinning is not None, "nothing is pinned without it"
            try:
                self._pinning.unpin(pool.address)
            except RuntimeError:
                logger.exception("%d MiB of the host stay pinned", pool.nbytes >> 20)

    def _pin(self, pool: KVPool) -> None:
        assert self._pinning is not None
        self._pinning.pin(pool.address, pool.nbytes)
        self._pinned.append(pool)
