"""Checksums of pages, which show whether a decode worker has the bytes that were computed.

Both sides hash their own copy of the same pages, each on a thread of its own, so that the engine
thread hashes nothing. Only written tokens are hashed. The bytes behind them in a prompt's last page
are undefined, and may differ.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.device.cuda_streams import use_device
from kvrelay.device.thread_end import CLOSE_SECONDS
from kvrelay.device.work_in_progress import WorkInProgress
from kvrelay.mem_cache.byte_sum import hash_bytes
from kvrelay.mem_cache.geometry import PageOrder
from kvrelay.mem_cache.pool import KVPool
from kvrelay.wire.hand_over import PagePlace, PageSum

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LocalPage:
    """The location of a request's page in this worker's pool."""

    place: PagePlace
    page_id: int
    tokens: int
    """The number of settled tokens: `page_size`, except on the prompt's last page."""
    in_host: bool = False
    """Whether it lies in the host's pool."""


def locate(
    places: Sequence[PagePlace], tables: Sequence[Sequence[int]], page_size: int, num_tokens: int
) -> list[LocalPage]:
    """Find `places` in a request's page tables, of which there is one for each pool.

    Raises:
        ValueError: the request has no such page here.
    """
    return [_locate(place, tables, page_size, num_tokens) for place in places]


def _locate(
    place: PagePlace, tables: Sequence[Sequence[int]], page_size: int, num_tokens: int
) -> LocalPage:
    pages = tables[place.pool] if 0 <= place.pool < len(tables) else ()
    tokens = min(page_size, num_tokens - place.page * page_size)
    if not 0 <= place.page < len(pages) or tokens < 1 or pages[place.page] < 0:
        raise ValueError(f"page {place.page} of pool {place.pool} is not held")
    return LocalPage(place, int(pages[place.page]), tokens)


class PageHasher:
    """A thread that hashes pages, in order. Its methods may be called from any thread.

    It reads pools without a fence. The caller has locked the pages, or ignores the sums if the
    request ends before they come.

    Args:
        pools: the worker's.
        on_failure: called if a page cannot be hashed: the worker cannot go on.
        host_pools: the host tier's, if it may be read.
    """

    def __init__(
        self,
        pools: Sequence[KVPool],
        on_failure: Callable[[str], None],
        host_pools: Sequence[KVPool] = (),
    ) -> None:
        self._pools = pools
        self._host_pools = host_pools
        self._on_failure = on_failure
        self.work = WorkInProgress()
        """The work that was submitted, in tokens, and is not hashed yet."""
        self._latest: Future[None] | None = None
        self._thread = ThreadPoolExecutor(
            1, "kv-verify", initializer=use_device, initargs=(pools[0].data.device,)
        )

    def submit(
        self, pages: Sequence[LocalPage], on_end: Callable[[tuple[PageSum, ...]], None]
    ) -> None:
        """Start to hash `pages`. `on_end` is called with their sums, on the hasher's thread."""
        self.work.begin(sum(page.tokens for page in pages))
        self._latest = self._thread.submit(self._run, pages, on_end)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Finish the submitted work and end the thread; give up what is left after `seconds`."""
        self._thread.shutdown(wait=False)
        if self._latest is not None and not wait([self._latest], seconds).done:
            logger.error("the hashing of pages has not ended for %g s", seconds)

    def _run(
        self, pages: Sequence[LocalPage], on_end: Callable[[tuple[PageSum, ...]], None]
    ) -> None:
        try:
            on_end(tuple(PageSum(*page.place, self._sum(page)) for page in pages))
        except Exception as error:
            logger.exception("pages could not be hashed")
            self._on_failure(f"{type(error).__name__}: {error}")
        self.work.end()

    def _sum(self, page: LocalPage) -> int:
        pools = self._host_pools if page.in_host else self._pools
        return hash_bytes(written_bytes(pools[page.place.pool], page.page_id, page.tokens))


def written_bytes(pool: KVPool, page_id: int, tokens: int) -> npt.NDArray[np.uint8]:
    """Return the bytes of the first `tokens` of a page, layer by layer, whatever the page order."""
    first = pool.geometry.order is PageOrder.PAGE_FIRST
    page = pool.data[page_id] if first else pool.data[:, page_id]
    written = page[..., :tokens, :].contiguous().cpu()
    array: npt.NDArray[np.uint8] = written.view(torch.uint8).reshape(-1).numpy()
    return array
