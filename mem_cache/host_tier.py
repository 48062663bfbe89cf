"""The tier below the device: pages that the prefix index publishes are copied to host memory.

*Writing back* takes no page from anybody and lets nobody wait. A copy reads pages of the prefix
index without locking them; when it has ended, a page that was handed out meanwhile is dropped,
for its bytes may be another's. So the device evicts as if there was no copy. What the index
evicts, or gives to a retracted request's successor, has mostly been copied before: as soon as
less than half of a pool is free, what is published is copied at once, and what was published
before is copied behind it, in order.

*Bringing back* takes memory as a request does: a lease, on what the index has of the prefix and
on pages for what it lacks. Those are written by the copy, published when it has ended, and the
lease is released. Nobody holds them then: who wants the prefix finds it in the index.

*Lending* takes nothing from the device: a decode worker reads pages where they are. They stay, even
if they are forgotten meanwhile, until who lends them says that their reader's stream has ended.

The engine thread calls everything here; a copy's end is told to `finish`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Final

import numpy as np
import numpy.typing as npt

from kvrelay.mem_cache.account import Pages
from kvrelay.mem_cache.counts import TierCounts
from kvrelay.mem_cache.host_pages import HOST, HostPage, HostPages, HostPageState
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager
from kvrelay.mem_cache.lease import Lease
from kvrelay.mem_cache.prefix_index import TokenIds
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


@dataclass(frozen=True, slots=True)
class HostPrefix:
    """What the host has of a prompt beyond what the device has."""

    token_ids: TokenIds
    """From the first one to the end of `pages`."""
    namespace: str
    first_page: int
    """Where `pages` begin."""
    pages: tuple[HostPage, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of `pages`."""
        return len(self.token_ids) // (self.first_page + len(self.pages)) * len(self.pages)


@dataclass(eq=False, slots=True)
class Load:
    """Pages that come back from the host."""

    prefix: HostPrefix
    lease: Lease
    num_done: int = 0
    """Pages that have come, the first ones."""
    num_moving: int = 0
    """Pages after those, which the copy that runs brings."""
    given_up: bool = False
    """No further copy begins."""
    ended: bool = False
    """The prefix index has what has come."""


@dataclass(frozen=True, slots=True)
class _Write:
    """Pages that go to the host."""

    node: RadixNode
    """That has them, and those before them."""
    pages: list[HostPage]
    device_pages: tuple[Pages, ...]
    times_allocated: tuple[npt.NDArray[np.uint32], ...]
    """Of each device page, when the copy began."""


