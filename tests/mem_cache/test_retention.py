"""Pages of the prefix index that requests have asked to keep make room after the others."""

from __future__ import annotations

import numpy as np
import pytest

from kvrelay.mem_cache.prefix.radix_tree import RadixTree
from kvrelay.mem_cache.prefix.retention import Retention
from tests.mem_cache.test_radix_tree import RandomUse
from tests.pairwise import few

MINUTE = 60.0


class Cache:
    """A prefix index of pages of one token, and a clock."""

    def __init__(
        self,
        most_tokens: int,
        windows: tuple[int | None, ...] = (None,),
        most_window_tokens: int = 0,
    ) -> None:
        self.now = 100.0
        self.windows = windows
        retention = Retention(
            most_tokens,
            lambda: self.now,
            window=max(window or 0 for window in windows),
            most_window_tokens=most_window_tokens,
        )
        self.tree = RadixTree(1, windows, retention=retention)
        self.pages = 0

    def put(self, *token_ids: int, of: str = "", seconds: float = 0.0) -> None:
        """Cache a prompt, and retain it if `seconds` says so."""
        ids = np.asarray(token_ids, np.int32)
        pages = np.arange(self.pages, self.pages + len(ids), dtype=np.int32)
        self.pages += len(ids)
        offered = [pages] * len(self.windows)
        self.tree.unlock(self.tree.insert(ids, offered, f"{of}/").lock)
        if seconds:
            self.tree.retain(ids, seconds, f"{of}/")
        self.tree.audit()

    def evict(self, pages: int, pool: int = 0) -> None:
        self.tree.evict(pool, pages)
        self.tree.audit()

    def has(self, *token_ids: int, of: str = "") -> bool:
        lock = self.tree.hold(np.asarray(token_ids, np.int32), f"{of}/")
        self.tree.unlock(lock)
        return lock.num_pages == len(token_ids)


def test_what_is_retained_goes_after_what_was_used_later() -> None:
    cache = Cache(100)
    cache.put(1, 2, 3, seconds=MINUTE)
    cache.put(4, 5, 6)
    assert cache.tree.retained_tokens() == 3
    cache.evict(3)
    assert cache.has(1, 2, 3)
    assert not cache.has(4)


def test_nothing_is_pinned() -> None:
    """Where all is retained it goes nonetheless, what ends first before the rest."""
    cache = Cache(100)
    cache.put(1, 2, 3, seconds=2 * MINUTE)
    cache.put(4, 5, 6, seconds=MINUTE)
    assert cache.tree.evictable(0) == 6
    cache.evict(2)
    assert cache.has(1, 2, 3)
    assert not cache.has(4, 5, 6)
    cache.evict(6)
    assert (cache.tree.size(0), cache.tree.retained_tokens()) == (0, 0)


def test_its_time_ends() -> None:
    cache = Cache(100)
    cache.put(1, 2, 3, seconds=MINUTE)
    cache.put(4, 5, 6)
    cache.evict(0)
    cache.now += MINUTE
    assert cache.tree.retained_tokens() == 0
    cache.evict(3)
    assert not cache.has(1)
    assert cache.has(4, 5, 6)


def test_a_use_that_asks_again_makes_it_longer() -> None:
    cache = Cache(100)
    for _ in range(3):
        cache.put(1, 2, 3, seconds=MINUTE)
        cache.now += MINUTE / 2
    cache.put(4, 5, 6)
    cache.evict(3)
    assert cache.has(1, 2, 3)


def test_a_tenant_retains_its_part_and_no_more() -> None:
    """The part of one that is alone is all of it, and shrinks when another one comes."""
    cache = Cache(6)
    cache.put(1, 2, 3, of="a", seconds=MINUTE)
    cache.put(4, 5, 6, of="a", seconds=2 * MINUTE)
    assert cache.tree.retained_tokens() == 6
    cache.put(7, 8, 9, of="b", seconds=MINUTE)
    assert cache.tree.retained_tokens() == 6
    cache.evict(3)
    assert not cache.has(1, of="a"), "what ends first is above the part"
    assert cache.has(4, 5, 6, of="a")
    assert cache.has(7, 8, 9, of="b")


