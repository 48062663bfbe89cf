"""Pools of the host in pinned memory, which a GPU copies from and to by itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from kvrelay.device.device_streams import Pinning
from kvrelay.mem_cache.pool import KVPool

logger = logging.getLogger(__name__)


class PinnedPools:
    """Pools of the host, pinned from the constructor to `close`.

    Pin them before NIXL registers them: UCX pins the host's memory itself where nobody has, until
    the agent ends that has registered it, and memory is not pinned twice.

    Args:
        pools: of the host.
        pinning: of the device that copies; None: it is the host itself, and nothing is pinned.

    Raises:
        RuntimeError: they cannot all be pinned; none is then.
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
        """Bytes that are pinned now."""
        return sum(pool.nbytes for pool in self._pinned)

    def close(self) -> None:
        """Let go of all that is pinned. Copies must have ended. Logs what the device refuses."""
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
