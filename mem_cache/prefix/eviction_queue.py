"""The prefix index's counts and eviction order of one pool."""

from __future__ import annotations

import heapq
from itertools import count

from kvrelay.mem_cache.account import Pages
from kvrelay.mem_cache.prefix.radix_node import RadixNode


class EvictionQueue:
    """The nodes with pages of one pool, and the least recently used of those that are not locked.

    In a pool without a window only leaves can be evicted, in one with a window any node.

    Args:
        pool: its number.
        windowed: whether its layers have a window.
    """

    def __init__(self, pool: int, *, windowed: bool) -> None:
        self.size = 0
        """The number of pages that the tree's nodes have."""
        self.evictable = 0
        """The number of pages that no lock keeps."""
        self._pool = pool
        self._windowed = windowed
        # By last use, which is out of date until the node is looked at.
        self._queue: list[tuple[int, int, RadixNode]] = []
        self._most_entries = 64
        self._tie = count()

    # Locks

    def lock(self, lowest: RadixNode, start: int) -> None:
        """Lock `lowest` and the nodes above it that begin at token `start` or later."""
        pool, node = self._pool, lowest
        while node.parent is not None and node.depth >= start:
            if node.locks[pool] == 0:
                self.evictable -= len(node.present(pool))
            node.locks[pool] += 1
            node = node.parent

    def lock_again(self, lowest: RadixNode, start: int) -> None:
        """Lock again what is locked already."""
        for node in lowest.path():
            if node.depth < start:
                return
            assert node.locks[self._pool], "what is locked again is not locked"
            node.locks[self._pool] += 1

    def unlock(self, lowest: RadixNode, start: int) -> None:
        """End one lock."""
        pool, node = self._pool, lowest
        while node.parent is not None and node.depth >= start:
            node.locks[pool] -= 1
            pages = node.pages[pool]
            if node.locks[pool] == 0 and pages is not None:
                self.evictable += len(pages)
                # The rest of `is_evictable` is known here, where every finished request passes.
                if not node.queued[pool] and (self._windowed or not node.children):
                    self._enqueue(node)
            node = node.parent

    # Pages

    def count_pages(self, node: RadixNode) -> None:
        """Count the pages of a node that had none of this pool before."""
        number = len(node.present(self._pool))
        self.size += number
        self.evictable += 0 if node.locks[self._pool] else number

    def drop_pages(self, node: RadixNode) -> Pages:
        """Take the pages of this pool from an unlocked node. Returns them."""
        pages = node.present(self._pool)
        self.size -= len(pages)
        self.evictable -= len(pages)
        node.pages[self._pool] = None
        return pages

    # What is evicted next

    def is_evictable(self, node: RadixNode) -> bool:
        """Whether a node's pages of this pool may be evicted now."""
        pool = self._pool
        if node.locks[pool] or node.parent is None or node.pages[pool] is None:
            return False
        return self._windowed or not node.children

    def push(self, node: RadixNode) -> None:
        """Queue a node if it may be evicted and is not queued yet."""
        if not node.queued[self._pool] and self.is_evictable(node):
            self._enqueue(node)

    def _enqueue(self, node: RadixNode) -> None:
        if len(self._queue) > self._most_entries:
            self._forget_removed()
        node.queued[self._pool] = True
        heapq.heappush(self._queue, (node.used, next(self._tie), node))

    def pop(self) -> RadixNode | None:
        """Take the least recently used node that may be evicted and is not retained in this pool.

        A retained node is queued again by `push`, when its retention has ended. Returns None if
        there is no other.
        """
        while self._queue:
            used, _, node = heapq.heappop(self._queue)
            node.queued[self._pool] = False
            if node.retained_until and (node.retains_window or not self._windowed):
                continue
            if used == node.used and self.is_evictable(node):
                return node
            self.push(node)
        return None

    def _forget_removed(self) -> None:
        """Drop the entries of nodes that no longer belong to the tree."""
        self._queue = [entry for entry in self._queue if entry[2].parent is not None]
        heapq.heapify(self._queue)
        self._most_entries = 2 * len(self._queue) + 64
