"""The prefix index: a radix tree over whole pages.

A node has the tokens of one or more pages and, for each pool, the pages themselves; its children
differ in their first page. A node is split where a match or an insertion ends inside of it.

The idea is SGLang's RadixAttention (Zheng et al., 2024), with its variant for sliding windows. A
node may have lost its pages of a window pool, but an unlocked leaf may not. A prefix can be
continued from where the tokens that its next token sees are there.

Pages that are locked stay. The others are evictable, least recently used first, and those that are
retained (`retention.py`) after the others. A pool without a
window is evicted leaf by leaf, a window pool node by node. A leaf that would lose its window's
pages is removed with all of its pages.

A split may outlive its purpose, and a look-up takes a microsecond a node. So a long row of nodes
without branches is joined when it is matched to its end, because then all of them have the same
last use. A short row is not joined: the next lock would split it again, and eviction takes a node
at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvrelay.mem_cache.account import NO_PAGE, NO_PAGES, Pages
from kvrelay.mem_cache.errors import ConservationError
from kvrelay.mem_cache.prefix.eviction_queue import EvictionQueue
from kvrelay.mem_cache.prefix.prefix_index import Inserted, PrefixChanges, PrefixLock, TokenIds
from kvrelay.mem_cache.prefix.prefix_log import PrefixLog
from kvrelay.mem_cache.prefix.radix_forest import RadixForest
from kvrelay.mem_cache.prefix.radix_node import RadixNode
from kvrelay.mem_cache.prefix.retention import Retention


@dataclass(frozen=True, slots=True)
class _LockedNodes:
    """The nodes that a lock is on, so that it can be ended."""

    lowest: RadixNode
    """The lowest locked node; after a split it is still the lowest."""
    starts: tuple[int, ...]
    """For each pool the tokens before the uppermost node; a split does not change them."""


class RadixTree:
    """A `PrefixIndex` that keeps everything until it is evicted.

    Args:
        page_size: tokens a page.
        windows: for each pool the tokens that its layers look back; None: all.
        long_row: the number of nodes without branches from which a row is joined.
        retention: orders what is evicted last; None: nothing is retained.
        log: collects which pages are found, and which no longer; None: there is none.
    """

    keeps = True

    def __init__(
        self,
        page_size: int,
        windows: Sequence[int | None],
        *,
        long_row: int = 8,
        retention: Retention | None = None,
        log: PrefixLog | None = None,
    ) -> None:
        self._page_size = page_size
        self._windows = RadixWindows(page_size, windows)
        self._pools = range(len(windows))
        self._nothing = (NO_PAGES,) * len(windows)
        self._queues = [
            EvictionQueue(pool, windowed=window is not None) for pool, window in enumerate(windows)
        ]
        self._retention = retention = retention or Retention(0)
        self._forest = RadixForest(
            page_size,
            self._queues,
            every_pool_has_window=None not in windows,
            long_row=long_row,
            retention=retention,
            log=log,
        )
        self.log = self._log = log

    # PrefixIndex

    def match(self, token_ids: TokenIds, namespace: str = "") -> PrefixLock:
        """See `PrefixIndex`."""
        node, _ = self._forest.descend(self._forest.top(namespace), token_ids)
        self._forest.join_rows(node)
        return self._lock(self._windows.continuable(node))

    def hold(self, token_ids: TokenIds, namespace: str = "") -> PrefixLock:
        """See `PrefixIndex`."""
        node, _ = self._forest.descend(self._forest.top(namespace), token_ids)
        return self._lock(node, whole=True)

    def lock_again(self, lock: PrefixLock) -> None:
        """See `PrefixIndex`."""
        locked = lock.entry
        assert isinstance(locked, _LockedNodes)
        for queue, start in zip(self._queues, locked.starts, strict=True):
            queue.lock_again(locked.lowest, start)

    def unlock(self, lock: PrefixLock) -> tuple[Pages, ...]:
        """End one lock. Pages stay until they are evicted, unless no prefix can continue there.

        The exception is a leaf that has lost its pages of a window pool while it was locked.
        """
        locked = lock.entry
        assert isinstance(locked, _LockedNodes)
        for queue, start in zip(self._queues, locked.starts, strict=True):
            queue.unlock(locked.lowest, start)
        return self._remove_useless(locked.lowest)

    def unlock_pool(self, lock: PrefixLock, pool: int) -> tuple[PrefixLock, tuple[Pages, ...]]:
        """See `PrefixIndex`. It lets go of the same pages as `unlock`, if no pool is locked now."""
        locked = lock.entry
        assert isinstance(locked, _LockedNodes)
        self._queues[pool].unlock(locked.lowest, locked.starts[pool])
        pages, starts = list(lock.pages), list(locked.starts)
        pages[pool], starts[pool] = np.full_like(pages[pool], NO_PAGE), locked.lowest.end
        left = PrefixLock(tuple(pages), _LockedNodes(locked.lowest, tuple(starts)))
        return left, self._remove_useless(locked.lowest)

    def insert(self, token_ids: TokenIds, pages: Sequence[Pages], namespace: str = "") -> Inserted:
        """See `PrefixIndex`."""
        taken: list[list[Pages]] = [[] for _ in self._pools]
        token_ids = token_ids[: len(token_ids) // self._page_size * self._page_size]
        top = self._forest.top(namespace)
        node, matched = self._forest.descend(top, token_ids)
        for above in list(node.path()):
            self._restore_pages(above, pages, taken)
        if matched < len(token_ids) and self._windows.can_end(node, pages, matched, len(token_ids)):
            self._forest.keep_top(namespace, top)
            node = self._append(node, token_ids, pages, taken)
        return Inserted(self._lock(self._windows.continuable(node)), _joined(taken))

    def share(self, token_ids: TokenIds, pages: Sequence[Pages], namespace: str = "") -> Inserted:
        """Call `insert`: everything inserted here is kept for all requests."""
        return self.insert(token_ids, pages, namespace)

    def finds(self, lock: PrefixLock) -> bool:
        """See `PrefixIndex`."""
        locked = lock.entry
        assert isinstance(locked, _LockedNodes)
        return not any(node.hidden for node in locked.lowest.path())

    def forget(self, token_ids: TokenIds, start: int, namespace: str = "") -> None:
        """See `PrefixIndex`."""
        lowest, known = self._forest.descend(self._forest.top(namespace), token_ids)
        start = start // self._page_size * self._page_size
        if self._log is not None:
            self._log.forget(token_ids, start, namespace)
        if start < known:
            self._forest.split_at(lowest, start)
            self._forest.hide(next(node for node in lowest.path() if node.depth == start))

    def evict(self, pool: int, num_pages: int) -> tuple[Pages, ...]:
        """See `PrefixIndex`."""
        evicted: list[list[Pages]] = [[] for _ in self._pools]
        queue = self._queues[pool]
        left = max(0, queue.evictable - num_pages)
        self._queue_again(self._retention.end_due())
        while queue.evictable > left:
            node = queue.pop()
            if node is None:
                self._queue_again([self._retention.give_up()])
            elif node.children or any(node.locks):
                evicted[pool].append(queue.drop_pages(node))
            else:
                self._remove_leaf(node, evicted)
        return _joined(evicted)

    def _queue_again(self, nodes: Iterable[RadixNode]) -> None:
        """Queue nodes whose retention has ended."""
        for node in nodes:
            for queue in self._queues:
                queue.push(node)

    def retain(self, token_ids: TokenIds, seconds: float, namespace: str = "") -> None:
        """See `PrefixIndex`."""
        node, _ = self._forest.descend(self._forest.top(namespace), token_ids)
        self._retention.retain(node, namespace.partition("/")[0], seconds)
        if self._windows.any:
            self._queue_again(node.path())  # a window may have left some of them

    def retained_tokens(self) -> int:
        """See `PrefixIndex`."""
        self._queue_again(self._retention.end_due())
        return self._retention.tokens

    def evictable(self, pool: int) -> int:
        """See `PrefixIndex`."""
        return self._queues[pool].evictable

    def size(self, pool: int) -> int:
        """See `PrefixIndex`."""
        return self._queues[pool].size

    def take_changes(self) -> PrefixChanges | None:
        """See `PrefixIndex`."""
        return None if self._log is None else self._log.take()

    def marks(self) -> tuple[int, ...] | None:
        """See `PrefixIndex`."""
        if self._log is None:
            return None
        return tuple(dict.fromkeys((*self._forest.marks(), *self._log.lower_marks())))

    def audit(self) -> tuple[Pages, ...]:
        """See `PrefixIndex`."""
        pages: list[list[Pages]] = [[] for _ in self._pools]
        evictable = [0] * len(self._pools)
        for node in self._forest.nodes():
            node.check(self._page_size, self._windows.by_pool)
            for pool in self._pools:
                here = node.present(pool)
                pages[pool].append(here)
                evictable[pool] += 0 if node.locks[pool] else len(here)
        self._retention.audit(self._forest.nodes())
        counted = [queue.evictable for queue in self._queues]
        if evictable != counted:
            raise ConservationError(f"evictable {counted}, in truth {evictable}")
        return _joined(pages)

    # Locking

    def _lock(self, node: RadixNode, *, whole: bool = False) -> PrefixLock:
        """Lock in each pool what a token after `node` sees, and at least the last page.

        ::

            0 ............ start ............ node.end
            | not locked   | locked           |

        `start` is the beginning of the pages that the token sees; nodes are split so that one
        begins there.

        Args:
            node: where the prefix ends.
            whole: lock the prefix from its start in every pool.
        """
        starts = [0] * len(self._pools)
        if not whole:
            for pool in self._pools:
                starts[pool] = self._windows.lock_start(pool, node.end)
                self._forest.split_at(node, starts[pool])
        pages = []
        for pool, start in enumerate(starts):
            self._queues[pool].lock(node, start)
            pages.append(self._pages_since(node, pool, start))
        return PrefixLock(tuple(pages), _LockedNodes(node, tuple(starts)))

    def _pages_since(self, node: RadixNode, pool: int, start: int) -> Pages:
        """Get the pages of the prefix that ends with `node`; `NO_PAGE` before token `start`."""
        size = self._page_size
        pages = np.full(node.end // size, NO_PAGE, np.int32)
        for above in node.path():
            if above.depth < start:
                break
            here, first = above.present(pool), above.depth // size
            pages[first : first + len(here)] = here
        return pages

    # Inserting

    def _restore_pages(
        self, node: RadixNode, pages: Sequence[Pages], taken: list[list[Pages]]
    ) -> None:
        """Replace pages that a window pool has evicted by the offered pages.

        If the offer has only the last of them, the node is split there.
        """
        restored = False
        for pool, queue in enumerate(self._queues):
            if node.pages[pool] is not None:
                continue
            offered = pages[pool][node.depth // self._page_size : node.end // self._page_size]
            lacking = _num_lacking(offered)
            if lacking == len(offered):
                continue
            if lacking:
                self._forest.split(node, lacking * self._page_size)
            node.pages[pool] = offered[lacking:]
            taken[pool].append(offered[lacking:])
            queue.count_pages(node)
            queue.push(node)
            restored = True
        if restored and self._log is not None:
            self._log.restore(node)

    def _append(
        self,
        node: RadixNode,
        token_ids: TokenIds,
        pages: Sequence[Pages],
        taken: list[list[Pages]],
    ) -> RadixNode:
        """Put the tokens after `node` below it. Returns the leaf.

        A node has all of its pages of a pool or none. The offer may lack the first pages of a
        window pool. The tokens are cut there.
        """
        size = self._page_size
        first, last = node.end // size, len(token_ids) // size
        cuts = {first, last} | {first + _num_lacking(offered[first:last]) for offered in pages}
        for start, end in pairwise(sorted(cuts)):
            here = [None if one[start] == NO_PAGE else one[start:end] for one in pages]
            node = self._forest.add_child(node, token_ids[start * size : end * size].copy(), here)
            for pool in self._pools:
                taken[pool].append(node.present(pool))
        for above in node.path():
            for queue in self._queues:
                queue.push(above)
        return node

    # Evicting

    def _remove_useless(self, node: RadixNode) -> tuple[Pages, ...]:
        """Remove a node that no prefix can continue from, if it is one. Returns its pages."""
        if not _is_useless(node):
            return self._nothing
        gone: list[list[Pages]] = [[] for _ in self._pools]
        self._remove_leaf(node, gone)
        return _joined(gone)

    def _remove_leaf(self, node: RadixNode, evicted: list[list[Pages]]) -> None:
        """Remove a leaf, and nodes above that would become leaves without window pages."""
        assert not any(node.locks), "a locked leaf is evicted"
        for pool, queue in enumerate(self._queues):
            evicted[pool].append(queue.drop_pages(node))
        parent = self._forest.remove_leaf(node)
        if _is_useless(parent):
            self._remove_leaf(parent, evicted)
        elif not parent.children:
            for queue in self._queues:
                queue.push(parent)


def _is_useless(node: RadixNode) -> bool:
    """Whether it is an unlocked leaf that lacks its pages of a window pool."""
    if node.parent is None or node.children or any(node.locks):
        return False
    return any(pages is None for pages in node.pages)


def _num_lacking(offered: Pages) -> int:
    """Count the offered pages that are `NO_PAGE`, which are always the first ones."""
    return int((offered == NO_PAGE).sum())


def _joined(parts: list[list[Pages]]) -> tuple[Pages, ...]:
    return tuple(np.concatenate(some) if some else NO_PAGES for some in parts)


class RadixWindows:
    """The points from which a prefix can be continued, and the part of it that must be locked.

    Args:
        page_size: tokens a page.
        windows: for each pool the tokens that its layers look back; None: all.
    """

    def __init__(self, page_size: int, windows: Sequence[int | None]) -> None:
        self.by_pool = tuple(windows)
        self.any = any(window is not None for window in windows)
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
