"""Which pages of the host are stored, and when nothing is asked of storage."""

from __future__ import annotations

import pytest

from kvrelay.mem_cache.host.host_pages import HostPages
from kvrelay.mem_cache.host.storage_tier import HANG_SECONDS, MOST_LOOKS, Prefetch, StorageTier
from kvrelay.mem_cache.host.tier_speed import TierSpeed
from kvrelay.mem_cache.storage.storage_orders import (
    Fetch,
    LookUp,
    StorageEnded,
    StorageOrder,
    Store,
)
from kvrelay.mem_cache.storage.storage_pages import RETRY_SECONDS, StoreState
from tests.known import known

WELL, FULL = StoreState(None), StoreState(None, write_error="the disk is full")


class Tier:
    """A host of ten pages whose storage answers when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.orders: list[StorageOrder] = []
        self.pages = HostPages(10, 4, self._found)
        self.tier = StorageTier(
            self.pages, 1 << 20, self, TierSpeed(1e9), WELL, clock=lambda: self.now
        )

    def _found(self, page: object, found: bool) -> None: ...

    def start(self, order: StorageOrder) -> None:
        self.orders.append(order)

    def write(self, word: str) -> None:
        """The host has these pages from now on."""
        for end in range(1, len(word) + 1):
            before = word[: end - 1].encode() if end > 1 else None
            pages = self.pages.reserve(before, [word[:end].encode()], [b""], end - 1)
            self.pages.end_write(pages, 1)
            for page in pages:
                self.tier.offer(page)

    def look(self, word: str) -> Prefetch | None:
        keys = [word[:end].encode() for end in range(1, len(word) + 1)]
        return self.tier.prefetch(keys, [b""] * len(keys), lambda first, pages: True)

    def end(self, found: str = "", state: StoreState = WELL) -> None:
        """The oldest order ends; `found` is the prompt whose pages are there."""
        order = self.orders.pop(0)
        keys = [found[:end].encode() for end in range(1, len(found) + 1)]
        self.tier.finish(StorageEnded(order.operation, keys, 0.001, state))


def test_writing_is_tried_again_a_minute_after_a_write_has_failed() -> None:
    """Whatever else ends meanwhile."""
    host = Tier()
    host.write("abcdef")
    host.tier.write_back()
    assert isinstance(host.orders[0], Store)
    host.end(state=FULL)
    for _ in range(int(RETRY_SECONDS)):
        host.now += 1
        host.look("xy")
        host.end(state=FULL)
        host.tier.write_back()
    assert not any(isinstance(order, Store) for order in host.orders)
    host.now += 1
    host.look("abcdef")
    host.end(state=FULL)  # it is asked for again, and is not there
    host.tier.write_back()
    assert isinstance(host.orders[-1], Store)


def test_nothing_is_asked_of_storage_that_hangs() -> None:
    host = Tier()
    assert host.look("ab") is not None
    host.now += HANG_SECONDS + 0.1
    assert host.tier.hangs
    assert host.look("xy") is None
    assert len(host.orders) == 1
    host.end()
    assert not host.tier.hangs
    assert host.look("xy") is not None


def test_nobody_waits_for_a_look_up_of_what_the_host_has() -> None:
    """The look-up alone says that it was asked for again."""
    host = Tier()
    host.write("ab")
    assert host.look("ab") is None
    assert host.look("ab") is None
    assert len(host.orders) == 1


def test_what_is_on_its_way_is_waited_for_by_all() -> None:
    host = Tier()
    first = host.look("ab")
    host.end("ab")
    assert isinstance(host.orders[0], Fetch)
    assert host.look("ab") is first


def test_look_ups_are_bounded() -> None:
    host = Tier()
    asked = [host.look(chr(ord("a") + number) * 2) for number in range(MOST_LOOKS + 4)]
    assert sum(one is not None for one in asked) == len(host.orders) == MOST_LOOKS


def test_what_nobody_wants_is_not_fetched() -> None:
    host = Tier()
    first, second = known(host.look("abcd")), host.look("abcd")
    assert first is second
    host.tier.leave(first)
    host.end("abcd")
    assert isinstance(host.orders[0], Fetch), "one of two still wants it"
    host.tier.leave(first)
    host.end("abcd")
    assert first.ended
    again = host.look("xyz")
    assert again is not None
    host.tier.leave(again)
    assert isinstance(host.orders[0], LookUp)
    host.end("xyz")
    assert not host.orders
    assert again.ended


def test_what_waits_to_be_fetched_counts_for_those_behind_it() -> None:
    host = Tier()
    host.tier._most_pages = 1
    alone = host.tier.expected_seconds(1)
    for word in ("abc", "def", "ghi"):
        host.look(word)
    for word in ("abc", "def", "ghi"):
        host.end(word)
    assert host.tier.expected_seconds(1) == pytest.approx(alone * 10)
