"""Which pages the prefix index has begun, or ceased, to find: told to those who place requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from kvrelay.mem_cache.prefix.prefix_index import PrefixChanges, TokenIds
from kvrelay.mem_cache.prefix.radix_node import RadixNode
from kvrelay.wire.page_hash import HASH_BYTES, PageHashes


class PageListener(Protocol):
    """Hears of each page that is found, or no more; on the engine's thread, and must not block."""

    def stored(self, before: bytes | None, hashes: bytes, tokens: bytes) -> None:
        """Neighbouring pages are found from now on.

        Args:
            before: the hash of the page before; None: they are the first ones.
            hashes: theirs, one after the other.
            tokens: theirs, as int32.
        """
        ...

    def removed(self, hashes: bytes) -> None:
        """Neighbouring pages are found no more."""
        ...


class LowerTier(Protocol):
    """Keeps pages that the prefix index has, or had, outside of the device's memory."""

    def published(self, node: RadixNode) -> None:
        """The index has a node more, with its pages' hashes, or has pages of a window again.

        They may be copied.
        """
        ...

    def forget(self, key: bytes) -> None:
        """Keep neither the page of this hash nor what continues it."""
        ...

    def marks(self) -> Iterable[int]:
        """The marks of all that can be brought back."""
        ...


class PrefixLog:
    """Hashes the pages of the prefix index's nodes, and collects what changes.

    A page of which some pools lack their part counts as found; so where there is a
    window, what is told is what may be found.

    Args:
        hashes: of the worker's model.
        most_changes: marks that are kept between two calls of `take`.
        listener: hears of every page; None: nobody does.
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
        """In how many tiers each mark is found, if there is a lower one."""

    def attach(self, lower: LowerTier) -> None:
        """Tell a lower tier what is published and forgotten; what it has counts as found, too."""
        self._lower = lower

    def lower_marks(self) -> Iterable[int]:
        """The marks of what a lower tier has."""
        return () if self._lower is None else self._lower.marks()

    def forget(self, token_ids: TokenIds, start: int, namespace: str) -> None:
        """Let a lower tier forget `token_ids` from token `start` on, and what continues them."""
        end = start + self.hashes.page_size
        if self._lower is None or end > len(token_ids):
            return
        tokens = np.ascontiguousarray(token_ids[:end], "<i4").tobytes()
        keys = self.hashes.extend(self.hashes.root(namespace), tokens)
        self._lower.forget(keys[-HASH_BYTES:])

    def store(self, node: RadixNode) -> None:
        """A node was added below another one: hash its pages, from now on they are found.

        Nothing is, below a node that nobody finds any more: that has no hashes.
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
        """A node that is known has pages of a window again, which had evicted them."""
        if self._lower is not None and node.hashes:
            self._lower.published(node)

    def remove(self, nodes: Iterable[RadixNode]) -> None:
        """These nodes are found no more."""
        for node in nodes:
            self.record(self.marks(node), found=False)
            if self._listener is not None and node.hashes:
                self._listener.removed(node.hashes)
            node.hashes = b""

    def marks(self, node: RadixNode) -> list[int]:
        """The marks of a node's pages."""
        return self.hashes.marks(node.hashes, node.depth // self.hashes.page_size)

    def take(self) -> PrefixChanges | None:
        """What has changed since the last call; None: nothing."""
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
        """One tier finds these marks from now on, or no more. The last change of a mark counts."""
        if self._lower is not None:
            marks = self._count_tiers(marks, found)
        if self._overflown:
            return
        self._changes.update(dict.fromkeys(marks, found))
        if len(self._changes) > self._most_changes:
            self._changes, self._overflown = {}, True

    def _count_tiers(self, marks: Iterable[int], found: bool) -> list[int]:
        """Those of the marks that no other tier finds."""
        alone = []
        for mark in marks:
            tiers = self._tiers[mark] = self._tiers[mark] + (1 if found else -1)
            if not tiers:
                del self._tiers[mark]
            if tiers == found:
                alone.append(mark)
        return alone
