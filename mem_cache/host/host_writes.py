"""The copies to the host of pages that the prefix index publishes.

Writing back takes no page away and lets nothing wait. A copy reads pages of the prefix index
without locking them. When it has ended, a page that was handed out meanwhile is dropped, because
its bytes may be another request's. So the device evicts as if there were no copy.

Pages that the index evicts, or gives to a retracted request's successor, have mostly been copied
before. As soon as less than half of a pool is free, newly published pages are copied at once. Pages
published earlier are copied behind them, in order.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvrelay.mem_cache.account import NO_PAGE, NO_PAGES, Pages
from kvrelay.mem_cache.counts import TierCounts
from kvrelay.mem_cache.host.host_copies import (
    CopyOrders,
    HostWrite,
    PageBytes,
    pages_of,
    split,
    split_tokens,
)
from kvrelay.mem_cache.host.host_page import HostPage, HostPageState, HostPart
from kvrelay.mem_cache.host.host_pages import HostPages
from kvrelay.mem_cache.host.tier_copies import CopyEnded
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager
from kvrelay.mem_cache.prefix.radix_node import RadixNode
from kvrelay.wire.page_hash import HASH_BYTES

COPY_BYTES: Final = 16 << 20
"""The most bytes of one copy to the host, so that a copy back does not wait long for it."""
MOST_WRITES: Final = 2
"""The most copies to the host at a time."""
MOST_CANDIDATES: Final = 4096
"""The most nodes of the prefix index that wait to be copied; beyond that the oldest are dropped."""
_TRIES: Final = 16
"""The candidates examined in one pass: most may be here, or evicted, already."""


class HostWrites:
    """The copies of published pages to the host pool. Only `HostTier` calls it.

    Args:
        kv_cache: of the device.
        pages: the account of the host pool.
        orders: orders the copies.
        nbytes: the bytes of pages.
        counts: of the tier; changed here as copies begin and end.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        pages: HostPages,
        orders: CopyOrders,
        nbytes: PageBytes,
        counts: TierCounts,
    ) -> None:
        self._kv_cache = kv_cache
        self._pages = pages
        self._orders = orders
        self._bytes = nbytes
        self._counts = counts
        self._pools = kv_cache.shape.pool_numbers
        self._running: dict[int, HostWrite] = {}
        self._candidates: deque[RadixNode] = deque(maxlen=MOST_CANDIDATES)
        self._most_pages = max(1, COPY_BYTES // nbytes.whole)

    def published(self, node: RadixNode, in_any_case: bool) -> None:
        """Add a candidate. If pages are short it is copied at once, as it may soon be evicted.

        Args:
            node: of the prefix index.
            in_any_case: copy it even if pages are not short, because others want it.
        """
        if (in_any_case or self._is_short()) and self._write(node):
            return
        self._candidates.append(node)

    def write_candidates(self, in_any_case: bool) -> None:
        """If pages are short, copy published pages that are not here, the oldest first.

        Args:
            in_any_case: see `published`.
        """
        if not self._candidates or len(self._running) >= MOST_WRITES:
            return
        if not in_any_case and not self._is_short():
            return
        for _ in range(min(_TRIES, len(self._candidates))):
            if len(self._running) < MOST_WRITES:
                self._write(self._candidates.popleft())

    @property
    def num_bytes(self) -> int:
        """The bytes of the running copies."""
        return sum([write.nbytes for write in self._running.values()])

    def finish(self, ended: CopyEnded) -> None:
        """Take the end of a copy. Unknown ones are ignored."""
        write = self._running.pop(ended.operation, None)
        if write is not None:
            self._end(write, ended)

    def _is_short(self) -> bool:
        """Whether less than half of a pool is free."""
        return any(2 * pool.free < pool.total for pool in self._kv_cache.audit.page_counts())

    def _write(self, node: RadixNode) -> bool:
        """Begin to copy the pages of a node, and of those above it, that the host lacks.

        Returns:
            Whether the node is settled: it was begun, is here, or has been evicted.
        """
        if len(self._running) >= MOST_WRITES:
            return False
        path = list(node.path())[::-1]
        if not path or not all(one.hashes for one in path):
            return True  # it was evicted or forgotten
        keys = split(b"".join([one.hashes for one in path]), HASH_BYTES)
        first = self._pages.num_known(keys)
        if first == len(keys):
            self._write_parts(node, keys[node.depth // self._kv_cache.shape.page_size :])
            return True
        last = min(len(keys), first + self._most_pages)
        token_ids = np.concatenate([one.tokens for one in path])
        tokens = split_tokens(token_ids, self._kv_cache.shape.page_size)
        before = keys[first - 1] if first else None
        taken = self._pages.reserve(before, keys[first:last], tokens[first:last], first)
        self._counts.dropped_pages += last - first - len(taken)
        if first + len(taken) == last < len(keys):
            self._candidates.appendleft(node)  # the rest of it is next
        self._counts.evicted_pages = self._pages.evicted
        if taken:
            rows = [np.concatenate([pages_of(one, pool) for one in path]) for pool in self._pools]
            here = slice(first, first + len(taken))
            self._begin(node, taken, taken, [row[here] for row in rows])
            page_size, is_end = self._kv_cache.shape.page_size, first + len(taken) == len(keys)
            if self._pages.windows and is_end and first * page_size > node.depth:
                self._candidates.append(node)  # what is there of it may lack parts
        return True

    def _write_parts(self, node: RadixNode, keys: Sequence[bytes]) -> None:
        """Begin to copy the window parts of a node that its pages on the host lack.

        Args:
            node: its pages are on the host, or being written.
            keys: the hashes of its pages.
        """
        if not self._pages.windows:
            return
        # One copy, though it may be longer than others: parts of a window alone are worth nothing.
        last = -max(self._most_pages, *[one.behind for one in self._pages.windows.values()])
        found = [(at, self._pages.get(key)) for at, key in enumerate(keys[last:])]
        there = {
            at: page
            for at, page in found
            if page is not None and page.state is HostPageState.CACHED
        }
        rows = [pages_of(node, pool)[last:][list(there)] for pool in self._pools] if there else []
        if there:
            self._begin(node, [], list(there.values()), rows)

    def _begin(
        self,
        node: RadixNode,
        taken: list[HostPage],
        pages: Sequence[HostPage],
        rows: Sequence[Pages],
    ) -> None:
        """Order a copy to the host, of whole pages and of the window parts that they lack.

        Args:
            node: the node that has the last of them.
            taken: `pages` if they were reserved for this, else none: then only parts are copied.
            pages: of the host.
            rows: for each pool their pages on the device; `NO_PAGE` where a window has passed.
        """
        parts: dict[int, list[HostPart]] = {}
        device_pages = [row if taken else NO_PAGES for row in rows]
        for pool, window in self._pages.windows.items():
            row = rows[pool]
            lacking = [
                at for at, page in enumerate(pages) if row[at] != NO_PAGE and pool not in page.parts
            ]
            parts[pool] = window.reserve([pages[at] for at in lacking])
            lacking = lacking[len(lacking) - len(parts[pool]) :]
            device_pages[pool] = row[np.array(lacking, np.intp)]
        if not taken and not any(parts.values()):
            return
        where = tuple(device_pages)
        times = tuple(self._kv_cache.allocator.times_allocated(*each) for each in enumerate(where))
        nbytes = self._bytes.of(len(taken), {pool: len(some) for pool, some in parts.items()})
        number = self._orders.start(True, where, taken, parts)
        self._running[number] = HostWrite(node, taken, parts, where, times, nbytes)

    def _end(self, write: HostWrite, ended: CopyEnded) -> None:
        valid = [
            (self._kv_cache.allocator.times_allocated(pool, pages) == times) & (not ended.error)
            for pool, (pages, times) in enumerate(
                zip(write.device_pages, write.times_allocated, strict=True)
            )
        ]
        if ended.error:
            with contextlib.suppress(ValueError):
                self._candidates.remove(write.node)  # or its rest would be tried without end
        whole = np.full(len(write.pages), not ended.error)
        for pool in self._pools:
            if pool not in write.parts:
                whole &= valid[pool]
        num_valid = len(whole) if whole.all() else int(whole.argmin())
        self._pages.end_write(write.pages, num_valid)
        for pool, parts in write.parts.items():
            self._pages.end_window_write(pool, parts, valid[pool].tolist())
        counts = self._counts
        counts.written_pages += num_valid
        counts.dropped_pages += len(whole) - num_valid
        counts.write_bytes += write.nbytes
        counts.write_seconds += ended.seconds
