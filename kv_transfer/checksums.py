"""Whether the pages that arrived are, byte by byte, those that were computed.

Both sides hash their own copy of the same pages, each on a thread of its own:
the engine thread hashes nothing. Only settled tokens count: what lies behind
them in a prompt's last page is nobody's, and need not be equal.
"""

from __future__ import annotations

import functools
import logging
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.mem_cache.geometry import PageOrder
from kvrelay.mem_cache.pool import KVPool

logger = logging.getLogger(__name__)

SAMPLED_PART = 16
"""With `VerifyPages.SAMPLE` one page of so many, and at least one, is compared."""


class VerifyPages(StrEnum):
    """Which of a request's pages are compared once they were read."""

    OFF = "off"
    SAMPLE = "sample"
    """Some, chosen by the request's id: an attempt that is repeated compares the same."""
    ALL = "all"
    """Every page of every pool."""


class Place(NamedTuple):
    """A page of a request: both sides have it elsewhere in their pools."""

    pool: int
    page: int
    """Its index in the request's page table."""


@dataclass(frozen=True, slots=True)
class PageSum:
    """The checksum of the settled tokens of one page, over all of its layers."""

    place: Place
    value: int


@dataclass(frozen=True, slots=True)
class LocalPage:
    """Where a page of a request lies in this worker's pool."""

    place: Place
    page_id: int
    tokens: int
    """That have settled: all of them but on the last page."""


def choose(mode: VerifyPages, places: Sequence[Place], request_id: str) -> list[Place]:
    """Those of the pages that were read that are to be compared."""
    match mode:
        case VerifyPages.OFF:
            return []
        case VerifyPages.ALL:
            return list(places)
        case VerifyPages.SAMPLE:
            first = zlib.crc32(request_id.encode()) % max(1, min(len(places), SAMPLED_PART))
            return list(places[first::SAMPLED_PART])


def locate(
    places: Sequence[Place], tables: Sequence[Sequence[int]], page_size: int, num_tokens: int
) -> list[LocalPage]:
    """Find `places` in a request's page tables, one for each pool.

    Raises:
        ValueError: the request has no such page here.
    """
    return [_locate(place, tables, page_size, num_tokens) for place in places]


def _locate(
    place: Place, tables: Sequence[Sequence[int]], page_size: int, num_tokens: int
) -> LocalPage:
    pages = tables[place.pool] if 0 <= place.pool < len(tables) else ()
    tokens = min(page_size, num_tokens - place.page * page_size)
    if not 0 <= place.page < len(pages) or tokens < 1 or pages[place.page] < 0:
        raise ValueError(f"page {place.page} of pool {place.pool} is not held")
    return LocalPage(place, int(pages[place.page]), tokens)


class PageHasher:
    """Hashes pages on a thread of its own, in order. Its methods may be called from any thread.

    It reads pools without a fence: whoever asks has the pages locked, or throws
    the answer away when the request ends before it comes.

    Args:
        pools: the worker's.
        on_failure: called if a page cannot be hashed: the worker cannot go on.
    """

    def __init__(self, pools: Sequence[KVPool], on_failure: Callable[[str], None]) -> None:
        self._pools = pools
        self._on_failure = on_failure
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-verify")

    def order(
        self, pages: Sequence[LocalPage], on_end: Callable[[tuple[PageSum, ...]], None]
    ) -> None:
        """Hash `pages`; `on_end` is called with their sums, on the hasher's thread."""
        self._thread.submit(self._run, pages, on_end)

    def close(self) -> None:
        """Finish what was ordered, and end the thread."""
        self._thread.shutdown()

    def _run(
        self, pages: Sequence[LocalPage], on_end: Callable[[tuple[PageSum, ...]], None]
    ) -> None:
        try:
            on_end(tuple(PageSum(page.place, self._sum(page)) for page in pages))
        except Exception as error:
            logger.exception("pages could not be hashed")
            self._on_failure(f"{type(error).__name__}: {error}")

    def _sum(self, page: LocalPage) -> int:
        return hash_bytes(settled_bytes(self._pools[page.place.pool], page.page_id, page.tokens))


def settled_bytes(pool: KVPool, page_id: int, tokens: int) -> npt.NDArray[np.uint8]:
    """The bytes of the first `tokens` of a page, layer by layer, whatever the page order."""
    first = pool.geometry.order is PageOrder.PAGE_FIRST
    page = pool.data[page_id] if first else pool.data[:, page_id]
    settled = page[..., :tokens, :].contiguous().cpu()
    array: npt.NDArray[np.uint8] = settled.view(torch.uint8).reshape(-1).numpy()
    return array


def hash_bytes(array: npt.NDArray[np.uint8]) -> int:
    """A weighted sum modulo 2⁶⁴ of the bytes as 64-bit words, little-endian.

    Faster than CRC-32, and wider. Each word's upper half is folded into its lower
    one first, which no two words share the result of, and the weights are odd: so a
    change of one word always shows. Without the fold, changes of highest bits, on
    which a weight has no influence, would cancel each other out in pairs.
    """
    rest = -len(array) % 8
    words = (np.pad(array, (0, rest)) if rest else array).view(np.uint64)
    folded = words ^ (words >> np.uint64(32))
    return int(np.dot(folded, _weights(len(words))))


_STEP = 0x9E3779B97F4A7C15


@functools.lru_cache(maxsize=64)
def _weights(count: int) -> npt.NDArray[np.uint64]:
    """Odd, and else as good as random: SplitMix64, which is the same everywhere."""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31)) | np.uint64(1)
