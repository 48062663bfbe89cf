"""One node of the prefix index's tree: some pages' tokens, and their pages in every pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvrelay.mem_cache.account import NO_PAGES, Pages
from kvrelay.mem_cache.errors import ConservationError
from kvrelay.mem_cache.prefix.prefix_index import TokenIds
from kvrelay.wire.page_hash import HASH_BYTES


class RadixNode:
    """Tokens of one or more whole pages. Earlier tokens are in nodes above, later ones below.

    The node at the top of a tree has no tokens and no parent.

    Args:
        parent: the node above.
        key: the bytes of its first page's tokens, its key in the parent. At the top of a tree it is
            the namespace; a hidden node's key is no page's tokens.
        tokens: of whole pages.
        pages: for each pool; None in a window pool that has evicted them.
        locks: for each pool the number of locks on the pages.
    """

    __slots__ = (
        "children",
        "depth",
        "hashes",
        "hidden",
        "key",
        "locks",
        "pages",
        "parent",
        "queued",
        "retained_by",
        "retained_until",
        "retains_window",
        "tokens",
        "used",
    )

    def __init__(
        self,
        parent: RadixNode | None,
        key: bytes,
        tokens: TokenIds,
        pages: list[Pages | None],
        locks: list[int],
    ) -> None:
        self.parent = parent
        self.key = key
        self.hidden = False
        """Whether it, and everything below it, is no longer found."""
        self.depth = 0 if parent is None else parent.end
        """The number of tokens before this node's first."""
        self.tokens = tokens
        self.hashes = b""
        """The hashes of its pages, one after the other, if there is a `PrefixLog` and the node is
        found. At the top of a tree it is the root hash of the namespace."""
        self.pages = pages
        self.locks = locks
        self.children: dict[bytes, RadixNode] = {}
        self.used = 0
        """The number of its last match, by the tree's count of matches."""
        self.retained_until = 0.0
        """The moment, by the `Retention`'s clock, up to which others are evicted first; 0: it is
        not retained."""
        self.retained_by = ""
        """The tenant that retains it, if it is retained."""
        self.retains_window = False
        """Whether its pages of window pools are retained with it."""
        self.queued = [False] * len(pages)
        """For each pool whether it is in the `EvictionQueue`."""

    @property
    def end(self) -> int:
        """The number of tokens from the top to here, with this node's."""
        return self.depth + len(self.tokens)

    def path(self) -> Iterator[RadixNode]:
        """Yield this node and those above it, except the top."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def present(self, pool: int) -> Pages:
        """Get its pages of a pool; none if the pool has evicted them."""
        pages = self.pages[pool]
        return NO_PAGES if pages is None else pages

    def split(self, at: int, page_size: int) -> RadixNode:
        """Cut this node after `at` of its tokens, whole pages; it stays the lower half.

        A lock refers to the lowest node that it locks, which therefore must not change.

        Returns:
            The upper half, a new node with the same locks.
        """
        parent, cut = self.parent, at // page_size
        assert parent is not None
        upper_pages = [None if pages is None else pages[:cut] for pages in self.pages]
        upper = RadixNode(parent, self.key, self.tokens[:at], upper_pages, self.locks.copy())
        upper.used = self.used
        upper.retained_until, upper.retained_by = self.retained_until, self.retained_by
        upper.retains_window = self.retains_window
        upper.hashes, self.hashes = self.hashes[: cut * HASH_BYTES], self.hashes[cut * HASH_BYTES :]
        parent.children[self.key] = upper
        self.pages = [None if pages is None else pages[cut:] for pages in self.pages]
        self.parent, self.depth, self.tokens = upper, upper.end, self.tokens[at:]
        self.key = self.tokens[:page_size].tobytes()
        upper.children[self.key] = self
        return upper

    def can_join(self, child: RadixNode, every_pool_has_window: bool) -> bool:
        """Whether no branch, no lock and no pages end or begin between this node and its child.

        Nor does a retention.

        In each pool both must have pages, or neither, and both must have the same number of locks.
        Equal numbers could still be different locks: one that ends with this node, and one that
        begins with the child.

        But in a pool without a window every lock begins at the top. So equal numbers there are the
        same locks, and a lock ends at the same node in all pools. If every pool has a window, the
        nodes must not be locked at all.
        """
        if len(self.children) > 1 or self.locks != child.locks:
            return False
        if every_pool_has_window and any(self.locks):
            return False
        if (self.retained_until, self.retained_by) != (child.retained_until, child.retained_by):
            return False
        if self.retains_window is not child.retains_window:
            return False
        both = zip(self.pages, child.pages, strict=True)
        return all((own is None) == (below is None) for own, below in both)

    def absorb(self, above: Sequence[RadixNode]) -> None:
        """Merge the nodes above into this one; each of them has only one child.

        Args:
            above: from top to bottom; they no longer belong to the tree.
        """
        row, first = [*above, self], above[0]
        assert first.parent is not None
        self.tokens = np.concatenate([node.tokens for node in row])
        self.hashes = b"".join([node.hashes for node in row])
        self.pages = [
            None if own is None else np.concatenate([node.present(pool) for node in row])
            for pool, own in enumerate(self.pages)
        ]
        self.parent, self.depth, self.key = first.parent, first.depth, first.key
        self.parent.children[self.key] = self
        for node in above:
            node.parent = None

    def check(self, page_size: int, windows: Sequence[int | None]) -> None:
        """Raise `ConservationError` if the node is inconsistent."""
        parent = self.parent
        assert parent is not None
        last = len(self.tokens) // page_size
        fits = last * page_size == len(self.tokens) and all(
            pages is None or len(pages) == last for pages in self.pages
        )
        linked = parent.children.get(self.key) is self and self.depth == parent.end
        # Without a window every lock begins at the top, so it is on all nodes above its lowest.
        locked = all(
            self.locks[pool] >= sum(child.locks[pool] for child in self.children.values())
            for pool, window in enumerate(windows)
            if window is None
        )
        whole = all(pages is not None for pages in self.pages)
        whole = whole or bool(self.children) or any(self.locks)
        hashed = len(self.hashes) in (0, last * HASH_BYTES)
        if not (fits and linked and locked and whole and hashed and min(self.locks) >= 0):
            raise ConservationError(
                f"node at {self.depth}: {fits=} {linked=} {locked=} {whole=} {hashed=}"
            )
