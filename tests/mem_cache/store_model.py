"""A store below a `Memory`: what was ordered of it moves its bytes one half after the other."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvrelay.mem_cache.host.host_page import HostPageState
from kvrelay.mem_cache.storage.storage_orders import (
    Fetch,
    Forget,
    LookUp,
    StorageEnded,
    StorageOrder,
    Store,
)
from kvrelay.mem_cache.storage.storage_pages import StoragePage, StoreState
from tests.known import known
from tests.mem_cache.truth import truth_of

if TYPE_CHECKING:
    from tests.mem_cache.memory import Memory


@dataclass(eq=False)
class Kept:
    """A page that was written whole."""

    page: StoragePage
    contents: list[np.ndarray]
    """In each pool."""
    prefix: tuple[str, list[int]]
    """The namespace, and all tokens up to its end."""
    tainted_at: float = math.inf
    """The time when it was forgotten, with what it was computed from: see `StoreModel.time`."""


@dataclass(eq=False)
class Running:
    """Of pages that go to the store, or come from it."""

    order: Fetch | Store
    halves: int = 0
    kept: dict[bytes, Kept] = field(default_factory=dict)
    """What it reads, or has written, by keys."""


class StoreModel:
    """A `StorageStream` with the store behind it; `advance` is its thread."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.pages: dict[bytes, Kept] = {}
        self._following: dict[bytes, set[bytes]] = {}
        """The keys of all pages that were ever written behind each, by its key."""
        self.time = 0
        """Rises with every order, and when something is forgotten."""
        self._reads: deque[StorageOrder] = deque()
        self._writes: deque[StorageOrder] = deque()
        self.running: list[Running] = []
        self._fetches: dict[int, int] = {}
        """When each fetch that has not begun was ordered."""
        self._to_keep: dict[int, dict[bytes, Kept]] = {}
        """What orders to store will have written, by their numbers and by keys."""

    @property
    def orders(self) -> bool:
        """Whether anything is left to do."""
        return bool(self._reads or self._writes or self.running)

    def start(self, order: StorageOrder) -> None:
        self.time += 1
        if isinstance(order, Fetch):
            self._fetches[order.operation] = self.time
        if isinstance(order, Store):
            self._to_keep[order.operation] = {page.key: self._blank(page) for page in order.pages}
            self._writes.append(order)
        else:
            self._reads.append(order)

    def taint(self, namespace: str, tokens: Sequence[int]) -> None:
        """What continues these tokens is forgotten now, and must not come back."""
        self.time += 1
        ordered = [kept for each in self._to_keep.values() for kept in each.values()]
        for kept in (*self.pages.values(), *ordered):
            name, prefix = kept.prefix
            if name == namespace and prefix[: len(tokens)] == list(tokens):
                kept.tainted_at = min(kept.tainted_at, self.time)

    def evict(self, pick: int) -> None:
        """The store may lose any page at any time."""
        if self.pages:
            del self.pages[list(self.pages)[pick % len(self.pages)]]

    def advance(self, pick: int = 0) -> None:
        """Begin something, move a half of its bytes, or end it."""
        steps = [*self.running]
        if self._reads:
            self._begin(self._reads.popleft())
        elif steps:
            self._move(steps[pick % len(steps)])
        elif self._writes:
            self._begin(self._writes.popleft())

    def begin_write(self) -> None:
        """Writes may run beside reads."""
        if self._writes:
            self._begin(self._writes.popleft())

    def _begin(self, order: StorageOrder) -> None:
        match order:
            case LookUp():
                self._tell(order, [key for key in order.keys if key in self.pages])
            case Forget():
                self._forget(order.keys)
                self._tell(order, [])
            case Fetch():
                kept = {p.key: self.pages[p.key] for p in order.pages if p.key in self.pages}
                ordered_at = self._fetches.pop(order.operation)
                # What was ordered before is on its way; nobody may find it: see `_check_fetched`.
                late = any(one.tainted_at < ordered_at for one in kept.values())
                assert not late, "what was forgotten is back"
                self.running.append(Running(order, kept=kept))
            case Store():
                self.running.append(Running(order, kept=self._to_keep[order.operation]))

    def _forget(self, keys: Sequence[bytes]) -> None:
        for at, order in enumerate(self._writes):
            assert isinstance(order, Store)
            left = [page for page in order.pages if page.key not in keys]
            self._writes[at] = Store(order.operation, left)
        for one in self.running:
            if isinstance(one.order, Store):
                left = [page for page in one.order.pages if page.key not in keys]
                one.order = Store(one.order.operation, left)
        todo = list(keys)
        while todo:
            key = todo.pop()
            todo += self._following.get(key, ())
            self.pages.pop(key, None)

    def _move(self, one: Running) -> None:
        """A half of the slots of each page: so a page is not whole before the second one."""
        half = slice(self._memory.page_size // 2, None) if one.halves else slice(
            0, self._memory.page_size // 2
        )  # fmt: skip
        for page in one.order.pages:
            if isinstance(one.order, Fetch):
                self._read(one, page, half)
            else:
                self._write(one, page, half)
        one.halves += 1
        if one.halves == 2:
            self._end(one)

    def _read(self, one: Running, page: StoragePage, half: slice) -> None:
        kept = one.kept.get(page.key)
        if kept is not None:
            for host, contents in zip(self._memory.host.contents, kept.contents, strict=True):
                host[page.slot, half] = contents[half]

    def _blank(self, page: StoragePage) -> Kept:
        found = known(known(self._memory.host.tier).pages.get(page.key))
        blank = [np.zeros(self._memory.page_size, np.int64) for _ in self._memory.host.contents]
        return Kept(page, blank, self._memory.host.prefix_of(found))

    def _write(self, one: Running, page: StoragePage, half: slice) -> None:
        for host, contents in zip(
            self._memory.host.contents, one.kept[page.key].contents, strict=True
        ):
            contents[half] = host[page.slot, half]

    def _end(self, one: Running) -> None:
        self.running.remove(one)
        if isinstance(one.order, Store):
            del self._to_keep[one.order.operation]
            for page in one.order.pages:
                self._check(one.kept[page.key])
                self.pages.setdefault(page.key, one.kept[page.key])
                self._following.setdefault(page.before, set()).add(page.key)
            self._tell(one.order, [page.key for page in one.order.pages])
        else:
            self._tell(one.order, [p.key for p in one.order.pages if p.key in one.kept])
            self._check_fetched(one)

    def _check_fetched(self, one: Running) -> None:
        """Nothing of what has come is found if it was forgotten meanwhile."""
        for page in one.order.pages:
            found = known(self._memory.host.tier).pages.get(page.key)
            if found is not None and found.slot == page.slot and page.key in one.kept:
                forgotten = one.kept[page.key].tainted_at <= self.time
                is_found = found.state is HostPageState.CACHED
                assert not (forgotten and is_found), "what was forgotten is back"

    def _check(self, kept: Kept) -> None:
        """What was written is what belongs to its tokens."""
        namespace, tokens = kept.prefix
        for pool, contents in enumerate(kept.contents):
            truth = truth_of(namespace, pool, tokens)[-self._memory.page_size :]
            assert (contents == truth).all(), "a page in storage is wrong"

    def _tell(self, order: StorageOrder, found: Sequence[bytes]) -> None:
        ended = StorageEnded(order.operation, found, 0.0, StoreState(None))
        known(known(self._memory.host.tier).storage).finish(ended)
