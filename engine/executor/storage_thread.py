"""A thread that calls a store of pages, and polls its operations until they end."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Final

from kvrelay.device.thread_end import CLOSE_SECONDS, ended_within
from kvrelay.mem_cache.storage.storage_orders import (
    Fetch,
    Forget,
    LookUp,
    StorageEnded,
    StorageOrder,
    Store,
)
from kvrelay.mem_cache.storage.storage_pages import MOST_OPERATIONS, PageStore, StoreOperation

logger = logging.getLogger(__name__)

MOST_WRITING: Final = 2
"""The most operations that write at a time, so that a read need not wait for a slow disk."""
_POLL_DELAY_S: Final = (50e-6, 2e-3)
"""Seconds between polls, for operations that have just begun and for long ones."""


@dataclass(slots=True)
class _Running:
    """An operation of the store."""

    order: Fetch | Store
    operation: StoreOperation
    begun: float


class StorageThread:
    """A `StorageStream` that looks up and reads before it writes.

    Args:
        store: called on this thread alone.
        on_end: called with each order's end, on this thread.
        on_failure: called once, on this thread, if it must give up.
    """

    def __init__(
        self,
        store: PageStore,
        on_end: Callable[[StorageEnded], object],
        on_failure: Callable[[str], None],
    ) -> None:
        self._store = store
        self._on_end = on_end
        self._on_failure = on_failure
        self._reads: deque[StorageOrder] = deque()
        self._writes: deque[Store] = deque()
        self._closing = False
        self._wakened = threading.Condition()
        self._running: list[_Running] = []
        self._thread = threading.Thread(target=self._run, name="storage", daemon=True)
        self._thread.start()

    def start(self, order: StorageOrder) -> None:
        """See `StorageStream`."""
        with self._wakened:
            if isinstance(order, Store):
                self._writes.append(order)
            else:
                self._reads.append(order)
            self._wakened.notify()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """End what runs, and run the orders to forget; begin nothing else.

        Gives up what has not ended after `seconds`.
        """
        with self._wakened:
            self._closing = True
            self._wakened.notify()
        if not ended_within(self._thread, seconds):
            logger.error("storage has not ended what it does for %g s", seconds)

    # On the thread

    def _run(self) -> None:
        try:
            while (order := self._next()) is not None or self._running:
                if order is not None:
                    self._begin(order)
                self._poll()
            self._store.close()
        except Exception as error:
            logger.exception("storage gives up")
            self._on_failure(f"{type(error).__name__}: {error}")

    def _next(self) -> StorageOrder | None:
        """Take the next order. Returns None if it is time to poll, or to end."""
        with self._wakened:
            while True:
                order = self._take()
                if order is not None:
                    return order
                if self._running:
                    self._wakened.wait(self._delay())
                    return self._take()
                if self._closing:
                    return None
                self._wakened.wait()

    def _take(self) -> StorageOrder | None:
        """Take an order that may begin now; when closing, only orders to forget."""
        if self._closing:
            forgets = [order for order in self._reads if isinstance(order, Forget)]
            self._reads = deque(forgets[1:])
            return forgets[0] if forgets else None
        full = len(self._running) >= MOST_OPERATIONS
        if self._reads and not (full and isinstance(self._reads[0], Fetch)):
            return self._reads.popleft()
        writing = sum([isinstance(one.order, Store) for one in self._running])
        if self._writes and not full and writing < MOST_WRITING:
            return self._writes.popleft()
        return None

    def _delay(self) -> float:
        shortest, longest = _POLL_DELAY_S
        age = time.monotonic() - max(one.begun for one in self._running)
        return min(max(age / 50, shortest), longest)

    def _begin(self, order: StorageOrder) -> None:
        begun = time.monotonic()
        match order:
            case LookUp():
                self._end(order, self._look_up(order.keys), begun)
            case Forget():
                self._clear(set(order.keys))
                self._store.forget(order.keys)
                self._end(order, (), begun)
            case Fetch():
                self._running.append(_Running(order, self._store.get(order.pages), begun))
            case Store():
                self._running.append(_Running(order, self._store.put(order.pages), begun))

    def _look_up(self, keys: Sequence[bytes]) -> list[bytes]:
        """Find which of the keys are in the store; none if it cannot answer."""
        try:
            return list(compress(keys, self._store.exists(keys)))
        except Exception:  # a store that is gone costs time, never the worker
            logger.exception("storage could not be asked")
            return []

    def _clear(self, keys: Container[bytes]) -> None:
        """Remove pages with these keys from the writes that have not begun."""
        with self._wakened:
            for at, order in enumerate(self._writes):
                left = [page for page in order.pages if page.key not in keys]
                self._writes[at] = replace(order, pages=left)

    def _poll(self) -> None:
        for one in list(self._running):
            valid = one.operation.poll()
            if valid is not None:
                self._running.remove(one)
                keys = [page.key for page in one.order.pages]
                self._end(one.order, list(compress(keys, valid)), one.begun)

    def _end(self, order: StorageOrder, found: Sequence[bytes], begun: float) -> None:
        seconds = time.monotonic() - begun
        state = self._store.state()
        self._on_end(StorageEnded(order.operation, found, seconds, state))
