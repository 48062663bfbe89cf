"""Rows of nodes that a split has left behind are joined again."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvrelay.mem_cache.prefix.prefix_index import PrefixLock
from kvrelay.mem_cache.prefix.radix_node import RadixNode
from kvrelay.mem_cache.prefix.radix_tree import RadixTree
from tests.pairwise import few

TOKENS = np.arange(64, dtype=np.int32)
PAGES = np.arange(16, dtype=np.int32)


def make_tree(windows: list[int | None], *, cuts: int) -> RadixTree:
    """One prefix of 16 pages, cut after each of its first pages."""
    tree = RadixTree(4, windows)
    pages = [PAGES + 100 * pool for pool in range(len(windows))]
    tree.unlock(tree.insert(TOKENS, pages).lock)
    for page in range(1, cuts + 1):
        tree.unlock(tree.match(TOKENS[: 4 * page]))
    tree.audit()
    return tree


@pytest.mark.parametrize(("cuts", "nodes"), [(7, 1), (6, 7), (0, 1)])
def test_a_long_row_that_is_matched_is_joined(cuts, nodes):
    tree = make_tree([None], cuts=cuts)
    lock = tree.match(TOKENS)
    assert num_nodes(tree) == nodes
    assert lock.pages[0].tolist() == PAGES.tolist()
    assert tree.evictable(0) == 0
    tree.unlock(lock)
    assert (tree.evictable(0), tree.size(0)) == (16, 16)
    tree.audit()
    (gone,) = tree.evict(0, 16)
    assert sorted(gone) == PAGES.tolist()


def test_what_is_locked_apart_stays_apart():
    tree = make_tree([None], cuts=12)
    locks = [tree.match(TOKENS[: 4 * pages]) for pages in (16, 10, 10, 1)]
    tree.audit()
    assert num_nodes(tree) >= 3
    for lock in locks:
        tree.unlock(lock)
        tree.audit()
    assert tree.evictable(0) == 16
    tree.unlock(tree.match(TOKENS))


def test_a_branch_keeps_nodes_apart_until_it_is_evicted():
    tree = make_tree([None], cuts=9)
    other = np.concatenate([TOKENS[:20], TOKENS[:8] + 1000])
    tree.unlock(tree.insert(other, [np.arange(200, 207, dtype=np.int32)]).lock)
    tree.unlock(tree.match(TOKENS))
    nodes = num_nodes(tree)
    assert nodes > 2
    (gone,) = tree.evict(0, 2)
    assert sorted(gone) == [205, 206]
    tree.unlock(tree.match(TOKENS))
    assert num_nodes(tree) < nodes


def test_a_row_is_joined_up_to_where_a_window_begins():
    tree = make_tree([None, 9], cuts=12)
    lock = tree.match(TOKENS)
    assert lock.pages[1].tolist() == [-1] * 14 + [114, 115]
    assert num_nodes(tree) == 2
    assert (tree.evictable(0), tree.evictable(1)) == (0, 14)
    tree.unlock(lock)
    tree.audit()
    assert (tree.evictable(0), tree.evictable(1)) == (16, 16)


class RandomUse:
    """Inserts, matches, unlocks and evicts; what is locked stays, and is what was inserted."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        choices: list[list[int | None]] = [[None], [None, 3], [3]]
        self.windows = self.chance.choice(choices)
        self.tree = RadixTree(1, self.windows, long_row=2)
        self.locks: list[tuple[list[int], PrefixLock]] = []
        self.inside: list[set[int]] = [set() for _ in self.windows]
        self.truth: dict[int, list[int]] = {}
        """For each page the tokens up to its own."""

    def run(self) -> None:
        for _ in range(80):
            # From a small alphabet, so that prompts share their beginnings.
            ids = [0] * self.chance.randrange(12)
            ids += [self.chance.randrange(2) for _ in range(self.chance.randrange(5))]
            work = self.chance.choice([self.insert, self.match, self.match, self.hold])
            work(ids)
            for _ in range(self.chance.randrange(2)):
                self.unlock_one()
            if self.chance.random() < 0.2:
                self.evict()
            self.check()
        while self.locks:
            self.unlock_one()
        self.tree.audit()
        for pool in range(len(self.windows)):
            assert self.tree.evictable(pool) == self.tree.size(pool)

    def insert(self, ids: list[int]) -> None:
        pages = np.arange(len(self.truth), len(self.truth) + len(ids), dtype=np.int32)
        for at, page in enumerate(pages.tolist()):
            self.truth[page] = ids[: at + 1]
        inserted = self.tree.insert(np.asarray(ids, np.int32), [pages] * len(self.windows))
        for inside, taken in zip(self.inside, inserted.taken, strict=True):
            inside |= set(taken.tolist())
        self.locks.append((ids, inserted.lock))

    def match(self, ids: list[int]) -> None:
        self.locks.append((ids, self.tree.match(np.asarray(ids, np.int32))))

    def hold(self, ids: list[int]) -> None:
        self.tree.unlock(self.tree.hold(np.asarray(ids, np.int32)))

    def unlock_one(self) -> None:
        if self.locks:
            _, lock = self.locks.pop(self.chance.randrange(len(self.locks)))
            self.tree.unlock(lock)

    def evict(self) -> None:
        gone = self.tree.evict(self.chance.randrange(len(self.windows)), 2)
        for inside, pages in zip(self.inside, gone, strict=True):
            inside -= set(pages.tolist())

    def check(self) -> None:
        for inside, pages in zip(self.inside, self.tree.audit(), strict=True):
            assert inside == set(pages.tolist())
        for ids, lock in self.locks:
            for inside, pages in zip(self.inside, lock.pages, strict=True):
                for at, page in enumerate(pages.tolist()):
                    assert page == -1 or page in inside, "what is locked was evicted"
                    assert page == -1 or self.truth[page] == ids[: at + 1]


@pytest.mark.parametrize("seeds", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_what_is_locked_stays_whatever_is_split_and_joined(seeds):
    for seed in range(seeds):
        RandomUse(seed).run()


@few(1)
@pytest.mark.parametrize("forgotten", ["locks", "windows", "pages", "nothing"])
def test_a_careless_join_is_found(forgotten, monkeypatch):
    def can_join(upper, lower, every_pool_has_window):
        same = [(a is None) == (b is None) for a, b in zip(upper.pages, lower.pages, strict=True)]
        rooted = not every_pool_has_window or not any(upper.locks) or forgotten == "windows"
        locked = upper.locks == lower.locks or forgotten == "locks"
        return (
            len(upper.children) == 1 and locked and rooted and (all(same) or forgotten == "pages")
        )

    def run_all() -> None:
        for seed in range(200):
            RandomUse(seed).run()

    monkeypatch.setattr(RadixNode, "can_join", can_join)
    if forgotten == "nothing":
        run_all()
        return
    with pytest.raises(Exception):  # noqa: B017, PT011 (it may show anywhere)
        run_all()


def num_nodes(tree: RadixTree) -> int:
    """Nodes of all namespaces."""
    return sum(1 for _ in tree._forest.nodes())
