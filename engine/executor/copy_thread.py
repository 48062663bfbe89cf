"""A thread that copies pages between the device's pools and the host's."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from kvrelay.device.device_streams import ImmediateStreams, Streams
from kvrelay.device.thread_end import CLOSE_SECONDS, ended_within
from kvrelay.device.work_in_progress import WorkInProgress
from kvrelay.mem_cache.convert import copy_pages
from kvrelay.mem_cache.host.tier_copies import CopyEnded, PageMoves, copy_moves
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.torch_options import wait_for_device

logger = logging.getLogger(__name__)


class CopyThread:
    """A `CopyStream` that makes copies in the order in which they are ordered.

    A copy that fails is reported like any other end. On a GPU copies run beside forwards, and the
    thread waits for each.

    Args:
        device_pools: the worker's.
        host_pools: of the same geometries but for the page order.
        on_end: called with each copy's end, on this thread.
        streams: of the device.
    """

    def __init__(
        self,
        device_pools: Sequence[KVPool],
        host_pools: Sequence[KVPool],
        on_end: Callable[[CopyEnded], object],
        streams: Streams | None = None,
    ) -> None:
        self._streams = streams or ImmediateStreams()
        self._device_pools = device_pools
        self._host_pools = host_pools
        self._on_end = on_end
        self.work = WorkInProgress()
        """The copies that were ordered and have not ended."""
        self._moves: queue.SimpleQueue[PageMoves | None] = queue.SimpleQueue()
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="copies", daemon=True)
        self._thread.start()

    def start(self, moves: PageMoves) -> None:
        """See `CopyStream`."""
        page_size = self._host_pools[0].geometry.page_size
        self.work.begin(moves.num_pages * page_size, moves.operation)
        self._moves.put(moves)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Make the copies that were ordered, then end; give up what has not ended after `seconds`.

        A copy that hangs goes on to use the pools, which stay as long as the process. The copies
        behind it never begin, and their ends are never reported.
        """
        self._moves.put(None)
        if not ended_within(self._thread, seconds):
            self._given_up.set()
            logger.error(
                "copies between the device and the host have not ended for %g s: %d are given up",
                *(seconds, self.work.count),
            )

    @property
    def has_ended(self) -> bool:
        """Whether nothing copies to or from the host any more, or ever will."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        entering = _error_of(self._streams.enter_thread, "a thread for copies")
        while (moves := self._moves.get()) is not None and not self._given_up.is_set():
            begun = time.monotonic()
            error = entering or self._copy(moves)
            self.work.end()
            if self._given_up.is_set():
                return
            self._on_end(CopyEnded(moves.operation, time.monotonic() - begun, error))

    def _copy(self, moves: PageMoves) -> str:
        """Make a copy and wait until it has ended. Returns why it is not whole, or ""."""
        stream, name = self._streams.copies, f"a copy of {moves.num_pages} pages"
        copy = partial(copy_moves, moves, self._device_pools, self._host_pools)
        failed = _error_of(partial(stream.launch, copy), name)
        # A copy that failed may have begun.
        failed_later = _error_of(lambda: stream.record().wait(), name)
        return failed or failed_later


def _error_of(call: Callable[[], None], name: str) -> str:
    """Call it. Returns why it failed, or ""."""
    try:
        call()
    except Exception as error:  # whatever it was, the engine must hear of it
        logger.exception("%s failed", name)
        return f"{type(error).__name__}: {error}"
    return ""


def measure_bytes_per_second(
    device_pools: Sequence[KVPool], host_pools: Sequence[KVPool], most_bytes: int = 32 << 20
) -> float:
    """Measure how fast pages come from the host, before anything uses the pools. Changes no byte.

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
