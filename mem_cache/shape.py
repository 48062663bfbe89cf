"""The shape of the KV cache: its pools, and how many pages some tokens need in each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.signedinteger[Any]]
"""An array with one number a lease."""
Tokens = TypeVar("Tokens", int, Ints)


@dataclass(frozen=True, slots=True)
class PoolShape:
    """One pool of pages."""

    name: str
    total_pages: int
    window: int | None = None
    """Tokens that its layers look back, see `KVGeometry.window`; None: all of them."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The shape of all pools. A method's `pool` is the pool's number in `pools`."""

    pools: tuple[PoolShape, ...]
    page_size: int
    """Tokens a page, in every pool."""
    ahead: int
    """Tokens that a lease may be allocated beyond where it was last slid to."""

    @property
    def pool_numbers(self) -> range:
        """The numbers of the pools."""
        return range(len(self.pools))

    @property
    def windowed(self) -> tuple[bool, ...]:
        """For each pool, whether its layers have a window."""
        return tuple(pool.window is not None for pool in self.pools)

    def pages_for(self, tokens: Tokens) -> Tokens:
        """Compute the pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def most_pages(self, pool: int, tokens: int) -> int:
        """Compute the most pages of a pool that a lease of `tokens` tokens has at a time."""
        pages, window = self.pages_for(tokens), self.pools[pool].window
        if window is None:
            return pages
        return min(pages, window_pages(window, self.page_size, self.ahead))

    def pages_behind(self, pool: int) -> int:
        """Count the pages of a window pool that a token at the start of a page sees before it."""
        window = self.pools[pool].window
        assert window is not None, "it sees all of them"
        return self.pages_for(window - 1)

    def first_page_seen(self, pool: int, position: int) -> int:
        """Find the first page of a pool that is needed to continue at the page of `position`.

        A token at the start of that page sees no page of the pool before it.
        """
        window = self.pools[pool].window
        if window is None:
            return 0
        return max(0, position // self.page_size - self.pages_for(window - 1))


def window_pages(window: int, page_size: int, ahead: int) -> int:
    """Compute the most pages of a window pool that a lease ever has at the same time.

    The first is the page of the first token that the next one sees, were that the first of its
    page. The last is the page of the last of `ahead` tokens from the next one on.
    """
    behind = -(-(window - 1) // page_size)
    return behind + (page_size + ahead - 2) // page_size + 1
