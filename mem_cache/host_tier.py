"""The tier below the device: pages that the prefix index publishes are copied to host memory.

*Writing back* takes no page from anybody and lets nobody wait. A copy reads pages of the prefix
index without locking them; when it has ended, a page that was handed out meanwhile is dropped,
for its bytes may be another's. So the device evicts as if there was no copy. What the index
evicts, or gives to a retracted request's successor, has mostly been copied before: as soon as
less than half of a pool is free, what is published is copied at once, and what was published
before is copied behind it, in order.

*Bringing back* takes memory as a request does: a lease, on what the index has of the prefix and
on pages for what it lacks. Those are written by the copy, published when it has ended, and the
lease is released. Nobody holds them then: who wants the prefix finds it in the index. Of a window
only those pages come that a continuation sees: the lease is slid before it grows. So such a prefix
comes as a whole, or not at all.

*Lending* takes nothing from the device: a decode worker reads pages where they are. They stay, even
if they are forgotten meanwhile, until who lends them says that their reader's stream has ended.

The engine thread calls everything here; a copy's end is told to `finish`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Final

import numpy as np

from kvrelay.mem_cache.account import NO_PAGES, Pages
from kvrelay.mem_cache.counts import TierCounts
from kvrelay.mem_cache.host_copies import (
    HostPrefix,
    Load,
    PageBytes,
    Write,
    num_pages,
    pages_of,
    split,
    token_bytes,
)
from kvrelay.mem_cache.host_page import HostPage, HostPageState, HostPart
from kvrelay.mem_cache.host_pages import HOST, HostPages
from kvrelay.mem_cache.host_windows import HostWindow
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager
from kvrelay.mem_cache.prefix_index import NO_PAGE, TokenIds
from kvrelay.mem_cache.prefix_log import PrefixLog
from kvrelay.mem_cache.radix_node import RadixNode
from kvrelay.mem_cache.release import Outcome, release_kv_cache
from kvrelay.mem_cache.storage_pages import STORAGE
from kvrelay.mem_cache.storage_tier import StorageTier
from kvrelay.mem_cache.tier_copies import CopyEnded, CopyStream, PageMoves
from kvrelay.mem_cache.tier_speed import TierSpeed
from kvrelay.wire.load import PoolCounts
from kvrelay.wire.page_hash import HASH_BYTES

COPY_BYTES: Final = 16 << 20
"""One copy to the host has no more, so that a copy back does not wait long for it."""
LOAD_BYTES: Final = 4 << 20
"""One copy back has no more: a load that is given up ends with the copy that runs."""
MOST_WRITES: Final = 2
"""Copies to the host at a time."""
MOST_CANDIDATES: Final = 4096
"""Nodes of the prefix index that wait to be copied; beyond that the oldest are left out."""
_TRIES: Final = 16
"""Candidates that are looked at in one pass: most may be here, or evicted, already."""


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
        self.speed = speed
        self.storage: StorageTier | None = None
        """The tier below; what is published is copied to the host at once then, to be shared."""
        self.page_bytes = sum(page_bytes)
        """Of one page, over all pools."""
        self._bytes = PageBytes(page_bytes, shape.windowed)
        self._pools = shape.pool_numbers
        self._kv_cache = kv_cache
        self._log = log
        self._stream = stream
        self._numbers = count(1)
        self._writes: dict[int, Write] = {}
        self._loads: dict[int, Load] = {}
        self._candidates: deque[RadixNode] = deque(maxlen=MOST_CANDIDATES)
        self._most_pages = max(1, COPY_BYTES // self.page_bytes)
        kv_cache.count_allocations()
        log.attach(self)

    # What the prefix index tells

    def published(self, node: RadixNode) -> None:
        """See `LowerTier`. If pages are short it is copied at once: it may soon be evicted."""
        if self._is_short() and self._write(node):
            return
        self._candidates.append(node)

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

    # To the host

    def write_back(self) -> None:
        """Copy what was published and is not here, the oldest first, if pages are short.

        And what is here to storage, if there is one.
        """
        self._write_candidates()
        if self.storage is not None:
            self.storage.write_back()

    def _write_candidates(self) -> None:
        if not self._candidates or len(self._writes) >= MOST_WRITES or not self._is_short():
            return
        for _ in range(min(_TRIES, len(self._candidates))):
            if len(self._writes) < MOST_WRITES:
                self._write(self._candidates.popleft())

    def _is_short(self) -> bool:
        """Whether less than half of a pool is free; or others are to have what is published."""
        return self.storage is not None or any(
            2 * pool.free < pool.total for pool in self._kv_cache.page_counts()
        )

    def _write(self, node: RadixNode) -> bool:
        """Begin to copy what the host lacks of a node, and of those above it.

        Returns:
            Whether the node is settled: it was begun, is here, or has been evicted.
        """
        if len(self._writes) >= MOST_WRITES:
            return False
        path = list(node.path())[::-1]
        if not path or not all(one.hashes for one in path):
            return True  # it was evicted or forgotten
        keys = split(b"".join([one.hashes for one in path]), HASH_BYTES)
        first = self.pages.num_known(keys)
        if first == len(keys):
            self._write_parts(node, keys[node.depth // self._kv_cache.shape.page_size :])
            return True
        last = min(len(keys), first + self._most_pages)
        token_ids = np.concatenate([one.tokens for one in path])
        tokens = self._split_tokens(token_ids)
        before = keys[first - 1] if first else None
        taken = self.pages.reserve(before, keys[first:last], tokens[first:last], first)
        self.counts.dropped_pages += last - first - len(taken)
        if first + len(taken) == last < len(keys):
            self._candidates.appendleft(node)  # the rest of it is next
        self.counts.evicted_pages = self.pages.evicted
        if taken:
            rows = [np.concatenate([pages_of(one, pool) for one in path]) for pool in self._pools]
            here = slice(first, first + len(taken))
            self._begin_write(node, taken, taken, [row[here] for row in rows])
            page_size, is_end = self._kv_cache.shape.page_size, first + len(taken) == len(keys)
            if self.pages.windows and is_end and first * page_size > node.depth:
                self._candidates.append(node)  # what is there of it may lack parts
        return True

    def _write_parts(self, node: RadixNode, keys: Sequence[bytes]) -> None:
        """Begin to copy what a node has of windows, and its pages on the host lack.

        Args:
            node: its pages are on the host, or being written.
            keys: the hashes of its pages.
        """
        if not self.pages.windows:
            return
        # One copy, though it may be longer than others: parts of a window alone are worth nothing.
        last = -max(self._most_pages, *[one.behind for one in self.pages.windows.values()])
        found = [(at, self.pages.get(key)) for at, key in enumerate(keys[last:])]
        there = {
            at: page
            for at, page in found
            if page is not None and page.state is HostPageState.CACHED
        }
        rows = [pages_of(node, pool)[last:][list(there)] for pool in self._pools] if there else []
        if there:
            self._begin_write(node, [], list(there.values()), rows)

    def _begin_write(
        self,
        node: RadixNode,
        taken: list[HostPage],
        pages: Sequence[HostPage],
        rows: Sequence[Pages],
    ) -> None:
        """Order a copy to the host, of whole pages and of windows' parts that these lack.

        Args:
            node: that has the last of them.
            taken: `pages` if they were reserved for this, else none: then only parts are copied.
            pages: of the host.
            rows: for each pool where they are on the device; `NO_PAGE` where a window has passed.
        """
        parts: dict[int, list[HostPart]] = {}
        device_pages = [row if taken else NO_PAGES for row in rows]
        for pool, window in self.pages.windows.items():
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
        times = tuple(self._kv_cache.times_allocated(*each) for each in enumerate(where))
        nbytes = self._bytes.of(len(taken), {pool: len(some) for pool, some in parts.items()})
        number = self._start(True, where, taken, parts)
        self._writes[number] = Write(node, taken, parts, where, times, nbytes)

    def _end_write(self, write: Write, ended: CopyEnded) -> None:
        valid = [
            (self._kv_cache.times_allocated(pool, pages) == times) & (not ended.error)
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
        self.pages.end_write(write.pages, num_valid)
        for pool, parts in write.parts.items():
            self.pages.end_window_write(pool, parts, valid[pool].tolist())
        counts = self.counts
        counts.written_pages += num_valid
        counts.dropped_pages += len(whole) - num_valid
        counts.write_bytes += write.nbytes
        counts.write_seconds += ended.seconds

    # From the host

    def find(self, token_ids: TokenIds, namespace: str, keys: bytes) -> HostPrefix | None:
        """What the host has of `token_ids` beyond what the device has; None: nothing.

        Args:
            token_ids: that may come from a cache.
            namespace: see `PrefixIndex`.
            keys: what `hash` says of these.
        """
        size = self._kv_cache.shape.page_size
        first = self._kv_cache.count_cached(token_ids, namespace) // size
        tokens = self._split_tokens(token_ids[first * size :])
        row = self.pages.find(split(keys, HASH_BYTES)[first:], tokens)
        pages = tuple(row[: self.pages.num_continuable(row)])
        if not pages:
            return None
        parts = {}
        for pool, window in self.pages.windows.items():
            parts[pool] = window.parts(pages[-window.behind :])
            window.use(parts[pool])
        token_ids = token_ids[: (first + len(pages)) * size]
        return HostPrefix(token_ids, namespace, first, pages, parts)

    def hash(self, token_ids: TokenIds, namespace: str) -> bytes:
        """The hashes of the whole pages of some tokens. Half a microsecond a page."""
        hashes = self._log.hashes
        return hashes.extend(hashes.root(namespace), token_bytes(token_ids))

    def load(self, prefix: HostPrefix, headroom: Sequence[int] | None) -> Load | None:
        """Bring a prefix back, by a load that runs if one brings all of it; `None`: no room.

        Args:
            prefix: found just now.
            headroom: pages of each pool that must stay free for others.
        """
        for running in self._loads.values():
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
        self.pages.pin(prefix.pages)
        for pool, parts in prefix.parts.items():
            self.pages.windows[pool].pin(parts)
        load = Load(prefix, lease)
        self._load_more(load)
        return load

    def give_up(self, load: Load) -> None:
        """Bring no more of a load: its memory is needed. What the running copy brings is kept."""
        load.given_up = True
        self.counts.late_loads += 1

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
        self._loads[self._start(False, device_pages, pages, parts)] = load

    def _end_load_copy(self, load: Load, ended: CopyEnded) -> None:
        """Begin the next copy, or end the load."""
        counts, prefix = self.counts, load.prefix
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
            self._end_load(load, load.num_done if are_here else 0)

    def _end_load(self, load: Load, num_valid: int) -> None:
        """Publish the pages that have come and were not forgotten, and free the others.

        None if a window has not come that is seen behind them.
        """
        load.ended_at = self._kv_cache.clock()
        prefix = load.prefix
        self.pages.unpin(prefix.pages)
        for pool, parts in prefix.parts.items():
            self.pages.windows[pool].unpin(parts)
        tokens = prefix.token_ids[: (prefix.first_page + num_valid) * load.lease.page_size]
        outcome = Outcome.ABORTED
        if num_valid and load.lease.can_go_back(len(tokens)):
            outcome = Outcome.FINISHED
            self.counts.loaded_pages += num_valid
            self._kv_cache.commit(load.lease, len(tokens))
        release_kv_cache(self._kv_cache, load.lease, outcome, token_ids=tokens)

    @property
    def version(self) -> int:
        """Higher than before if something more can be found."""
        return self.pages.version

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

    # Both

    def _start(
        self,
        to_host: bool,
        device_pages: tuple[Pages, ...],
        pages: Sequence[HostPage],
        parts: Mapping[int, Sequence[HostPart]],
    ) -> int:
        number = next(self._numbers)
        whole = np.array([page.slot for page in pages], np.int32)
        slots = {pool: [part.slot for part in some] for pool, some in parts.items()}
        host_pages = tuple(
            np.array(slots[pool], np.int32) if pool in slots else whole for pool in self._pools
        )
        self._stream.start(PageMoves(number, to_host, device_pages, host_pages))
        return number

    def finish(self, ended: CopyEnded) -> None:
        """A copy has ended. One that is not known, or has ended before, is ignored."""
        write = self._writes.pop(ended.operation, None)
        if write is not None:
            self._end_write(write, ended)
        load = self._loads.pop(ended.operation, None)
        if load is not None:
            self._end_load_copy(load, ended)

    def expected_seconds(self, prefix: HostPrefix) -> float:
        """Until a load would end that began now: copies that have not ended come before it."""
        nbytes = sum([write.nbytes for write in self._writes.values()])
        for one, done in [(load.prefix, load.num_done) for load in self._loads.values()]:
            left = len(one.pages) - done
            nbytes += self._bytes.of(left, one.num_parts(done, left))
        number = len(prefix.pages)
        return self.speed.seconds(nbytes + self._bytes.of(number, prefix.num_parts(0, number)))

    # Counts and checks

    def tier_counts(self) -> Iterator[tuple[str, TierCounts]]:
        """What this tier and the one below have done, by their names."""
        yield HOST, self.counts
        if self.storage is not None:
            yield STORAGE, self.storage.counts

    def pool_counts(self, device: Sequence[PoolCounts]) -> tuple[PoolCounts, ...]:
        """The counts of the device's pools, with what loads write there, and of those below."""
        in_flight = [0] * len(device)
        for load in self._loads.values():
            for pool in range(len(device)):
                in_flight[pool] += len(load.lease.own_pages(pool))
        told = [
            counts if not pages else _in_flight(counts, pages)
            for counts, pages in zip(device, in_flight, strict=True)
        ]
        below = () if self.storage is None else self.storage.pool_counts()
        return (*told, *self.pages.pool_counts(), *below)

    def split(self, token_ids: TokenIds, keys: bytes) -> tuple[list[bytes], list[bytes]]:
        """The hashes and the tokens of whole pages, each by itself.

        Args:
            token_ids: of a prompt, from the start of a page.
            keys: what `hash` says of these.
        """
        return split(keys, HASH_BYTES), self._split_tokens(token_ids)

    def _split_tokens(self, token_ids: TokenIds) -> list[bytes]:
        return split(token_bytes(token_ids), 4 * self._kv_cache.shape.page_size)


def _in_flight(counts: PoolCounts, pages: int) -> PoolCounts:
    """With so many pages counted for loads that the leases of these hold."""
    return replace(counts, held=counts.held - pages, in_flight=pages)
