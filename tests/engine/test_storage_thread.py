"""The thread that calls a store: each order ends once, reads go before writes, nothing is left."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from kvrelay.engine.executor.storage_thread import MOST_WRITING, StorageThread
from kvrelay.mem_cache.storage.storage_orders import Fetch, Forget, LookUp, StorageEnded, Store
from kvrelay.mem_cache.storage.storage_pages import StoragePage, StoreState

WAIT_S = 30.0


def page(number: int) -> StoragePage:
    key = number.to_bytes(32, "big")
    return StoragePage(key, bytes(32), b"", number)


@dataclass(eq=False)
class SlowOperation:
    """Ends when it is let go."""

    store: SlowStore
    pages: Sequence[StoragePage]
    is_write: bool

    def poll(self) -> Sequence[bool] | None:
        if not (self.store.writes_end if self.is_write else self.store.reads_end).is_set():
            return None
        if self.is_write:
            self.store.keys.update(one.key for one in self.pages)
        return [one.key in self.store.keys for one in self.pages]


@dataclass(eq=False)
class SlowStore:
    """A store in memory whose operations end when a test says so."""

    keys: set[bytes] = field(default_factory=set)
    begun: list[SlowOperation] = field(default_factory=list)
    reads_end: threading.Event = field(default_factory=threading.Event)
    writes_end: threading.Event = field(default_factory=threading.Event)
    closed: bool = False

    def exists(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return [key in self.keys for key in keys]

    def get(self, pages: Sequence[StoragePage]) -> SlowOperation:
        return self._begin(SlowOperation(self, pages, is_write=False))

    def put(self, pages: Sequence[StoragePage]) -> SlowOperation:
        return self._begin(SlowOperation(self, pages, is_write=True))

    def _begin(self, operation: SlowOperation) -> SlowOperation:
        self.begun.append(operation)
        return operation

    def forget(self, keys: Sequence[bytes]) -> None:
        self.keys.difference_update(keys)

    def state(self) -> StoreState:
        return StoreState(None)

    def close(self) -> None:
        self.closed = True


class Threaded:
    def __init__(self) -> None:
        self.store = SlowStore()
        self.ended: queue.SimpleQueue[StorageEnded] = queue.SimpleQueue()
        self.failures: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.thread = StorageThread(self.store, self.ended.put, self.failures.put)

    def begin(self, number: int) -> None:
        """Wait until so many operations have begun."""
        until = time.monotonic() + WAIT_S
        while len(self.store.begun) < number:
            assert time.monotonic() < until, "they do not begin"
            time.sleep(1e-3)

    def close_beside(self) -> threading.Thread:
        """Close it on a thread of its own; returns when nothing else begins any more."""
        closing = threading.Thread(target=self.thread.close)
        closing.start()
        until = time.monotonic() + WAIT_S
        while not self.thread._closing:
            assert time.monotonic() < until, "it is not closed"
            time.sleep(1e-3)
        return closing

    def next(self) -> tuple[int, Sequence[bytes]]:
        ended = self.ended.get(timeout=WAIT_S)
        return ended.operation, ended.found


def test_what_was_stored_is_found_and_fetched() -> None:
    threaded = Threaded()
    threaded.store.reads_end.set()
    threaded.store.writes_end.set()
    pages = [page(1), page(2)]
    threaded.thread.start(Store(1, pages))
    assert threaded.next() == (1, [page(1).key, page(2).key])
    threaded.thread.start(LookUp(2, [page(1).key, page(3).key]))
    assert threaded.next() == (2, [page(1).key])
    threaded.thread.start(Fetch(3, [page(3), page(2)]))
    assert threaded.next() == (3, [page(2).key])
    threaded.thread.close()
    assert threaded.store.closed
    assert threaded.ended.empty()


def test_reads_do_not_wait_for_writes() -> None:
    threaded = Threaded()
    threaded.store.reads_end.set()
    for number in range(6):
        threaded.thread.start(Store(number, [page(number)]))
    threaded.begin(MOST_WRITING)
    threaded.thread.start(LookUp(10, [page(0).key]))
    assert threaded.next() == (10, [])
    threaded.thread.start(Fetch(11, [page(0)]))
    assert threaded.next() == (11, [])
    assert sum(one.is_write for one in threaded.store.begun) == MOST_WRITING
    threaded.store.writes_end.set()
    assert {threaded.next()[0] for _ in range(6)} == set(range(6))
    threaded.thread.close()


def test_what_is_forgotten_before_it_is_written_is_not_written() -> None:
    threaded = Threaded()
    for number in range(MOST_WRITING + 1):
        threaded.thread.start(Store(number, [page(number), page(100 + number)]))
    threaded.thread.start(Forget(10, [page(MOST_WRITING).key]))
    assert threaded.next() == (10, ())
    threaded.store.writes_end.set()
    ended = dict(threaded.next() for _ in range(MOST_WRITING + 1))
    assert ended[MOST_WRITING] == [page(100 + MOST_WRITING).key]
    assert page(MOST_WRITING).key not in threaded.store.keys
    threaded.thread.close()


def test_the_end_waits_for_what_runs_and_begins_nothing() -> None:
    threaded = Threaded()
    for number in range(6):
        threaded.thread.start(Store(number, [page(number)]))
    threaded.begin(MOST_WRITING)
    closing = threaded.close_beside()
    threaded.store.writes_end.set()
    closing.join(WAIT_S)
    assert threaded.store.closed
    assert len(threaded.store.keys) == MOST_WRITING


def test_a_disk_that_hangs_does_not_keep_the_worker() -> None:
    threaded = Threaded()
    threaded.thread.start(Fetch(1, [page(1)]))
    threaded.begin(1)
    threaded.thread.close(0.05)
    assert not threaded.store.closed
    threaded.store.reads_end.set()
    assert threaded.next()[0] == 1


def test_a_store_that_cannot_be_asked_has_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    threaded = Threaded()
    monkeypatch.setattr(threaded.store, "exists", lambda keys: 1 / 0)
    threaded.thread.start(LookUp(1, [page(1).key]))
    assert threaded.next() == (1, [])
    threaded.thread.close()
    assert threaded.failures.empty()


def test_what_is_to_be_forgotten_is_forgotten_at_the_end() -> None:
    threaded = Threaded()
    threaded.store.keys.add(page(1).key)
    for number in range(4):
        threaded.thread.start(Fetch(number, [page(1)]))
    threaded.begin(4)
    threaded.thread.start(Fetch(5, [page(1)]))
    threaded.thread.start(Forget(6, [page(1).key]))
    closing = threaded.close_beside()
    threaded.store.reads_end.set()
    closing.join(WAIT_S)
    assert threaded.store.closed
    assert not threaded.store.keys


def test_a_store_that_breaks_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    threaded = Threaded()
    monkeypatch.setattr(threaded.store, "get", lambda keys: 1 / 0)
    threaded.thread.start(Fetch(1, []))
    assert threaded.failures.get(timeout=WAIT_S) == "ZeroDivisionError: division by zero"
    threaded.thread.close()
