"""The nodes of the prefix index: one tree for each namespace, in which paths are found and cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np

from kvrelay.mem_cache.account import NO_PAGES, Pages
from kvrelay.mem_cache.prefix.eviction_queue import EvictionQueue
from kvrelay.mem_cache.prefix.prefix_index import TokenIds
from kvrelay.mem_cache.prefix.prefix_log import PrefixLog
from kvrelay.mem_cache.prefix.radix_node import RadixNode
from kvrelay.mem_cache.prefix.retention import Retention


class RadixForest:
    """The trees of nodes: finds, splits, joins, adds and removes nodes. It knows nothing of locks.

    Args:
        page_size: tokens a page.
        queues: for each pool the queue to which evictable nodes are added.
        every_pool_has_window: whether locks may begin anywhere in every pool.
        long_row: the number of nodes without branches from which a row is joined.
        retention: hears which nodes are split, joined and removed.
        log: hears which nodes are found; None: there is none.
    """

    def __init__(
        self,
        page_size: int,
        queues: Sequence[EvictionQueue],
        *,
        every_pool_has_window: bool,
        long_row: int,
        retention: Retention,
        log: PrefixLog | None = None,
    ) -> None:
        self._page_size = page_size
        self._queues = queues
        self._every_pool_has_window = every_pool_has_window
        self._long_row = long_row
        self._retention = retention
        self._log = log
        self._tops: dict[str, RadixNode] = {}
        self._clock = count(1)

    def nodes(self) -> Iterator[RadixNode]:
        """Yield all nodes but the tops. For audits and tests."""
        for top in self._tops.values():
            for child in top.children.values():
                yield from _subtree(child)

    def marks(self) -> Iterator[int]:
        """Yield the marks of all that is found, if there is a log."""
        if self._log is not None:
            for node in self.nodes():
                yield from self._log.marks(node)

    # Finding

    def top(self, namespace: str) -> RadixNode:
        """Get the top of a namespace's tree; a new one is not kept until something is inserted."""
        top = self._tops.get(namespace)
        if top is None:
            pages: list[Pages | None] = [NO_PAGES for _ in self._queues]
            tokens = np.empty(0, np.int32)
            top = RadixNode(None, namespace.encode(), tokens, pages, [0] * len(pages))
        return top

    def descend(self, node: RadixNode, token_ids: TokenIds) -> tuple[RadixNode, int]:
        """Find the node at which the longest known prefix ends, and count that prefix's tokens."""
        size, now, at = self._page_size, next(self._clock), 0
        end = len(token_ids) // size * size
        while at < end:
            child = node.children.get(token_ids[at : at + size].tobytes())
            if child is None:
                break
            same = self._same(child.tokens, token_ids[at:end])
            at += same
            if same < len(child.tokens):
                node = self.split(child, same)
                node.used = now
                break
            node = child
            node.used = now
        return node, at

    def _same(self, ours: TokenIds, theirs: TokenIds) -> int:
        """Count the tokens in which they agree from the start, in whole pages."""
        length = min(len(ours), len(theirs))
        differs = ours[:length] != theirs[:length]
        first = int(differs.argmax())
        same = first if differs[first] else length
        return same // self._page_size * self._page_size

    # Splitting and joining

    def split_at(self, lowest: RadixNode, position: int) -> None:
        """Split the path to `lowest` so that a node begins at token `position`."""
        for node in lowest.path():
            if node.depth <= position:
                if node.depth < position:
                    self.split(node, position - node.depth)
                return

    def split(self, node: RadixNode, at: int) -> RadixNode:
        """Cut `node` after `at` of its tokens; it stays the lower half. Returns the upper one."""
        upper = node.split(at, self._page_size)
        self._retention.split(upper)
        for queue in self._queues:
            queue.push(upper)
        return upper

    def join_rows(self, lowest: RadixNode) -> None:
        """Join the long rows on the path to `lowest`, all of which was matched just now."""
        row = [lowest]
        for node in list(lowest.path())[1:]:
            if not node.can_join(row[-1], self._every_pool_has_window):
                self._join(row[::-1])
                row = []
            row.append(node)
        self._join(row[::-1])

    def _join(self, row: list[RadixNode]) -> None:
        """Merge a row, from top to bottom, into its lowest node if the row is long."""
        if len(row) < self._long_row:
            return
        row[-1].absorb(row[:-1])
        self._retention.join(len(row) - 1, row[-1])
        for queue in self._queues:
            queue.push(row[-1])

    # Adding and removing

    def add_child(
        self, parent: RadixNode, tokens: TokenIds, pages: list[Pages | None]
    ) -> RadixNode:
        """Put a new node below `parent`, with the pages of each pool or None."""
        key = tokens[: self._page_size].tobytes()
        child = RadixNode(parent, key, tokens, pages, [0] * len(pages))
        child.used = parent.used or next(self._clock)
        parent.children[key] = child
        for queue in self._queues:
            queue.count_pages(child)
        if self._log is not None:
            self._log.store(child)
        return child

    def keep_top(self, namespace: str, top: RadixNode) -> None:
        """Keep a namespace's tree from now on, because something is added to it."""
        self._tops[namespace] = top
        if self._log is not None:
            top.hashes = self._log.hashes.root(namespace)

    def hide(self, node: RadixNode) -> None:
        """Make a node and all below it unfindable; locks on them are ended as usual."""
        if self._log is not None:
            self._log.remove(list(_subtree(node)))
        for below in _subtree(node):
            if below.retained_until:
                self._retention.drop(below)
                for queue in self._queues:
                    queue.push(below)
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        # No page's tokens are nine bytes.
        node.key, node.hidden = next(self._clock).to_bytes(9), True
        parent.children[node.key] = node

    def remove_leaf(self, leaf: RadixNode) -> RadixNode:
        """Remove a leaf, and the tree if it is empty now. Returns the node above the leaf."""
        parent = leaf.parent
        assert parent is not None
        if self._log is not None:
            self._log.remove([leaf])
        self._retention.drop(leaf)
        del parent.children[leaf.key]
        leaf.parent = None
        if parent.parent is None and not parent.children:
            del self._tops[parent.key.decode()]
        return parent


def _subtree(node: RadixNode) -> Iterator[RadixNode]:
    """Yield a node and all that is below it."""
    todo = [node]
    while todo:
        node = todo.pop()
        todo += node.children.values()
        yield node
