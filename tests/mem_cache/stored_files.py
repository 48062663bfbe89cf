"""A store of files, as one worker has it, and the pages that tests keep in it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvrelay.mem_cache.storage.storage_buffers import PageBuffers
from kvrelay.mem_cache.storage.storage_files import FileStore
from kvrelay.mem_cache.storage.storage_format import StorageFormat
from kvrelay.mem_cache.storage.storage_pages import NOTHING_BEFORE, StoragePage, StoreOperation
from kvrelay.mem_cache.storage.storage_slots import StorageSlots
from kvrelay.wire.model_digest import NO_MODEL
from kvrelay.wire.page_hash import HASH_BYTES, PageHashes, token_bytes
from tests.known import known
from tests.mem_cache.plain_files import PlainFiles

PAGE_TOKENS = 4
POOL_BYTES = (96, 40)
"""Of a page in each of two pools."""
LAYOUT = StorageFormat(bytes(range(32)), 4 * PAGE_TOKENS, sum(POOL_BYTES))
HASHES = PageHashes(NO_MODEL, PAGE_TOKENS)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0  # so that what is known of other folders is always too old
        return self.now


class Worker:
    """A store with a host pool of 32 pages; the bytes of a page are made of its hash."""

    def __init__(
        self, root: Path, slots: int = 12, layout: StorageFormat = LAYOUT, **options: Any
    ) -> None:
        self.memory = [np.zeros((32, nbytes), np.uint8) for nbytes in POOL_BYTES]
        self.io = PlainFiles(**options)
        self.clock = Clock()
        size = slots * layout.slot_bytes + 100
        self.store = FileStore(root, layout, size, PAGE_TOKENS, self.memory, self.io, self.clock)

    def put(self, pages: Sequence[StoragePage]) -> list[bool]:
        for page in pages:
            self.fill(page)
        return self.finish(self.store.put(pages))

    def exists(self, keys: list[bytes]) -> int:
        """How many of neighbouring pages there are, from the first one on."""
        there = self.store.exists(keys)
        return next((at for at, one in enumerate(there) if not one), len(keys))

    def fill(self, page: StoragePage) -> None:
        for pool in self.memory:
            pool[page.slot] = bytes_of(page.key, pool.shape[1])

    def get(self, pages: Sequence[StoragePage]) -> list[bool]:
        """Which came; those are right."""
        for pool in self.memory:
            pool[:] = 0xEE
        self.exists(keys(pages))
        return self.check(pages, self.finish(self.store.get(pages)))

    def check(self, pages: Sequence[StoragePage], valid: list[bool]) -> list[bool]:
        for page, came in zip(pages, valid, strict=True):
            for pool in self.memory:
                right = (pool[page.slot] == bytes_of(page.key, pool.shape[1])).all()
                assert right or not came, "a wrong page came"
        return valid

    def finish(self, operation: StoreOperation) -> list[bool]:
        while (valid := operation.poll()) is None:
            time.sleep(0)
        check_slots(self.store._own.slots)
        return list(valid)

    def close(self) -> None:
        counts = known(self.store.state().pool)
        assert counts.in_flight == counts.cached_protected == 0
        assert not num_taken(self.store.buffers)
        self.store.close()

    def kill(self) -> None:
        """Leave everything as it is; the system closes the files, and ends the lock."""
        self.store._sync.close()
        own = self.store._own
        os.close(own._lock)
        own._index.close()
        for segment in own._segments.values():
            os.close(segment.file)

    @property
    def broken(self) -> int:
        return self.store.state().broken_pages


def check_slots(slots: StorageSlots) -> None:
    """Run `StorageSlots.check`, and check each slot by itself."""
    slots.check()
    stored = [page.slot for page in slots._pages.values()]
    owned = [*slots._free, *slots._writing, *slots._gone, *stored]
    assert sorted(owned) == list(range(slots.total))
    assert slots._num_pinned == sum(1 for page in slots._pages.values() if page.pins)
    assert all(page.pins for page in slots._gone.values())
    following = {key for keys in slots._following.values() for key in keys}
    assert following == set(slots._pages), "what continues a page is not what is here"


def num_taken(buffers: PageBuffers) -> int:
    """Blocks for headers that are in use."""
    return len(buffers._headers) - len(buffers._free)


def bytes_of(key: bytes, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(list(key)).integers(0, 256, nbytes, np.uint8)


def prompt(number: int, pages: int, namespace: str = "") -> list[StoragePage]:
    """The first pages of a prompt, in the first slots of the host."""
    tokens = token_bytes([number * 100 + at for at in range(pages * PAGE_TOKENS)])
    keys = HASHES.extend(HASHES.root(namespace), tokens)
    split = [keys[at : at + HASH_BYTES] for at in range(0, len(keys), HASH_BYTES)]
    size = 4 * PAGE_TOKENS
    return [
        StoragePage(key, before, tokens[at * size : (at + 1) * size], at)
        for at, (before, key) in enumerate(zip([NOTHING_BEFORE, *split], split, strict=False))
    ]


def keys(pages: Sequence[StoragePage]) -> list[bytes]:
    return [page.key for page in pages]
