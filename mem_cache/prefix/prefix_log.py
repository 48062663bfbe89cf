"""The pages that the prefix index begins, or ceases, to find, reported to routers and listeners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from kvrelay.mem_cache.prefix.prefix_index import PrefixChanges, TokenIds
from kvrelay.mem_cache.prefix.radix_node import RadixNode
from kvrelay.wire.page_hash import HASH_BYTES, PageHashes


class PageListener(Protocol):
    """An interface that hears of found pages; on the engine's thread, and must not block."""

    def stored(self, before: bytes | None, hashes: bytes, tokens: bytes) -> None:
        """Note that a run of pages is found from now on.

        Args:
            before: the hash of the page before; None: the run begins a prompt.
            hashes: of the pages, one after the other.
            tokens: of the pages, as int32.
        """
        ...

    def removed(self, hashes: bytes) -> None:
        """Note that a run of pages is no longer found."""
        ...


class LowerTier(Protocol):
    """An interface to a tier that keeps pages of the prefix index outside of the device."""

    def published(self, node: RadixNode) -> None:
        """Note a new node of the index with its pages' hashes, or one that has window pages again.

        Its pages may be copied.
        """
        ...

    def forget(self, key: bytes) -> None:
        """Drop the page of this hash and its continuations."""
        ...

    def marks(self) -> Iterable[int]:
        """List the marks of all pages that can be brought back."""
        ...


class PrefixLog:
    """The page hashes of the prefix index's nodes, and the changes since they were last taken.

    A page that some pools lack counts as found. So with a window the reports contain pages that may
    be found.

    Args:
        hashes: of the worker's model.
        most_changes: marks that are kept between two calls of `take`.
        listener: hears of every page; None: there is none.
    """

    def __init__(
        self,
        hashes: PageHashes,
        most_changes: int = 1 << 18,
        listener: PageListener | None = None,
    ) -> None:
        self.hashes = hashes
        self._listener = listener
        self._most_changes = most_changes
        self._changes: dict[int, bool] = {}
        self._overflown = False
        self._lower: LowerTier | None = None
        self._tiers: Counter[int] = Counter()
        """The number of tiers in which each mark is found, if there is a lower one."""

    def attach(self, lower: LowerTier) -> None:
        """Report published and forgotten pages to a lower tier, whose pages count as found, too."""
        self._lower = lower

    def lower_marks(self) -> Iterable[int]:
        """List the marks of a lower tier's pages."""
        return () if self._lower is None else self._lower.marks()

    def forget(self, token_ids: TokenIds, start: int, namespace: str) -> None:
        """Make a lower tier forget `token_ids` from token `start` on, and their continuations."""
        end = start + self.hashes.page_size
        if self._lower is None or end > len(token_ids):
            return
        tokens = np.ascontiguousarray(token_ids[:end], "<i4").tobytes()
        keys = self.hashes.extend(self.hashes.root(namespace), tokens)
        self._lower.forget(keys[-HASH_BYTES:])

    def store(self, node: RadixNode) -> None:
        """Hash the pages of a node that was added below another one; they are found from now on.

        Below a hidden node, which has no hashes, none is found.
        """
        parent = node.parent
        assert parent is not None
        if parent.hashes:
            before = parent.hashes[-HASH_BYTES:]
            tokens = np.ascontiguousarray(node.tokens, "<i4").tobytes()
            node.hashes = self.hashes.extend(before, tokens)
            self.record(self.marks(node), found=True)
            if self._listener is not None:
                follows = None if parent.parent is None else before
                self._listener.stored(follows, node.hashes, tokens)
            if self._lower is not None:
                self._lower.published(node)

    def restore(self, node: RadixNode) -> None:
        """Report a node that has pages of a window again after their eviction."""
        if self._lower is not None and node.hashes:
            self._lower.published(node)

    def remove(self, nodes: Iterable[RadixNode]) -> None:
        """Note that these nodes are no longer found."""
        for node in nodes:
            self.record(self.marks(node), found=False)
            if self._listener is not None and node.hashes:
                self._listener.removed(node.hashes)
            node.hashes = b""

    def marks(self, node: RadixNode) -> list[int]:
        """Compute the marks of a node's pages."""
        return self.hashes.marks(node.hashes, node.depth // self.hashes.page_size)

    def take(self) -> PrefixChanges | None:
        """Take the changes since the last call. Returns None if there are none."""
        if self._overflown:
            self._overflown = False
            return PrefixChanges(overflown=True)
        if not self._changes:
            return None
        changes, self._changes = self._changes, {}
        return PrefixChanges(
            tuple(mark for mark, found in changes.items() if found),
            tuple(mark for mark, found in changes.items() if not found),
        )

    def record(self, marks: Iterable[int], *, found: bool) -> None:
        """Note that one tier finds these marks, or not any more. A mark's last change counts."""
        if self._lower is not None:
            marks = self._count_tiers(marks, found)
        if self._overflown:
            return
        self._changes.update(dict.fromkeys(marks, found))
        if len(self._changes) > self._most_changes:
            self._changes, self._overflown = {}, True

    def _count_tiers(self, marks: Iterable[int], found: bool) -> list[int]:
        """Select the marks that no other tier finds."""
        alone = []
        for mark in marks:
            tiers = self._tiers[mark] = self._tiers[mark] + (1 if found else -1)
            if not tiers:
                del self._tiers[mark]
            if tiers == found:
                alone.append(mark)
        return alone
