"""The loads that bring prefixes back from the host after the device has evicted them.

A load takes memory as a request does. It has a lease on the index's pages of the prefix, and on new
pages for the others. Copies write the new pages. They are published when the last copy has ended,
and the lease is released. After that no lease holds them; requests find them in the index.

Of a window only the pages that a continuation sees come back: the lease is slid before it grows. So
such a prefix comes as a whole, or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Final

from kvrelay.mem_cache.counts import TierCounts
from kvrelay.mem_cache.host.host_copies import (
    CopyOrders,
    HostPrefix,
    Load,
    PageBytes,
    split,
    split_tokens,
)
from kvrelay.mem_cache.host.host_page import HostPageState
from kvrelay.mem_cache.host.host_pages import HostPages
from kvrelay.mem_cache.host.tier_copies import CopyEnded
from kvrelay.mem_cache.host.tier_speed import TierSpeed
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager
from kvrelay.mem_cache.prefix.prefix_index import TokenIds
from kvrelay.mem_cache.release import Outcome, release_kv_cache
from kvrelay.wire.page_hash import HASH_BYTES

LOAD_BYTES: Final = 4 << 20
"""The most bytes of one copy back: a load that is given up ends with its running copy."""


class HostLoads:
    """The loads of prefixes from the host pool to the device.

    Args:
        kv_cache: of the device.
        pages: the account of the host pool.
        orders: orders the copies.
        nbytes: the bytes of pages.
        counts: of the tier; changed here as loads end.
        speed: of copies from the host, when the worker began.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        pages: HostPages,
        orders: CopyOrders,
        nbytes: PageBytes,
        counts: TierCounts,
        speed: TierSpeed,
    ) -> None:
        self.speed = speed
        """The speed of copies from the host, as far as it is known."""
        self._kv_cache = kv_cache
        self._pages = pages
        self._orders = orders
        self._bytes = nbytes
        self._counts = counts
        self._pools = kv_cache.shape.pool_numbers
        self._numbers = count(1)
        self._running: dict[int, Load] = {}

    def find(self, token_ids: TokenIds, namespace: str, keys: bytes) -> HostPrefix | None:
        """Find the host's part of `token_ids` beyond the device's. Returns None if there is none.

        Args:
            token_ids: those that may come from a cache.
            namespace: see `PrefixIndex`.
            keys: their hashes, from `HostTier.hash`.
        """
        size = self._kv_cache.shape.page_size
        first = self._kv_cache.count_cached(token_ids, namespace) // size
        tokens = split_tokens(token_ids[first * size :], size)
        row = self._pages.find(split(keys, HASH_BYTES)[first:], tokens)
        pages = tuple(row[: self._pages.num_continuable(row)])
        if not pages:
            return None
        parts = {}
        for pool, window in self._pages.windows.items():
            parts[pool] = window.parts(pages[-window.behind :])
            window.use(parts[pool])
        token_ids = token_ids[: (first + len(pages)) * size]
        return HostPrefix(token_ids, namespace, first, pages, parts)

    def load(self, prefix: HostPrefix, headroom: Sequence[int] | None) -> Load | None:
        """Bring a prefix back, or join a load that does. Returns `None` if there is no room.

        Args:
            prefix: found just now.
            headroom: pages of each pool that must stay free for others.
        """
        for running in self._running.values():
            if not running.given_up and running.prefix.brings(prefix):
                return running
        number = next(self._numbers)
        token_ids, namespace = prefix.token_ids, prefix.namespace
        lease = self._kv_cache.open_uncounted(
            f"load {number}",
            len(token_ids),
            token_ids=token_ids,
            namespace=namespace,
            headroom=headroom,
        )
        if lease is None:
            return None
        if lease.cache_protected_len != prefix.first_page * lease.page_size:
            # Room was found only without a lock on what is cached.
            release_kv_cache(self._kv_cache, lease, Outcome.ABORTED)
            return None
        self._kv_cache.slide(lease, len(token_ids))
        grown = self._kv_cache.grow(lease, len(token_ids))
        assert grown, "a promise was broken"
        self._pages.pin(prefix.pages)
        for pool, parts in prefix.parts.items():
            self._pages.windows[pool].pin(parts)
        load = Load(prefix, lease)
        self._load_more(load)
        return load

    def give_up(self, load: Load) -> None:
        """Stop a load, because its memory is needed. Pages of the running copy are kept."""
        load.given_up = True
        self._counts.late_loads += 1

    @property
    def num_bytes(self) -> int:
        """Bytes that are still to come, of all loads."""
        nbytes = 0
        for one, done in [(load.prefix, load.num_done) for load in self._running.values()]:
            left = len(one.pages) - done
            nbytes += self._bytes.of(left, one.num_parts(done, left))
        return nbytes

    def num_pages(self, pool: int) -> int:
        """Count the pages of one of the device's pools that loads write."""
        return sum([len(load.lease.own_pages(pool)) for load in self._running.values()])

    def finish(self, ended: CopyEnded) -> None:
        """Take the end of a copy. Unknown ones are ignored."""
        load = self._running.pop(ended.operation, None)
        if load is not None:
            self._end_copy(load, ended)

    def _load_more(self, load: Load) -> None:
        """Begin the next copy of a load."""
        prefix, done = load.prefix, load.num_done
        number = self._bytes.pages_within(LOAD_BYTES, max(0, prefix.num_without_parts - done))
        pages = prefix.pages[done : done + number]
        parts = {pool: prefix.parts_of(pool, done, len(pages)) for pool in prefix.parts}
        load.num_moving, end = len(pages), prefix.first_page + done + len(pages)
        device_pages = tuple(
            load.lease.pages(pool)[end - len(parts.get(pool, pages)) : end] for pool in self._pools
        )
        self._running[self._orders.start(False, device_pages, pages, parts)] = load

    def _end_copy(self, load: Load, ended: CopyEnded) -> None:
        """Begin the next copy, or end the load."""
        counts, prefix = self._counts, load.prefix
        nbytes = self._bytes.of(load.num_moving, prefix.num_parts(load.num_done, load.num_moving))
        counts.load_bytes += nbytes
        counts.load_seconds += ended.seconds
        if not ended.error:
            load.num_done += load.num_moving
            self.speed.observe(nbytes, ended.seconds)
        load.num_moving = 0
        pages = prefix.pages
        are_here = all(page.state is HostPageState.CACHED for page in pages)
        if are_here and not (ended.error or load.given_up) and load.num_done < len(pages):
            self._load_more(load)
        else:
            self._end(load, load.num_done if are_here else 0)

    def _end(self, load: Load, num_valid: int) -> None:
        """Publish the pages that have come and were not forgotten, and free the others.

        None is published if a window that is seen behind them has not come.
        """
        load.ended_at = self._kv_cache.clock()
        prefix = load.prefix
        self._pages.unpin(prefix.pages)
        for pool, parts in prefix.parts.items():
            self._pages.windows[pool].unpin(parts)
        tokens = prefix.token_ids[: (prefix.first_page + num_valid) * load.lease.page_size]
        outcome = Outcome.ABORTED
        if num_valid and load.lease.can_go_back(len(tokens)):
            outcome = Outcome.FINISHED
            self._counts.loaded_pages += num_valid
            self._kv_cache.commit(load.lease, len(tokens))
        release_kv_cache(self._kv_cache, load.lease, outcome, token_ids=tokens)
