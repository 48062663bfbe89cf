"""Storage of simulated workers: a folder that they share, and what each has ordered of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np

from kvrelay.mem_cache.storage.storage_orders import (
    Fetch,
    Forget,
    LookUp,
    StorageEnded,
    StorageOrder,
    Store,
)
from kvrelay.mem_cache.storage.storage_pages import (
    PageStore,
    StoragePage,
    StoreOperation,
    StoreState,
)
from tests.engine.simulation.model import NOBODYS

SharedPages = dict[bytes, tuple[StoragePage, list[np.ndarray]]]
"""What all workers find: each page with its bytes in every pool."""


@dataclass(frozen=True)
class Done:
    """An operation that has ended when it is first asked."""

    valid: Sequence[bool]

    def poll(self) -> Sequence[bool]:
        return self.valid


@dataclass(eq=False)
class MemoryStore:
    """A `PageStore` that keeps the pages of counting models."""

    shared: SharedPages
    host: Callable[[], list[np.ndarray]]
    """The host's pools of the worker whose store it is."""
    fails: Callable[[StoragePage, bool], bool] = field(default=lambda page, is_write: False)
    """Whether a page cannot be written, or read: then the host has nobody's bytes there."""

    def exists(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return [key in self.shared for key in keys]

    def get(self, pages: Sequence[StoragePage]) -> StoreOperation:
        valid = [self._is_there(page) and not self.fails(page, False) for page in pages]
        for page, is_there in zip(pages, valid, strict=True):
            kept = self.shared[page.key][1] if is_there else [NOBODYS] * len(self.host())
            for host, content in zip(self.host(), kept, strict=True):
                host[page.slot] = content
        return Done(valid)

    def put(self, pages: Sequence[StoragePage]) -> StoreOperation:
        valid = [not self.fails(page, True) for page in pages]
        for page in compress(pages, valid):
            kept = [host[page.slot].copy() for host in self.host()]
            self.shared.setdefault(page.key, (page, kept))
        return Done(valid)

    def forget(self, keys: Sequence[bytes]) -> None:
        todo = list(keys)
        while todo:
            key = todo.pop()
            todo += [one for one, (page, _) in self.shared.items() if page.before == key]
            self.shared.pop(key, None)

    def state(self) -> StoreState:
        return StoreState(None)

    def close(self) -> None: ...

    def _is_there(self, page: StoragePage) -> bool:
        kept = self.shared.get(page.key)
        return kept is not None and kept[0].tokens == page.tokens


@dataclass(eq=False)
class SimStorage:
    """A `StorageStream` of which each order waits to be carried out."""

    store: PageStore
    orders: deque[StorageOrder] = field(default_factory=deque)
    fails: bool = False
    """Nothing comes, and nothing is kept."""

    def start(self, order: StorageOrder) -> None:
        if isinstance(order, Forget):
            for at, one in enumerate(self.orders):
                if isinstance(one, Store):
                    left = [page for page in one.pages if page.key not in order.keys]
                    self.orders[at] = Store(one.operation, left)
        self.orders.append(order)

    def end(self, seconds: float = 0.0) -> StorageEnded:
        """Carry out the first that goes before the others."""
        writes = [order for order in self.orders if isinstance(order, Store)]
        order = next((one for one in self.orders if one not in writes), None) or writes[0]
        self.orders.remove(order)
        found: Sequence[bytes] = ()
        match order:
            case LookUp():
                found = list(compress(order.keys, self.store.exists(order.keys)))
            case Forget():
                self.store.forget(order.keys)
            case Fetch() | Store() if not self.fails:
                work = self.store.get if isinstance(order, Fetch) else self.store.put
                operation = work(order.pages)
                while (valid := operation.poll()) is None:
                    pass
                found = [page.key for page in compress(order.pages, valid)]
        return StorageEnded(order.operation, found, seconds, self.store.state())
