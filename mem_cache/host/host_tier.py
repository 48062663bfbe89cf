"""The tier below the device: pages that the prefix index publishes are copied to host memory.

*Writing back* (`host_writes.py`) copies published pages; nothing waits for it. *Bringing back*
(`host_loads.py`) copies a prefix to pages of a lease, and publishes it. *Lending* takes nothing
from the device: a decode worker reads pages where they are. Lent pages stay, even if they are
forgotten meanwhile, until the lender knows that the reader's stream has ended.

The engine thread calls everything here; a copy's end is passed to `finish`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvrelay.mem_cache.counts import TierCounts
from kvrelay.mem_cache.host.host_copies import (
    CopyOrders,
    HostPrefix,
    PageBytes,
    num_pages,
    split,
    split_tokens,
    token_bytes,
)
from kvrelay.mem_cache.host.host_loads import HostLoads
from kvrelay.mem_cache.host.host_page import HostPage
from kvrelay.mem_cache.host.host_pages import HOST, HostPages
from kvrelay.mem_cache.host.host_windows import HostWindow
from kvrelay.mem_cache.host.host_writes import HostWrites
from kvrelay.mem_cache.host.storage_tier import StorageTier
from kvrelay.mem_cache.host.tier_copies import CopyEnded, CopyStream
from kvrelay.mem_cache.host.tier_speed import TierSpeed
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager
from kvrelay.mem_cache.prefix.prefix_index import TokenIds
from kvrelay.mem_cache.prefix.prefix_log import PrefixLog
from kvrelay.mem_cache.prefix.radix_node import RadixNode
from kvrelay.mem_cache.storage.storage_pages import STORAGE
from kvrelay.wire.load import PoolCounts
from kvrelay.wire.page_hash import HASH_BYTES


class HostTier:
    """The tier that copies published pages to the host pool, and brings them back.

    Args:
        kv_cache: of the device; its prefix index must use `log`.
        log: of that prefix index.
        total_pages: for each pool of the device the pages of the host's pool beside it. Pools
            without a window have equal numbers.
        page_bytes: for each pool, of one page.
        stream: copies.
        speed: of copies from the host.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        log: PrefixLog,
        total_pages: Sequence[int],
        page_bytes: Sequence[int],
        stream: CopyStream,
        speed: TierSpeed,
    ) -> None:
        shape = kv_cache.shape
        windows = {
            pool: HostWindow(
                pool,
                f"{HOST}_{shape.pools[pool].name}",
                total_pages[pool],
                shape.page_size,
                shape.pages_behind(pool),
            )
            for pool in shape.pool_numbers
            if shape.windowed[pool]
        }
        total = num_pages(kv_cache, total_pages)
        self.pages = HostPages(total, shape.page_size, self._record, windows)
        """The account of the host pool."""
        self.counts = TierCounts()
        """The counts of copies so far."""
        self.storage: StorageTier | None = None
        """The tier below. If there is one, published pages are copied to the host at once, to be
        shared."""
        self.page_bytes = sum(page_bytes)
        """The bytes of one page, over all pools."""
        self._bytes = PageBytes(page_bytes, shape.windowed)
        self._kv_cache = kv_cache
        self._log = log
        orders = CopyOrders(stream, shape.pool_numbers)
        shared = kv_cache, self.pages, orders, self._bytes, self.counts
        self._writes = HostWrites(*shared)
        self.loads = HostLoads(*shared, speed)
        """The loads that come back to the device."""
        kv_cache.allocator.count_allocations()
        log.attach(self)

    # What the prefix index tells

    def published(self, node: RadixNode) -> None:
        """See `LowerTier`. If pages are short, the node is copied at once."""
        self._writes.published(node, in_any_case=self.storage is not None)

    def forget(self, key: bytes) -> None:
        """See `LowerTier`."""
        if self.storage is not None:
            page = self.pages.get(key)
            following = [] if page is None else [one.key for one in page.subtree()]
            self.storage.forget([key, *following])
        self.counts.forgotten_pages += self.pages.forget(key)

    def marks(self) -> Iterator[int]:
        """See `LowerTier`."""
        for page in self.pages:
            yield from self._marks(page)

    def _marks(self, page: HostPage) -> list[int]:
        return self._log.hashes.marks(page.key, page.place)

    def _record(self, page: HostPage, found: bool) -> None:
        self._log.record(self._marks(page), found=found)
        if found and self.storage is not None:
            self.storage.offer(page)

    # Copies

    def write_back(self) -> None:
        """If pages are short, copy published pages that are not here, the oldest first.

        Also stores pages that are here, if there is storage.
        """
        self._writes.write_candidates(in_any_case=self.storage is not None)
        if self.storage is not None:
            self.storage.write_back()

    def finish(self, ended: CopyEnded) -> None:
        """Take the end of a copy. Unknown ones, and second ends, are ignored."""
        self._writes.finish(ended)
        self.loads.finish(ended)

    def expected_seconds(self, prefix: HostPrefix) -> float:
        """Estimate the seconds of a load that begins now, behind the copies that have not ended."""
        number = len(prefix.pages)
        nbytes = self._bytes.of(number, prefix.num_parts(0, number))
        return self.loads.speed.seconds(self._writes.num_bytes + self.loads.num_bytes + nbytes)

    # How a prompt's pages are named

    def hash(self, token_ids: TokenIds, namespace: str) -> bytes:
        """Hash the whole pages of some tokens. Takes half a microsecond a page."""
        hashes = self._log.hashes
        return hashes.extend(hashes.root(namespace), token_bytes(token_ids))

    def split(self, token_ids: TokenIds, keys: bytes) -> tuple[list[bytes], list[bytes]]:
        """Split hashes and tokens into those of each whole page.

        Args:
            token_ids: of a prompt, from the start of a page.
            keys: their hashes, from `hash`.
        """
        tokens = split_tokens(token_ids, self._kv_cache.shape.page_size)
        return split(keys, HASH_BYTES), tokens

    # Read by peers

    def lend(self, token_ids: TokenIds, keys: bytes, first_page: int) -> list[HostPage]:
        """Lend the host's pages of some tokens to a peer, from a page on, until `take_back`.

        Args:
            token_ids: those that may come from a cache, from a prompt's start.
            keys: their hashes, from `hash`.
            first_page: the first page of the prompt to lend.
        """
        keys = keys[HASH_BYTES * first_page :]
        if self.pages.get(keys[:HASH_BYTES]) is None:
            return []  # an early return, as each prompt asks whenever a copy has ended
        tokens = token_ids[self._kv_cache.shape.page_size * first_page :]
        pages = self.pages.find(*self.split(tokens, keys))
        self.pages.pin(pages)
        self.counts.lent_pages += len(pages)
        return pages

    def take_back(self, pages: Sequence[HostPage]) -> None:
        """Take back lent pages that are read no longer, or whose reads will not be used."""
        self.pages.unpin(pages)

    # Counts and checks

    @property
    def version(self) -> int:
        """A number that rises when something more can be found."""
        return self.pages.version

    def tier_counts(self) -> Iterator[tuple[str, TierCounts]]:
        """Yield the counts of this tier and the one below, by their names."""
        yield HOST, self.counts
        if self.storage is not None:
            yield STORAGE, self.storage.counts

    def pool_counts(self, device: Sequence[PoolCounts]) -> tuple[PoolCounts, ...]:
        """List the counts of the device's pools, with pages that loads write, and of lower ones."""
        in_flight = map(self.loads.num_pages, range(len(device)))
        told = [
            counts if not pages else _in_flight(counts, pages)
            for counts, pages in zip(device, in_flight, strict=True)
        ]
        below = () if self.storage is None else self.storage.pool_counts()
        return (*told, *self.pages.pool_counts(), *below)


def _in_flight(counts: PoolCounts, pages: int) -> PoolCounts:
    """Count `pages` that leases of loads hold as in flight."""
    return replace(counts, held=counts.held - pages, in_flight=pages)