class HostTier:
    """Copies published pages to the host pool, and brings them back.

    Args:
        kv_cache: of the device; its prefix index must tell `log`.
        log: of that prefix index.
        total_pages: of the host pool.
        page_bytes: of one page, over all pools.
        stream: copies.
        speed: of copies from the host.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        log: PrefixLog,
        total_pages: int,
        page_bytes: int,
        stream: CopyStream,
        speed: TierSpeed,
    ) -> None:
        assert not any(kv_cache.shape.windowed), "a window's pages have no host tier"
        self.pages = HostPages(total_pages, kv_cache.shape.page_size, self._record)
        """The account of the host pool."""
        self.counts = TierCounts()
        """What was copied so far."""
        self.speed = speed
        self.storage: StorageTier | None = None
        """The tier below; what is published is copied to the host at once then, to be shared."""
        self.page_bytes = page_bytes
        self._kv_cache = kv_cache
        self._log = log
        self._stream = stream
        self._numbers = count(1)
        self._writes: dict[int, _Write] = {}
        self._loads: dict[int, Load] = {}
        self._candidates: deque[RadixNode] = deque(maxlen=MOST_CANDIDATES)
        self._most_pages = max(1, COPY_BYTES // page_bytes)
        self._most_load_pages = max(1, LOAD_BYTES // page_bytes)
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
        keys = _split(b"".join([one.hashes for one in path]), HASH_BYTES)
        first = self.pages.num_known(keys)
        if first == len(keys):
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
            device_pages = tuple(
                np.concatenate([one.present(pool) for one in path])[first : first + len(taken)]
                for pool in self._kv_cache.shape.pool_numbers
            )
            times = tuple(self._kv_cache.times_allocated(*each) for each in enumerate(device_pages))
            self._writes[self._start(True, device_pages, taken)] = _Write(
                node, taken, device_pages, times
            )
        return True

    def _end_write(self, write: _Write, ended: CopyEnded) -> None:
        valid = np.ones(len(write.pages), np.bool_)
        for pool, pages in enumerate(write.device_pages):
            valid &= self._kv_cache.times_allocated(pool, pages) == write.times_allocated[pool]
        if ended.error:
            valid[:] = False
            with contextlib.suppress(ValueError):
                self._candidates.remove(write.node)  # or its rest would be tried without end
        num_valid = len(valid) if valid.all() else int(valid.argmin())
        self.pages.end_write(write.pages, num_valid)
        counts = self.counts
        counts.written_pages += num_valid
        counts.dropped_pages += len(valid) - num_valid
        counts.write_bytes += len(valid) * self.page_bytes
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
        pages = self.pages.find(_split(keys, HASH_BYTES)[first:], tokens)
        if not pages:
            return None
        return HostPrefix(token_ids[: (first + len(pages)) * size], namespace, first, tuple(pages))

    def hash(self, token_ids: TokenIds, namespace: str) -> bytes:
        """The hashes of the whole pages of some tokens. Half a microsecond a page."""
        hashes = self._log.hashes
        return hashes.extend(hashes.root(namespace), _token_bytes(token_ids))

    def load(self, prefix: HostPrefix, headroom: Sequence[int] | None) -> Load | None:
        """Bring a prefix back, by a load that runs if one brings all of it; `None`: no room.

        Args:
            prefix: found just now.
            headroom: pages of each pool that must stay free for others.
        """
        for running in self._loads.values():
            if not running.given_up and running.prefix.pages[: len(prefix.pages)] == prefix.pages:
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
        grown = self._kv_cache.grow(lease, len(token_ids))
        assert grown, "a promise was broken"
        self.pages.pin(prefix.pages)
        load = Load(prefix, lease)
        self._load_more(load)
        return load

    def give_up(self, load: Load) -> None:
        """Bring no more of a load: its memory is needed. What the running copy brings is kept."""
        load.given_up = True
        self.counts.late_loads += 1

    def _load_more(self, load: Load) -> None:
        """Begin the next copy of a load."""
        prefix, lease, done = load.prefix, load.lease, load.num_done
        pages = prefix.pages[done : done + self._most_load_pages]
        load.num_moving, first = len(pages), prefix.first_page + done
        device_pages = tuple(
            lease.pages(pool)[first : first + len(pages)]
            for pool in self._kv_cache.shape.pool_numbers
        )
        self._loads[self._start(False, device_pages, pages)] = load

    def _end_load_copy(self, load: Load, ended: CopyEnded) -> None:
        """Begin the next copy, or end the load."""
        counts, nbytes = self.counts, load.num_moving * self.page_bytes
        counts.load_bytes += nbytes
        counts.load_seconds += ended.seconds
        if not ended.error:
            load.num_done += load.num_moving
            self.speed.observe(nbytes, ended.seconds)
        load.num_moving = 0
        pages = load.prefix.pages
        are_here = all(page.state is HostPageState.CACHED for page in pages)
        if are_here and not (ended.error or load.given_up) and load.num_done < len(pages):
            self._load_more(load)
        else:
            self._end_load(load, load.num_done if are_here else 0)

    def _end_load(self, load: Load, num_valid: int) -> None:
        """Publish the pages that have come and were not forgotten, and free the others."""
        load.ended = True
        self.pages.unpin(load.prefix.pages)
        self.counts.loaded_pages += num_valid
        outcome, tokens = Outcome.ABORTED, load.prefix.token_ids
        if num_valid:
            outcome = Outcome.FINISHED
            tokens = tokens[: (load.prefix.first_page + num_valid) * load.lease.page_size]
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
        self, to_host: bool, device_pages: tuple[Pages, ...], pages: Sequence[HostPage]
    ) -> int:
        number = next(self._numbers)
        slots = np.array([page.slot for page in pages], np.int32)
        self._stream.start(PageMoves(number, to_host, device_pages, slots))
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
        writes = sum([len(write.pages) for write in self._writes.values()])
        loads = sum([len(load.prefix.pages) - load.num_done for load in self._loads.values()])
        return self.speed.seconds((writes + loads + len(prefix.pages)) * self.page_bytes)

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
        return (*told, self.pages.counts(), *below)

    def split(self, token_ids: TokenIds, keys: bytes) -> tuple[list[bytes], list[bytes]]:
        """The hashes and the tokens of whole pages, each by itself.

        Args:
            token_ids: of a prompt, from the start of a page.
            keys: what `hash` says of these.
        """
        return _split(keys, HASH_BYTES), self._split_tokens(token_ids)

    def _split_tokens(self, token_ids: TokenIds) -> list[bytes]:
        return _split(_token_bytes(token_ids), 4 * self._kv_cache.shape.page_size)


def _in_flight(counts: PoolCounts, pages: int) -> PoolCounts:
    """With so many pages counted for loads that the leases of these hold."""
    return replace(counts, held=counts.held - pages, in_flight=pages)


def _token_bytes(token_ids: TokenIds) -> bytes:
    return np.ascontiguousarray(token_ids, "<i4").tobytes()


def _split(joined: bytes, size: int) -> list[bytes]:
    """The whole pieces of `size` bytes."""
    return [joined[at : at + size] for at in range(0, len(joined) - size + 1, size)]
