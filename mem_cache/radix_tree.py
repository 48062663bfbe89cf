"""The prefix index: a radix tree over whole pages.

A node has the tokens of one or more pages and, for each pool, the pages
themselves; its children differ in their first page. A node is split where a
match or an insertion ends inside of it. The idea is SGLang's RadixAttention
(Zheng et al., 2024), and so is that of its variant for sliding windows: a node
may have lost its pages of a window pool, a leaf may not, and a prefix can be
continued from where the tokens that its next token sees are there.

What is locked stays. The rest is evictable, and goes least recently used
first: from a pool without a window leaf by leaf; from a window pool node by
node, and a leaf that would lose its window's pages goes altogether.

What a split was for may be gone, and looking up takes a microsecond a node. So
a long row of nodes without branches is joined when it is matched to its end:
then all of them were used last at the same time. A short one is not: the next
lock would split it again, and a node is what is evicted at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise

import numpy as np

from kvrelay.mem_cache.account import NO_PAGES, Pages
from kvrelay.mem_cache.errors import ConservationError
from kvrelay.mem_cache.prefix_index import NO_PAGE, Inserted, PrefixLock, TokenIds


class _Node:
    """Some pages' tokens: what comes before them is above, what comes after them below."""

    __slots__ = ("children", "depth", "key", "locks", "pages", "parent", "queued", "tokens", "used")

    def __init__(
        self,
        parent: _Node | None,
        key: bytes,
        tokens: TokenIds,
        pages: list[Pages | None],
        locks: list[int],
    ) -> None:
        self.parent = parent
        self.key = key
        """Its first page's tokens, under which the parent has it; a root's namespace."""
        self.depth = 0 if parent is None else parent.end
        """Tokens before this node's first."""
        self.tokens = tokens
        self.pages = pages
        """For each pool; None in a window pool that has let them go."""
        self.locks = locks
        self.children: dict[bytes, _Node] = {}
        self.used = 0
        self.queued = [False] * len(pages)

    @property
    def end(self) -> int:
        """Tokens from the root to here, this node's included."""
        return self.depth + len(self.tokens)

    def path(self) -> Iterator[_Node]:
        """This node and those above it, but for the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


@dataclass(frozen=True, slots=True)
class _Held:
    """What a lock needs to know to be undone."""

    node: _Node
    """The lowest; a split leaves it the lowest."""
    starts: tuple[int, ...]
    """For each pool the depth of the uppermost node that is locked; a split leaves it as it is."""


class RadixTree:
    """See `PrefixIndex`.

    Args:
        page_size: tokens a page.
        windows: for each pool the tokens that its layers look back; None: all.
        long_row: nodes without branches that are joined.
    """

    def __init__(self, page_size: int, windows: Sequence[int | None], *, long_row: int = 8) -> None:
        self._long_row = long_row
        self._page_size = page_size
        self._windows = tuple(windows)
        self._pools = range(len(windows))
        self._none = (NO_PAGES,) * len(windows)
        self._roots: dict[str, _Node] = {}
        self._num_nodes = 0
        self._size = [0] * len(windows)
        self._evictable = [0] * len(windows)
        # For each pool what may be evicted, by last use: out of date until looked at.
        self._queues: list[list[tuple[int, int, _Node]]] = [[] for _ in windows]
        self._clock, self._tie = count(1), count()

    # PrefixIndex

    def match(self, token_ids: TokenIds, namespace: str = "") -> PrefixLock:
        """See `PrefixIndex`."""
        node, _ = self._descend(self._root(namespace), token_ids)
        self._join_rows(node)
        return self._lock(self._continuable(node))

    def hold(self, token_ids: TokenIds, namespace: str = "") -> PrefixLock:
        """See `PrefixIndex`."""
        node, _ = self._descend(self._root(namespace), token_ids)
        return self._lock(node, whole=True)

    def lock_again(self, lock: PrefixLock) -> None:
        """See `PrefixIndex`."""
        held = lock.entry
        assert isinstance(held, _Held)
        for node in held.node.path():
            for pool, start in enumerate(held.starts):
                if node.depth >= start:
                    assert node.locks[pool], "what is locked again is not locked"
                    node.locks[pool] += 1

    def unlock(self, lock: PrefixLock) -> tuple[Pages, ...]:
        """See `PrefixIndex`: here nothing leaves but by eviction."""
        held = lock.entry
        assert isinstance(held, _Held)
        for node in held.node.path():
            for pool, start in enumerate(held.starts):
                if node.depth < start:
                    continue
                node.locks[pool] -= 1
                if node.locks[pool] == 0:
                    self._evictable[pool] += len(_present(node, pool))
                    self._enqueue(node, pool)
        return self._none

    def insert(self, token_ids: TokenIds, pages: Sequence[Pages], namespace: str = "") -> Inserted:
        """See `PrefixIndex`."""
        taken: list[list[Pages]] = [[] for _ in self._pools]
        token_ids = token_ids[: len(token_ids) // self._page_size * self._page_size]
        root = self._root(namespace)
        node, matched = self._descend(root, token_ids)
        for above in list(node.path()):
            self._heal(above, pages, taken)
        if matched < len(token_ids) and self._can_end(node, pages, matched, len(token_ids)):
            self._roots[namespace] = root
            node = self._append(node, token_ids, pages, taken)
        return Inserted(self._lock(self._continuable(node)), _joined(taken))

    def share(self, token_ids: TokenIds, pages: Sequence[Pages], namespace: str = "") -> Inserted:
        """See `PrefixIndex`."""
        return self.insert(token_ids, pages, namespace)

    def evict(self, pool: int, num_pages: int) -> tuple[Pages, ...]:
        """See `PrefixIndex`."""
        gone: list[list[Pages]] = [[] for _ in self._pools]
        wanted = max(0, self._evictable[pool] - num_pages)
        while self._evictable[pool] > wanted:
            node = self._next_victim(pool)
            if node.children:
                self._let_go(node, pool, gone)
            else:
                self._remove(node, gone)
        return _joined(gone)

    def evictable(self, pool: int) -> int:
        """See `PrefixIndex`."""
        return self._evictable[pool]

    def size(self, pool: int) -> int:
        """See `PrefixIndex`."""
        return self._size[pool]

    def audit(self) -> tuple[Pages, ...]:
        """See `PrefixIndex`."""
        pages: list[list[Pages]] = [[] for _ in self._pools]
        evictable = [0] * len(self._windows)
        for node in self._nodes():
            self._check(node)
            for pool in self._pools:
                if (here := node.pages[pool]) is not None:
                    pages[pool].append(here)
                    evictable[pool] += 0 if node.locks[pool] else len(here)
        if evictable != self._evictable:
            raise ConservationError(f"evictable {self._evictable}, in truth {evictable}")
        return _joined(pages)

    # Finding

    def _root(self, namespace: str) -> _Node:
        root = self._roots.get(namespace)
        if root is None:
            pages: list[Pages | None] = [NO_PAGES for _ in self._pools]
            tokens = np.empty(0, np.int32)
            root = _Node(None, namespace.encode(), tokens, pages, [0] * len(pages))
        return root

    def _descend(self, node: _Node, token_ids: TokenIds) -> tuple[_Node, int]:
        """The node at which the longest known prefix ends, and that prefix's tokens."""
        size, now, at = self._page_size, next(self._clock), 0
        end = len(token_ids) // size * size
        while at < end:
            child = node.children.get(token_ids[at : at + size].tobytes())
            if child is None:
                break
            same = self._same(child.tokens, token_ids[at:end])
            at += same
            if same < len(child.tokens):
                node = self._split(child, same)
                node.used = now
                break
            node = child
            node.used = now
        return node, at

    def _same(self, ours: TokenIds, theirs: TokenIds) -> int:
        """Tokens in which they agree from the start, in whole pages."""
        length = min(len(ours), len(theirs))
        differs = ours[:length] != theirs[:length]
        first = int(differs.argmax())
        same = first if differs[first] else length
        return same // self._page_size * self._page_size

    def _continuable(self, node: _Node) -> _Node:
        """The lowest node from `node` upwards after which every window's pages are there."""
        while node.parent is not None:
            if all(self._sees(node, pool, node.end) for pool in self._pools):
                return node
            node = node.parent
        return node

    def _sees(self, node: _Node, pool: int, position: int) -> bool:
        """Whether a token at `position` finds what it sees of `node` and above it."""
        if self._windows[pool] is None:
            return True
        first = self._first_seen(pool, position)
        for above in node.path():
            if above.pages[pool] is None:
                return False
            if above.depth <= first:
                return True
        return True

    def _first_seen(self, pool: int, position: int) -> int:
        """The first position that a token at `position` sees in a pool's layers."""
        window = self._windows[pool]
        return 0 if window is None else max(0, position - window + 1)

    def _nodes(self) -> Iterator[_Node]:
        todo = [child for root in self._roots.values() for child in root.children.values()]
        while todo:
            node = todo.pop()
            todo += node.children.values()
            yield node

    # Locking

    def _lock(self, node: _Node, *, whole: bool = False) -> PrefixLock:
        """Lock what a token after `node` sees and at least its last page, or the `whole` path."""
        size, end = self._page_size, node.end
        starts = []
        pages = [np.full(end // size, NO_PAGE, np.int32) for _ in self._pools]
        for pool in self._pools:
            first, start = 0 if whole else self._first_seen(pool, end), end
            self._cut(node, min(first, end - 1) // size * size)
            for above in node.path():
                if above is not node and above.end <= first:
                    break
                start = above.depth
                here = _present(above, pool)
                pages[pool][start // size : start // size + len(here)] = here
                if above.locks[pool] == 0:
                    self._evictable[pool] -= len(here)
                above.locks[pool] += 1
            starts.append(start)
        return PrefixLock(tuple(pages), _Held(node, tuple(starts)))

    # Growing

    def _cut(self, node: _Node, position: int) -> None:
        """Let a node begin at `position`, on the path to `node`."""
        for above in node.path():
            if above.depth <= position:
                if above.depth < position:
                    self._split(above, position - above.depth)
                return

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut `node` after `at` of its tokens; it stays the lower half. Returns the upper one."""
        parent, size = node.parent, self._page_size
        assert parent is not None
        cut = at // size
        upper_pages = [None if p is None else p[:cut] for p in node.pages]
        upper = _Node(parent, node.key, node.tokens[:at], upper_pages, node.locks.copy())
        parent.children[node.key] = upper
        node.pages = [None if p is None else p[cut:] for p in node.pages]
        node.parent, node.depth, node.tokens = upper, upper.end, node.tokens[at:]
        node.key = node.tokens[:size].tobytes()
        upper.children[node.key] = node
        upper.used = node.used
        self._num_nodes += 1
        for pool in self._pools:
            self._enqueue(upper, pool)
        return upper

    def _join_rows(self, node: _Node) -> None:
        """Join the long rows on the path to `node`, all of which was matched just now."""
        row = [node]
        for above in list(node.path())[1:]:
            if self._is_one(above, row[-1]):
                row.append(above)
                continue
            self._join(row[::-1])
            row = [above]
        self._join(row[::-1])

    def _is_one(self, upper: _Node, lower: _Node) -> bool:
        """Whether nothing tells the two apart: no branch, no lock, no page that has left.

        A lock that ends with `upper` is in its locks in every pool, one that
        begins with `lower` is not in those of `upper`: with a pool in which all
        begin at the root, equal numbers say that there is neither.
        """
        lost = [
            (up is None) != (low is None) for up, low in zip(upper.pages, lower.pages, strict=True)
        ]
        rooted = None in self._windows or not any(upper.locks)
        return len(upper.children) == 1 and upper.locks == lower.locks and rooted and not any(lost)

    def _join(self, row: list[_Node]) -> None:
        """Let the lowest of a row be all of it, if it is long: locks know the lowest."""
        if len(row) < self._long_row:
            return
        first, node = row[0], row[-1]
        assert first.parent is not None
        node.tokens = np.concatenate([one.tokens for one in row])
        node.pages = [
            None if last is None else np.concatenate([_present(one, pool) for one in row])
            for pool, last in enumerate(node.pages)
        ]
        node.parent, node.depth, node.key = first.parent, first.depth, first.key
        node.parent.children[node.key] = node
        for one in row[:-1]:
            one.parent = None
        self._num_nodes -= len(row) - 1
        for pool in self._pools:
            self._enqueue(node, pool)

    def _heal(self, node: _Node, pages: Sequence[Pages], taken: list[list[Pages]]) -> None:
        """Let offered pages stand in for those that a window pool has lost."""
        for pool in self._pools:
            if node.pages[pool] is not None:
                continue
            first, last = node.depth // self._page_size, node.end // self._page_size
            lost = int((pages[pool][first:last] == NO_PAGE).sum())
            if lost == last - first:
                continue
            if lost:
                self._split(node, lost * self._page_size)
            offered = pages[pool][first + lost : last]
            node.pages[pool] = offered
            taken[pool].append(offered)
            self._size[pool] += len(offered)
            self._evictable[pool] += 0 if node.locks[pool] else len(offered)
            self._enqueue(node, pool)

    def _can_end(self, node: _Node, pages: Sequence[Pages], matched: int, end: int) -> bool:
        """Whether a leaf that ends at `end` would have all of its windows' pages."""
        size = self._page_size
        for pool in self._pools:
            first = min(self._first_seen(pool, end), end - 1)
            if (pages[pool][max(first, matched) // size : end // size] == NO_PAGE).any():
                return False
            if first < matched and not self._sees(node, pool, end):
                return False
        return True

    def _append(
        self, node: _Node, token_ids: TokenIds, pages: Sequence[Pages], taken: list[list[Pages]]
    ) -> _Node:
        """Put the tokens that `node` does not end with below it, cut where a window begins."""
        size = self._page_size
        first, last = node.end // size, len(token_ids) // size
        lost = {int((pages[pool][first:last] == NO_PAGE).sum()) for pool in self._pools}
        for start, end in pairwise(sorted({first, last, *(first + n for n in lost)})):
            tokens = token_ids[start * size : end * size].copy()
            here: list[Pages | None] = [
                None if offered[start] == NO_PAGE else offered[start:end] for offered in pages
            ]
            child = _Node(node, tokens[:size].tobytes(), tokens, here, [0] * len(here))
            child.used = node.used or next(self._clock)
            node.children[child.key] = child
            node = child
            self._num_nodes += 1
            for pool in self._pools:
                if (present := here[pool]) is not None:
                    taken[pool].append(present)
                    self._size[pool] += len(present)
                    self._evictable[pool] += len(present)
        for above in node.path():
            for pool in self._pools:
                self._enqueue(above, pool)
        return node

    # Evicting

    def _is_evictable(self, node: _Node, pool: int) -> bool:
        if node.locks[pool] or node.parent is None or node.pages[pool] is None:
            return False
        return self._windows[pool] is not None or not node.children

    def _enqueue(self, node: _Node, pool: int) -> None:
        if node.queued[pool] or not self._is_evictable(node, pool):
            return
        queue = self._queues[pool]
        if len(queue) > 2 * self._num_nodes + 64:
            queue[:] = [entry for entry in queue if entry[2].parent is not None]
            heapq.heapify(queue)
        node.queued[pool] = True
        heapq.heappush(queue, (node.used, next(self._tie), node))

    def _next_victim(self, pool: int) -> _Node:
        while True:
            used, _, node = heapq.heappop(self._queues[pool])
            node.queued[pool] = False
            if used == node.used and self._is_evictable(node, pool):
                return node
            self._enqueue(node, pool)

    def _let_go(self, node: _Node, pool: int, gone: list[list[Pages]]) -> None:
        here = _present(node, pool)
        gone[pool].append(here)
        self._size[pool] -= len(here)
        self._evictable[pool] -= len(here)
        node.pages[pool] = None

    def _remove(self, node: _Node, gone: list[list[Pages]]) -> None:
        """Take a leaf away, and what above it would be a leaf without its window's pages."""
        parent = node.parent
        assert parent is not None
        assert not any(node.locks), "a locked leaf is evicted"
        for pool in self._pools:
            if node.pages[pool] is not None:
                self._let_go(node, pool, gone)
        del parent.children[node.key]
        node.parent = None
        self._num_nodes -= 1
        if parent.children:
            return
        if parent.parent is None:
            del self._roots[parent.key.decode()]
        elif any(pages is None for pages in parent.pages):
            self._remove(parent, gone)
        else:
            for pool in self._pools:
                self._enqueue(parent, pool)

    def _check(self, node: _Node) -> None:
        """Raise `ConservationError` for a node that is not as it should be."""
        size, parent = self._page_size, node.parent
        assert parent is not None
        last = len(node.tokens) // size
        fits = all(p is None or len(p) == last for p in node.pages) and last * size == len(
            node.tokens
        )
        linked = parent.children.get(node.key) is node and node.depth == parent.end
        locked = all(
            node.locks[pool] >= sum(child.locks[pool] for child in node.children.values())
            for pool in self._pools
            if self._windows[pool] is None
        )
        whole = bool(node.children) or all(pages is not None for pages in node.pages)
        if not (fits and linked and locked and whole and min(node.locks) >= 0):
            raise ConservationError(f"node at {node.depth}: {fits=} {linked=} {locked=} {whole=}")


def _present(node: _Node, pool: int) -> Pages:
    pages = node.pages[pool]
    return NO_PAGES if pages is None else pages


def _joined(parts: list[list[Pages]]) -> tuple[Pages, ...]:
    return tuple(np.concatenate(some) if some else NO_PAGES for some in parts)
