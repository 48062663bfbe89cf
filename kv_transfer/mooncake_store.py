"""A `PageStore` in the memory of many machines: Mooncake Store.

A page is an object there, named by the layout and the page's hash. It has the same header and
checksum as a page in a file. Returned bytes are only believed if these say that it is the very
page. Mooncake decides what it evicts, and may say that a page exists whose memory is gone: that is
a miss.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import compress, islice
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from kvrelay.device.daemon_threads import DaemonThreads
from kvrelay.mem_cache.storage.storage_buffers import HostMemory, PageBuffers
from kvrelay.mem_cache.storage.storage_format import StorageFormat
from kvrelay.mem_cache.storage.storage_pages import (
    MOST_OPERATIONS,
    NOTHING_BEFORE,
    StoragePage,
    StoreOperation,
    StoreState,
)

logger = logging.getLogger(__name__)

SCHEME: Final = "mooncake"
_NO_METADATA_SERVER: Final = "P2PHANDSHAKE"
_LOCAL_BUFFER_BYTES: Final = 16 << 20
"""The size of Mooncake's own buffer; pages are read and written in place."""
_MISSING: Final = -704
_FULL: Final = -200
_LEASE_SECONDS: Final = 1.0
"""Seconds between two tries to remove an object that has readers."""
_REMOVED_AT_ONCE: Final = 16
_GUESSED_BYTES_PER_SECOND: Final = 1e9
_MOST_REMEMBERED: Final = 1 << 20
"""The most pages of which this worker remembers what continues them."""


@dataclass(frozen=True, slots=True)
class MooncakeAddress:
    """A Mooncake master's address and transport: ``mooncake://HOST:PORT?protocol=rdma``."""

    master: str
    protocol: str = "tcp"
    device: str = ""
    """The RDMA device; empty: Mooncake looks for one."""

    @classmethod
    def parse(cls, url: str) -> MooncakeAddress:
        """Parse a URL. Raises a ValueError that says what is wrong."""
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
        if unknown := options.keys() - {"protocol", "device"}:
            raise ValueError(f"{url}: {', '.join(sorted(unknown))} is unknown there")
        if parts.scheme != SCHEME or parts.port is None or parts.path.strip("/"):
            raise ValueError(f"{url} is not {SCHEME}://HOST:PORT")
        return cls(parts.netloc, **options)


