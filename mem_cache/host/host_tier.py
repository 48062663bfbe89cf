"""The tier below the device: pages that the prefix index publishes are copied to host memory.

*Writing back* (`host_writes.py`) copies what was published, and lets nobody wait. *Bringing back*
(`host_loads.py`) copies a prefix to pages of a lease, and publishes it.

*Lending* takes nothing from the device: a decode worker reads pages where they are. They stay, even
if they are forgotten meanwhile, until who lends them says that their reader's stream has ended.

The engine thread calls everything here; a copy's end is told to `finish`.
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
from kvrelay.mem_cache.host.tier_copies import CopyEnded, CopyStream
from kvrelay.mem_cache.host.tier_speed import TierSpeed
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager
from kvrelay.mem_cache.prefix.prefix_index import TokenIds
from kvrelay.mem_cache.prefix.prefix_log import PrefixLog
from kvrelay.mem_cache.prefix.radix_node import RadixNode
from kvrelay.mem_cache.storage.storage_pages import STORAGE
from kvrelay.mem_cache.storage.storage_tier import StorageTier
from kvrelay.wire.load import PoolCounts
from kvrelay.wire.page_hash import HASH_BYTES


class HostTier:
    """Copies published pages to the host pool, and brings them back.

    Args:
        kv_cache: of the device; its prefix index must tell `log`.
        log: of that prefix index.
        total_pages: for each pool of the device those of the host's beside it; without a window
            all have as many.
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
        """What was copied so far."""
        self.storage: StorageTier | None = None
        """The tier below; what is published is copied to the host at once then, to be shared."""
        self.page_bytes = sum(page_bytes)
        """Of one page, over all pools."""
        self._bytes = PageBytes(page_bytes, shape.windowed)
        self._kv_cache = kv_cache
        self._log = log
        orders = CopyOrders(stream, shape.pool_numbers)
        shared = kv_cache, self.pages, orders, self._bytes, self.counts
        self._writes = HostWrites(*shared)
        self.loads = HostLoads(*shared, speed)
        """What comes back to the device."""
        kv_cache.count_allocations()
        log.attach(self)

    # What the prefix index tells

    def published(self, node: RadixNode) -> None:
        """See `LowerTier`. If pages are short it is copied at once."""
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
        """Copy what was published and is not here, the oldest first, if pages are short.

        And what is here to storage, if there is one.
        """
        self._writes.write_candidates(in_any_case=self.storage is not None)
        if self.storage is not None:
            self.storage.write_back()

    def finish(self, ended: CopyEnded) -> None:
        """A copy has ended. One that is not known, or has ended before, is ignored."""
        self._writes.finish(ended)
        self.loads.finish(ended)

    def expected_seconds(self, prefix: HostPrefix) -> float:
        """Until a load would end that began now: copies that have not ended come before it."""
        number = len(prefix.pages)
        nbytes = self._bytes.of(number, prefix.num_parts(0, number))
        return self.loads.speed.seconds(self._writes.num_bytes + self.loads.num_bytes + nbytes)

    # How a prompt's pages are named

    def hash(self, token_ids: TokenIds, namespace: str) -> bytes:
        """The hashes of the whole pages of some tokens. Half a microsecond a page."""
        hashes = self._log.hashes
        return hashes.extend(hashes.root(namespace), token_bytes(token_ids))

    def split(self, token_ids: TokenIds, keys: bytes) -> tuple[list[bytes], list[bytes]]:
        """The hashes and the tokens of whole pages, each by itself.

        Args:
            token_ids: of a prompt, from the start of a page.
            keys: what `hash` says of these.
        """
        tokens = split_tokens(token_ids, self._kv_cache.shape.page_size)
        return split(keys, HASH_BYTES), tokens

    # Read by peers

    def lend(self, token_ids: TokenIds, keys: bytes, first_page: int) -> list[HostPage]:
        """Let a peer read what the host has of some tokens, from a page on, until `take_back`.

        Args:
            token_ids: that may come from a cache, from a prompt's start.
            keys: what `hash` says of these.
            first_page: of the prompt, that is lent.
        """
        keys = keys[HASH_BYTES * first_page :]
        if self.pages.get(keys[:HASH_BYTES]) is None:
            return []  # asked whenever a copy has ended, for each prompt: no look at all of it
        tokens = token_ids[self._kv_cache.shape.page_size * first_page :]
        pages = self.pages.find(*self.split(tokens, keys))
        self.pages.pin(pages)
        self.counts.lent_pages += len(pages)
        return pages

    def take_back(self, pages: Sequence[HostPage]) -> None:
        """What was lent is read no longer, or what is read will not be used."""
        self.pages.unpin(pages)

    # Counts and checks

    @property
    def version(self) -> int:
        """Higher than before if something more can be found."""
        return self.pages.version

    def tier_counts(self) -> Iterator[tuple[str, TierCounts]]:
        """What this tier and the one below have done, by their names."""
        yield HOST, self.counts
        if self.storage is not None:
            yield STORAGE, self.storage.counts

    def pool_counts(self, device: Sequence[PoolCounts]) -> tuple[PoolCounts, ...]:
        """The counts of the device's pools, with what loads write there, and of those below."""
        in_flight = map(self.loads.num_pages, range(len(device)))
        told = [
            counts if not pages else _in_flight(counts, pages)
            for counts, pages in zip(device, in_flight, strict=True)
        ]
        below = () if self.storage is None else self.storage.pool_counts()
        return (*told, *self.pages.pool_counts(), *below)


def _in_flight(counts: PoolCounts, pages: int) -> PoolCounts:
    """With so many pages counted for loads that the leases of these hold."""
    return replace(counts, held=counts.held - pages, in_flight=pages)
