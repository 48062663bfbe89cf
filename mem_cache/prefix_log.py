"""Which pages the prefix index has begun, or ceased, to find: told to those who place requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from kvrelay.mem_cache.prefix_index import PrefixChanges
from kvrelay.mem_cache.radix_node import RadixNode
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
            self._record(node, found=True)
            if self._listener is not None:
                follows = None if parent.parent is None else before
                self._listener.stored(follows, node.hashes, tokens)

    def remove(self, nodes: Iterable[RadixNode]) -> None:
        """These nodes are found no more."""
        for node in nodes:
            self._record(node, found=False)
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

    def _record(self, node: RadixNode, *, found: bool) -> None:
        """The last change of a mark counts."""
        if self._overflown:
            return
        self._changes.update(dict.fromkeys(self.marks(node), found))
        if len(self._changes) > self._most_changes:
            self._changes, self._overflown = {}, True
