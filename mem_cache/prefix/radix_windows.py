"""The pages in a radix tree that a token sees, in pools with a window and without."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.mem_cache.account import NO_PAGE, Pages
from kvrelay.mem_cache.prefix.radix_node import RadixNode


class RadixWindows:
    """The points from which a prefix can be continued, and the part of it that must be locked.

    Args:
        page_size: tokens a page.
        windows: for each pool the tokens that its layers look back; None: all.
    """

    def __init__(self, page_size: int, windows: Sequence[int | None]) -> None:
        self.by_pool = tuple(windows)
        self._page_size = page_size

    def first_seen(self, pool: int, position: int) -> int:
        """Find the first position that a token at `position` sees in a pool's layers."""
        window = self.by_pool[pool]
        return 0 if window is None else max(0, position - window + 1)

    def lock_start(self, pool: int, end: int) -> int:
        """Find the start of the lock on a prefix of `end` tokens, a multiple of the page size.

        Its last page is locked even if the next token does not see it.
        """
        return max(0, min(self.first_seen(pool, end), end - 1)) // self._page_size * self._page_size

    def continuable(self, node: RadixNode) -> RadixNode:
        """Find the lowest node from `node` upwards after which every window's pages are there."""
        while node.parent is not None:
            if all(self.sees(node, pool, node.end) for pool in range(len(self.by_pool))):
                return node
            node = node.parent
        return node

    def sees(self, node: RadixNode, pool: int, position: int) -> bool:
        """Whether `node` and those above it have all pages that a token at `position` sees."""
        if self.by_pool[pool] is None:
            return True
        first = self.first_seen(pool, position)
        for above in node.path():
            if above.pages[pool] is None:
                return False
            if above.depth <= first:
                return True
        return True

    def can_end(self, node: RadixNode, pages: Sequence[Pages], matched: int, end: int) -> bool:
        """Whether a leaf that ends at `end` would have all of its windows' pages.

        Args:
            node: above the leaf.
            pages: for each pool the offered pages of the leaf and of all above it.
            matched: tokens up to the end of `node`.
            end: tokens up to the end of the leaf.
        """
        size = self._page_size
        for pool, offered in enumerate(pages):
            first = min(self.first_seen(pool, end), end - 1)
            if (offered[max(first, matched) // size : end // size] == NO_PAGE).any():
                return False
            if first < matched and not self.sees(node, pool, end):
                return False
        return True
