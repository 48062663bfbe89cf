"""Copies pages between the device's pools and the host's, on a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch

from kvrelay.kv_transfer.work_in_progress import WorkInProgress
from kvrelay.mem_cache.convert import copy_pages
from kvrelay.mem_cache.pool import KVPool
from kvrelay.mem_cache.tier_copies import CopyEnded, PageMoves, copy_moves
from kvrelay.model_runner.torch_options import wait_for_device

logger = logging.getLogger(__name__)


class CopyThread:
    """A `CopyStream`: makes copies in the order in which they are ordered.

    A copy that fails is told as any other end. On a GPU the thread has a stream of its own, and
    waits for it: its copies run beside forwards.

    Args:
        device_pools: the worker's.
        host_pools: of the same geometries but for the page order.
        on_end: called with each copy's end, on this thread.
    """

    def __init__(
        self,
        device_pools: Sequence[KVPool],
        host_pools: Sequence[KVPool],
        on_end: Callable[[CopyEnded], object],
    ) -> None:
        self._device_pools = device_pools
        self._host_pools = host_pools
        self._on_end = on_end
        self.work = WorkInProgress()
        """The copies that were ordered and have not ended."""
        self._moves: queue.SimpleQueue[PageMoves | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="copies", daemon=True)
        self._thread.start()

    def start(self, moves: PageMoves) -> None:
        """See `CopyStream`."""
        page_size = self._host_pools[0].geometry.page_size
        self.work.begin(len(moves.host_pages) * page_size, moves.operation)
        self._moves.put(moves)

    def close(self) -> None:
        """Make the copies that were ordered, then end."""
        self._moves.put(None)
        self._thread.join()

    def _run(self) -> None:
        stream = self._make_stream()
        while (moves := self._moves.get()) is not None:
            begun, error = time.monotonic(), ""
            try:
                with torch.cuda.stream(stream):
                    copy_moves(moves, self._device_pools, self._host_pools)
                    if stream is not None:
                        stream.synchronize()
            except Exception as failed:  # whatever it was, the engine must hear of it
                logger.exception("a copy of %d pages failed", len(moves.host_pages))
                error = f"{type(failed).__name__}: {failed}"
            self.work.end()
            self._on_end(CopyEnded(moves.operation, time.monotonic() - begun, error))

    def _make_stream(self) -> torch.cuda.Stream | None:
        device = self._device_pools[0].data.device
        return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def measure_bytes_per_second(
    device_pools: Sequence[KVPool], host_pools: Sequence[KVPool], most_bytes: int = 32 << 20
) -> float:
    """How fast pages come from the host, while nobody uses the pools yet. Changes no byte.

    Blocks for some milliseconds. All pages are zero, as they were made.
    """
    page_bytes = sum(pool.geometry.page_bytes for pool in device_pools)
    fewest = min(pool.total_pages for pool in (*device_pools, *host_pools))
    pages = list(range(max(1, min(fewest, most_bytes // page_bytes))))
    best = 0.0
    for _ in range(3):
        begun = time.monotonic()
        for device, host in zip(device_pools, host_pools, strict=True):
            copy_pages(host, pages, device, pages)
            wait_for_device(device.data.device)
        best = max(best, len(pages) * page_bytes / max(time.monotonic() - begun, 1e-9))
    return best
