"""The copies that the host tier has ordered: to the host, and back to the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt

from kvrelay.mem_cache.account import NO_PAGE, Pages
from kvrelay.mem_cache.host.host_page import HostPage, HostPart
from kvrelay.mem_cache.host.tier_copies import CopyStream, PageMoves
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager
from kvrelay.mem_cache.leases.lease import Lease
from kvrelay.mem_cache.prefix.prefix_index import TokenIds
from kvrelay.mem_cache.prefix.radix_node import RadixNode
from kvrelay.wire.page_hash import HASH_BYTES


class PageBytes:
    """The number of bytes of pages that are copied.

    Args:
        by_pool: the bytes of one page in each pool of the device.
        windowed: for each pool, whether its layers have a window.
    """

    def __init__(self, by_pool: Sequence[int], windowed: Sequence[bool]) -> None:
        self.by_pool = tuple(by_pool)
        self.whole = sum(by_pool)
        """The bytes of one page in all pools."""
        pools = zip(by_pool, windowed, strict=True)
        self._full = sum(nbytes for nbytes, has_window in pools if not has_window)

    def pages_within(self, nbytes: int, without_parts: int) -> int:
        """Count the pages in a row that have `nbytes` at most, but at least one.

        Args:
            nbytes: in all.
            without_parts: how many of the first pages have no parts of windows.
        """
        left = nbytes - without_parts * self._full
        if left < 0:
            return max(1, nbytes // self._full)
        return max(1, without_parts + left // self.whole)

    def of(self, pages: int, parts: Mapping[int, int]) -> int:
        """Compute the bytes of `pages` pages with `parts` parts in each window's pool."""
        return pages * self._full + sum(self.by_pool[pool] * n for pool, n in parts.items())


@dataclass(frozen=True, slots=True)
class HostPrefix:
    """The host's part of a prompt beyond the device's, so that it can be continued."""

    token_ids: TokenIds
    """The prompt's tokens from the first one to the end of `pages`."""
    namespace: str
    first_page: int
    """The place of the first of `pages` in the prompt."""
    pages: tuple[HostPage, ...]
    parts: Mapping[int, tuple[HostPart, ...]]
    """The parts of each window's pool, by its number, of the last pages that the next token
    sees."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens in `pages`."""
        return len(self.token_ids) // (self.first_page + len(self.pages)) * len(self.pages)

    @property
    def num_without_parts(self) -> int:
        """The number of the first of `pages` that no window sees."""
        return len(self.pages) - max([len(parts) for parts in self.parts.values()], default=0)

    def parts_of(self, pool: int, first: int, number: int) -> tuple[HostPart, ...]:
        """Get a window's parts of `number` of `pages`, from the `first` on."""
        parts = self.parts[pool]
        before = len(self.pages) - len(parts)
        return parts[max(0, first - before) : max(0, first + number - before)]

    def num_parts(self, first: int, number: int) -> dict[int, int]:
        """Count the parts in each window's pool of `number` of `pages`, from the `first` on."""
        return {pool: len(self.parts_of(pool, first, number)) for pool in self.parts}

    def brings(self, other: HostPrefix) -> bool:
        """Whether another prefix can be continued on the device once this one has come."""
        pages, parts = self.pages[: len(other.pages)], self.parts
        return pages == other.pages and all(
            parts[pool][: len(theirs)] == theirs for pool, theirs in other.parts.items()
        )


@dataclass(eq=False, slots=True)
class Load:
    """The pages of a prefix that come back from the host."""

    prefix: HostPrefix
    lease: Lease
    num_done: int = 0
    """The number of pages that have come, the first ones."""
    num_moving: int = 0
    """The number of pages after those, which the running copy brings."""
    given_up: bool = False
    """Whether it was given up: no further copy begins."""
    ended_at: float | None = None
    """The moment when it ended, by the cache's clock; the prefix index has the pages that came."""

    @property
    def ended(self) -> bool:
        """Whether no more pages come."""
        return self.ended_at is not None


@dataclass(frozen=True, slots=True)
class HostWrite:
    """Pages that go to the host, and parts of windows, of these or of pages there already."""

    node: RadixNode
    """The node that has them and the pages before them."""
    pages: list[HostPage]
    parts: Mapping[int, list[HostPart]]
    """The parts, by the pool's number."""
    device_pages: tuple[Pages, ...]
    """For each pool the device pages of `pages`, or of its `parts`."""
    times_allocated: tuple[npt.NDArray[np.uint32], ...]
    """How often each device page had been handed out when the copy began."""
    nbytes: int
    """The bytes that are copied."""


class CopyOrders:
    """The orders of copies to a stream, each with a unique number.

    Args:
        stream: copies.
        pools: the numbers of the device's pools.
    """

    def __init__(self, stream: CopyStream, pools: Sequence[int]) -> None:
        self._stream = stream
        self._pools = pools
        self._numbers = count(1)

    def start(
        self,
        to_host: bool,
        device_pages: tuple[Pages, ...],
        pages: Sequence[HostPage],
        parts: Mapping[int, Sequence[HostPart]],
    ) -> int:
        """Order a copy. Returns its number, which its end names.

        Args:
            to_host: whether to the host, or else back.
            device_pages: for each pool; as many as `pages`, or as its `parts`.
            pages: of the host.
            parts: of these, by the number of the window's pool.
        """
        number = next(self._numbers)
        whole = np.array([page.slot for page in pages], np.int32)
        slots = {pool: [part.slot for part in some] for pool, some in parts.items()}
        host_pages = tuple(
            np.array(slots[pool], np.int32) if pool in slots else whole for pool in self._pools
        )
        self._stream.start(PageMoves(number, to_host, device_pages, host_pages))
        return number


def num_pages(kv_cache: KVCacheManager, by_pool: Sequence[int]) -> int:
    """Count the pages that the host has room for, if its pools have `by_pool` pages.

    If every pool has a window, a page itself takes no room. Then as many are kept as the prompts
    have whose ends fill the windows.
    """
    shape = kv_cache.shape
    for pages, has_window in zip(by_pool, shape.windowed, strict=True):
        if not has_window:
            return pages
    longest = shape.pages_for(kv_cache.max_lease_tokens)
    return max(
        pages * -(-longest // shape.pages_behind(pool)) for pool, pages in enumerate(by_pool)
    )


def pages_of(node: RadixNode, pool: int) -> Pages:
    """Get the pages of a node that is found; `NO_PAGE` for each if a window has passed them."""
    pages = node.pages[pool]
    return np.full(len(node.hashes) // HASH_BYTES, NO_PAGE, np.int32) if pages is None else pages


def token_bytes(token_ids: TokenIds) -> bytes:
    """Convert tokens to bytes, four for each, the lowest first."""
    return np.ascontiguousarray(token_ids, "<i4").tobytes()


def split(joined: bytes, size: int) -> list[bytes]:
    """Split into whole pieces of `size` bytes."""
    return [joined[at : at + size] for at in range(0, len(joined) - size + 1, size)]


def split_tokens(token_ids: TokenIds, page_size: int) -> list[bytes]:
    """Split into the tokens of each whole page, four bytes each."""
    return split(token_bytes(token_ids), 4 * page_size)