def test_a_tenant_whose_time_has_ended_takes_no_part() -> None:
    cache = Cache(6)
    cache.put(1, 2, 3, 4, 5, 6, of="a", seconds=10 * MINUTE)
    cache.put(7, of="b", seconds=MINUTE)
    cache.now += 2 * MINUTE
    assert cache.tree.retained_tokens() == 6


def continues(cache: Cache, *token_ids: int, of: str = "") -> bool:
    """Whether a request goes on behind all of these tokens."""
    lock = cache.tree.match(np.asarray(token_ids, np.int32), f"{of}/")
    cache.tree.unlock(lock)
    return lock.num_pages == len(token_ids)


def test_of_a_window_only_what_the_next_token_sees_is_retained() -> None:
    """Else a long prompt would displace all others from the small pool of a window."""
    cache = Cache(100, (None, 4), most_window_tokens=10)
    cache.put(*range(30), of="a", seconds=MINUTE)
    cache.put(*range(40, 48), of="b")
    cache.evict(27, pool=1)
    assert continues(cache, *range(40, 48), of="b")
    assert continues(cache, *range(30), of="a")
    cache.now += 1
    cache.put(*range(36), of="a", seconds=MINUTE)
    cache.evict(cache.tree.evictable(1) - 3, pool=1)
    assert not continues(cache, *range(30), of="a"), "the conversation has gone on"
    assert continues(cache, *range(36), of="a")


def test_retained_windows_have_a_bound() -> None:
    cache = Cache(100, (None, 4), most_window_tokens=7)
    for number in range(4):
        cache.put(*range(10 * number, 10 * number + 3), of="a", seconds=(number + 1) * MINUTE)
    assert cache.tree.retained_tokens() == 6
    cache.put(90, 91, 92, of="b")
    cache.evict(6, pool=1)
    assert continues(cache, 90, 91, 92, of="b")
    assert continues(cache, 30, 31, 32, of="a")
    assert not continues(cache, 0, 1, 2, of="a")


def test_without_a_share_nothing_is_retained() -> None:
    cache = Cache(0)
    cache.put(1, 2, 3, seconds=MINUTE)
    cache.put(4, 5, 6)
    cache.evict(3)
    assert not cache.has(1)


def test_a_beginning_that_is_retained_for_longer_outlives_what_follows() -> None:
    cache = Cache(100)
    cache.put(1, 2, seconds=10 * MINUTE)
    cache.put(1, 2, 3, 4, seconds=MINUTE)
    cache.put(5, 6)
    cache.now += 2 * MINUTE
    assert cache.tree.retained_tokens() == 2
    cache.evict(4)
    assert cache.has(1, 2)
    assert not cache.has(1, 2, 3)


def test_what_is_forgotten_is_retained_no_more() -> None:
    cache = Cache(100)
    cache.put(1, 2, 3, seconds=MINUTE)
    cache.tree.forget(np.asarray([1, 2, 3], np.int32), 1, "/")
    cache.tree.audit()
    assert cache.tree.retained_tokens() == 1
    cache.evict(3)
    assert cache.tree.size(0) == 0


class RandomRetention(RandomUse):
    """As without, and anything may be retained for a while: the account of it is right."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.now = 0.0
        window = max(window or 0 for window in self.windows)
        retention = Retention(8, lambda: self.now, window=window, most_window_tokens=5)
        self.tree = RadixTree(1, self.windows, long_row=2, retention=retention)

    def hold(self, ids: list[int]) -> None:
        self.now += self.chance.random()
        tokens = np.asarray(ids, np.int32)
        self.tree.retain(tokens, 3 * self.chance.random())
        if self.chance.random() < 0.1:
            self.tree.retained_tokens()

    def run(self) -> None:
        super().run()
        for pool in range(len(self.windows)):
            self.tree.evict(pool, self.tree.evictable(pool))
        self.tree.audit()
        assert [self.tree.size(pool) for pool in range(len(self.windows))] == [0] * len(
            self.windows
        )


@few(1)
@pytest.mark.parametrize("seed", range(8))
def test_random_use(seed: int) -> None:
    for number in range(8):
        RandomRetention(100 * seed + number).run()