class MooncakeStore:
    """A store that keeps pages in Mooncake Store.

    Args:
        address: of the master.
        host: the address at which other machines reach this process.
        layout: of a page.
        lent_bytes: memory of this process that it lends to the store.
        memory: the host's pools. They must stay in place.

    Raises:
        OSError: the master does not answer, or memory cannot be had.
        RuntimeError: Mooncake is not installed.
    """

    def __init__(
        self,
        address: MooncakeAddress,
        host: str,
        layout: StorageFormat,
        lent_bytes: int,
        memory: HostMemory,
    ) -> None:
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise RuntimeError(f"Mooncake is not installed: {error}") from error
        self.buffers = PageBuffers(layout, memory)
        """The memory that is read from and written to."""
        self._prefix = layout.name
        self._store: Any = MooncakeDistributedStore()
        rest = (_LOCAL_BUFFER_BYTES, address.protocol, address.device, address.master)
        if code := self._store.setup(host, _NO_METADATA_SERVER, lent_bytes, *rest):
            raise OSError(f"the master at {address.master} cannot be used: {code}")
        for start, nbytes in self.buffers.regions:
            if code := self._store.register_buffer(start, nbytes):
                raise OSError(f"Mooncake does not take {nbytes} bytes of memory: {code}")
        self._threads = DaemonThreads(MOST_OPERATIONS, "mooncake")
        self._broken = 0
        self._write_error = ""
        self._puts: list[_Put] = []
        self._following: dict[bytes, set[bytes]] = {}
        """The keys of the pages that this worker has put, or found, behind each page."""
        self._forgotten: dict[bytes, None] = {}
        """Keys that are not found here, whatever Mooncake has under them; the oldest first."""
        self._to_remove: dict[str, float] = {}
        """The names of objects to remove, and the time of the next try."""

    # PageStore

    def exists(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """See `PageStore`. Calls the master."""
        self._remove_more()
        there = self._store.batch_is_exist(list(map(self.name, keys))) if keys else []
        found = [code == 1 for code in there]
        self._note_following(compress(zip((NOTHING_BEFORE, *keys), keys, strict=False), found))
        return [one and key not in self._forgotten for key, one in zip(keys, found, strict=True)]

    def get(self, pages: Sequence[StoragePage]) -> StoreOperation:
        """See `PageStore`."""
        return _Get(self, [page for page in pages if page.key not in self._forgotten], pages)

    def put(self, pages: Sequence[StoragePage]) -> StoreOperation:
        """See `PageStore`."""
        self._puts = [one for one in self._puts if not one.ended]
        self._puts.append(_Put(self, pages))
        return self._puts[-1]

    def forget(self, keys: Sequence[bytes]) -> None:
        """See `PageStore`."""
        todo, forgotten = list(keys), set[bytes]()
        while todo:
            key = todo.pop()
            todo += self._following.pop(key, ())
            forgotten.add(key)
        for put in self._puts:
            put.cleared |= forgotten
        for key in forgotten:
            self._forgotten[key] = None
            self._remove(self.name(key))
        while len(self._forgotten) > _MOST_REMEMBERED:
            self._forgotten.pop(next(iter(self._forgotten)))

    def _remove(self, name: str) -> None:
        """Remove an object, perhaps later, because its readers hold a lease for some seconds."""
        if len(self._to_remove) < _MOST_REMEMBERED:
            self._to_remove[name] = 0.0
        self._remove_more()

    def _remove_more(self) -> None:
        """Try again to remove objects that had readers, a few at a time."""
        now = time.monotonic()
        due = [name for name, at in islice(self._to_remove.items(), _REMOVED_AT_ONCE) if at <= now]
        for name in due:
            del self._to_remove[name]
            if not self._is_removed(name):
                self._to_remove[name] = now + _LEASE_SECONDS

    def _is_removed(self, name: str) -> bool:
        try:
            return self._store.remove(name) in (0, _MISSING)
        except Exception as error:  # a master that is gone costs time, never the worker
            logger.warning("Mooncake could not remove a page: %s", error)
            return False

    def may_put(self, page: StoragePage) -> bool:
        """Whether a put stores this page; an old object must be removed from Mooncake first."""
        return self.name(page.key) not in self._to_remove

    def state(self) -> StoreState:
        """See `PageStore`."""
        return StoreState(None, 0, self._broken, self._write_error)

    def close(self) -> None:
        """See `PageStore`."""
        self._threads.close()
        self._store.close()

    def measure_bytes_per_second(self) -> float:
        """Guess, until something was read: a page put by this process lies in its own memory."""
        return _GUESSED_BYTES_PER_SECOND

    # For operations

    def name(self, key: bytes) -> str:
        """Name a page as Mooncake knows it."""
        return f"{self._prefix}/{key.hex()}"

    def start(
        self, is_write: bool, pages: Sequence[StoragePage], blocks: Sequence[int]
    ) -> Future[list[int]]:
        """Start to move pages by Mooncake. A page with a negative code was not moved."""
        parts = [
            self.buffers.parts(block, page.slot) for page, block in zip(pages, blocks, strict=True)
        ]
        addresses = [[address for address, _ in each] for each in parts]
        sizes = [[nbytes for _, nbytes in each] for each in parts]
        names = [self.name(page.key) for page in pages]
        store = self._store
        move: Callable[..., list[int]] = (
            store.batch_put_from_multi_buffers if is_write else store.batch_get_into_multi_buffers
        )
        return self._threads.submit(move, names, addresses, sizes)

    def drop_broken(self, page: StoragePage) -> None:
        """Remove an object that is not the page that its name says."""
        self._broken += 1
        logger.warning("a page in Mooncake is broken, and is removed")
        self._remove(self.name(page.key))

    def note_put(self, pages: Iterable[StoragePage]) -> None:
        """Note that these pages are there now."""
        for page in pages:
            self._note_following([(page.before, page.key)])
            self._forgotten.pop(page.key, None)

    def _note_following(self, neighbours: Iterable[tuple[bytes, bytes]]) -> None:
        """Note that each second page continues the first one."""
        if len(self._following) > _MOST_REMEMBERED:
            self._following.clear()
        for before, key in neighbours:
            self._following.setdefault(before, set()).add(key)

    def note_codes(self, codes: Iterable[int]) -> None:
        """Note how writes have ended. Errors other than too little room are reported."""
        failed = {code for code in codes if code < 0} - {_FULL}
        error = f"Mooncake answers {', '.join(map(str, sorted(failed)))}" if failed else ""
        if error and not self._write_error:
            logger.error("pages could not be written: %s", error)
        self._write_error = error

    def remove(self, pages: Iterable[StoragePage]) -> None:
        """Remove pages that were forgotten while they were written."""
        self.forget([page.key for page in pages])


class _Get:
    """An operation that reads pages from Mooncake."""

    def __init__(
        self, store: MooncakeStore, pages: Sequence[StoragePage], asked: Sequence[StoragePage]
    ) -> None:
        self._store = store
        self._pages = pages
        self._asked = asked
        self._blocks = store.buffers.take(len(pages))
        for block in self._blocks:
            store.buffers.clear_header(block)
        self._moved = store.start(False, pages, self._blocks) if pages else None

    def poll(self) -> Sequence[bool] | None:
        """See `StoreOperation`."""
        if self._moved is not None and not self._moved.done():
            return None
        codes = _codes(self._moved, len(self._pages))
        came: set[bytes] = set()
        for page, block, code in zip(self._pages, self._blocks, codes, strict=True):
            if code >= 0 and self._store.buffers.is_page(block, page):
                came.add(page.key)
            elif code >= 0:
                self._store.drop_broken(page)
        self._store.buffers.give_back(self._blocks)
        return [page.key in came for page in self._asked]


class _Put:
    """An operation that writes pages to Mooncake."""

    def __init__(self, store: MooncakeStore, asked: Sequence[StoragePage]) -> None:
        self._store = store
        self._asked = asked
        self._pages = pages = [page for page in asked if store.may_put(page)]
        self._blocks = store.buffers.take(len(pages))
        self.ended = False
        self.cleared: set[bytes] = set()
        """The keys of pages that must not be kept after all."""
        for page, block in zip(pages, self._blocks, strict=True):
            store.buffers.write_header(block, page)
        self._moved = store.start(True, pages, self._blocks) if pages else None

    def poll(self) -> Sequence[bool] | None:
        """See `StoreOperation`."""
        if self._moved is not None and not self._moved.done():
            return None
        self.ended = True
        codes = _codes(self._moved, len(self._pages))
        self._store.buffers.give_back(self._blocks)
        self._store.note_codes(codes)
        put = [page for page, code in zip(self._pages, codes, strict=True) if code >= 0]
        kept = [page for page in put if page.key not in self.cleared]
        self._store.note_put(kept)
        self._store.remove(page for page in put if page.key in self.cleared)
        there = {page.key for page in kept}
        return [page.key in there for page in self._asked]


def _codes(moved: Future[list[int]] | None, number: int) -> list[int]:
    """Get Mooncake's code for each page; all have failed if it raised."""
    if moved is None:
        return []
    error = moved.exception()
    if error is not None:
        logger.warning("Mooncake has failed: %s", error)
        return [_MISSING] * number
    codes = moved.result()
    return codes if len(codes) == number else [_MISSING] * number
