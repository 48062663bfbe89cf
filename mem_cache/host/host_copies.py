"""What the host tier has ordered: pages of a prefix that come back, and pages that go there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt

from kvrelay.mem_cache.account import Pages
from kvrelay.mem_cache.host.host_page import HostPage, HostPart
from kvrelay.mem_cache.host.tier_copies import CopyStream, PageMoves
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager
from kvrelay.mem_cache.leases.lease import Lease
from kvrelay.mem_cache.prefix.prefix_index import NO_PAGE, TokenIds
from kvrelay.mem_cache.prefix.radix_node import RadixNode
from kvrelay.wire.page_hash import HASH_BYTES


class PageBytes:
    """How many bytes pages have that are copied.

    Args:
        by_pool: of one page in each pool of the device.
        windowed: for each pool, whether its layers have a window.
    """

    def __init__(self, by_pool: Sequence[int], windowed: Sequence[bool]) -> None:
        self.by_pool = tuple(by_pool)
        self.whole = sum(by_pool)
        """Of one page in all pools."""
        pools = zip(by_pool, windowed, strict=True)
        self._full = sum(nbytes for nbytes, has_window in pools if not has_window)

    def pages_within(self, nbytes: int, without_parts: int) -> int:
        """How many neighbours have so many bytes at most, but at least one.

        Args:
            nbytes: in all.
            without_parts: how many of the first ones have no parts of windows.
        """
        left = nbytes - without_parts * self._full
        if left < 0:
            return max(1, nbytes // self._full)
        return max(1, without_parts + left // self.whole)

    def of(self, pages: int, parts: Mapping[int, int]) -> int:
        """Of so many pages, of which windows' pools have so many parts each."""
        return pages * self._full + sum(self.by_pool[pool] * n for pool, n in parts.items())


@dataclass(frozen=True, slots=True)
class HostPrefix:
    """What the host has of a prompt beyond what the device has, so that it can be continued."""

    token_ids: TokenIds
    """From the first one to the end of `pages`."""
    namespace: str
    first_page: int
    """Where `pages` begin."""
    pages: tuple[HostPage, ...]
    parts: Mapping[int, tuple[HostPart, ...]]
    """By the pool's number those of the last pages that a token behind them sees of a window."""

    @property
    def num_tokens(self) -> int:
        """Tokens of `pages`."""
        return len(self.token_ids) // (self.first_page + len(self.pages)) * len(self.pages)

    @property
    def num_without_parts(self) -> int:
        """How many of `pages`, the first ones, no window is seen of."""
        return len(self.pages) - max([len(parts) for parts in self.parts.values()], default=0)

    def parts_of(self, pool: int, first: int, number: int) -> tuple[HostPart, ...]:
        """A window's parts of so many of `pages`, from one of them on."""
        parts = self.parts[pool]
        before = len(self.pages) - len(parts)
        return parts[max(0, first - before) : max(0, first + number - before)]

    def num_parts(self, first: int, number: int) -> dict[int, int]:
        """How many parts so many of `pages` have in each window's pool, from one of them on."""
        return {pool: len(self.parts_of(pool, first, number)) for pool in self.parts}

    def brings(self, other: HostPrefix) -> bool:
        """Whether another one can be continued on the device when this one has come."""
        pages, parts = self.pages[: len(other.pages)], self.parts
        return pages == other.pages and all(
            parts[pool][: len(theirs)] == theirs for pool, theirs in other.parts.items()
        )


@dataclass(eq=False, slots=True)
class Load:
    """Pages that come back from the host."""

    prefix: HostPrefix
    lease: Lease
    num_done: int = 0
    """Pages that have come, the first ones."""
    num_moving: int = 0
    """Pages after those, which the copy that runs brings."""
    given_up: bool = False
    """No further copy begins."""
    ended_at: float | None = None
    """When it ended, by the cache's clock: the prefix index has what has come."""

    @property
    def ended(self) -> bool:
        """Whether no more comes."""
        return self.ended_at is not None


@dataclass(frozen=True, slots=True)
class HostWrite:
    """Pages that go to the host, and parts of windows: of them, or of pages that are there."""

    node: RadixNode
    """That has them, and those before them."""
    pages: list[HostPage]
    parts: Mapping[int, list[HostPart]]
    """By the pool's number."""
    device_pages: tuple[Pages, ...]
    """For each pool where `pages` are, or the `parts` of it."""
    times_allocated: tuple[npt.NDArray[np.uint32], ...]
    """Of each device page, when the copy began."""
    nbytes: int
    """That are copied."""


class CopyOrders:
    """Orders copies of a stream, each by a number that no other ever has.

    Args:
        stream: copies.
        pools: the numbers of the device's.
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
        """Order a copy; returns its number, which its end names.

        Args:
            to_host: else back.
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
    """Pages that the host has room for, if its pools have so many each.

    If every pool has a window a page itself takes no room: so many are kept as prompts have whose
    ends fill the windows.
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
    """The pages of a node that is found; `NO_PAGE` for each if a window has passed them."""
    pages = node.pages[pool]
    return np.full(len(node.hashes) // HASH_BYTES, NO_PAGE, np.int32) if pages is None else pages


def token_bytes(token_ids: TokenIds) -> bytes:
    """Four bytes a token, the lowest first."""
    return np.ascontiguousarray(token_ids, "<i4").tobytes()


def split(joined: bytes, size: int) -> list[bytes]:
    """The whole pieces of `size` bytes."""
    return [joined[at : at + size] for at in range(0, len(joined) - size + 1, size)]


def split_tokens(token_ids: TokenIds, page_size: int) -> list[bytes]:
    """The tokens of each whole page, four bytes each."""
    return split(token_bytes(token_ids), 4 * page_size)
