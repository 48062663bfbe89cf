"""What the prefix index tells of its pages is what it finds."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvrelay.mem_cache.prefix.no_prefix_index import NoPrefixIndex
from kvrelay.mem_cache.prefix.prefix_index import PrefixLock
from kvrelay.mem_cache.prefix.prefix_log import PrefixLog
from kvrelay.mem_cache.prefix.radix_tree import RadixTree
from kvrelay.wire.model_digest import NO_MODEL
from kvrelay.wire.page_hash import PageHashes

PAGE_SIZE = 32
"""Two pages a mark."""
HASHES = PageHashes(NO_MODEL, PAGE_SIZE)


def make_tree(windows: tuple[int | None, ...] = (None,), most_changes: int = 1 << 18) -> RadixTree:
    return RadixTree(PAGE_SIZE, windows, log=PrefixLog(HASHES, most_changes))


def tokens_of(pages: list[int]) -> np.ndarray:
    """A page's number stands for all of its tokens."""
    return np.repeat(np.asarray(pages, np.int32), PAGE_SIZE)


class Follower:
    """Knows of an index what it is told."""

    def __init__(self, tree: RadixTree) -> None:
        self.tree = tree
        self.marks = set(tree.marks() or ())

    def follow(self) -> None:
        changes = self.tree.take_changes()
        if changes is not None:
            assert not changes.overflown
            assert not {*changes.stored} & {*changes.removed}
            self.marks |= {*changes.stored}
            self.marks -= {*changes.removed}

    def known_pages(self, pages: list[int], namespace: str) -> int:
        marks = HASHES.marks_of(tokens_of(pages).tolist(), namespace)
        known = [mark in self.marks for mark in marks]
        assert known == sorted(known, reverse=True), "a prefix is there without its start"
        return 2 * sum(known)


def insert(tree: RadixTree, pages: list[int], namespace: str = "") -> PrefixLock:
    offered = [np.arange(len(pages), dtype=np.int32) for _ in range(len(tree._windows.by_pool))]
    return tree.insert(tokens_of(pages), offered, namespace).lock


def test_a_prefix_is_told_when_it_is_stored_and_when_it_is_evicted():
    tree = make_tree()
    follower = Follower(tree)
    lock = insert(tree, [1, 2, 3, 4, 5])
    follower.follow()
    assert follower.known_pages([1, 2, 3, 4, 5], "") == 4
    assert follower.known_pages([1, 2, 9, 9], "") == 2
    assert follower.known_pages([1, 2, 3, 4], "another tenant") == 0
    assert tree.take_changes() is None
    tree.unlock(lock)
    tree.evict(0, 5)
    follower.follow()
    assert not follower.marks


def test_what_is_forgotten_is_told_as_removed_once_though_its_pages_stay():
    tree = make_tree()
    follower = Follower(tree)
    lock = insert(tree, [1, 2, 3, 4])
    follower.follow()
    tree.forget(tokens_of([1, 2, 3, 4]), 2 * PAGE_SIZE)
    follower.follow()
    assert follower.known_pages([1, 2, 3, 4], "") == 2
    again = insert(tree, [1, 2, 3, 4])
    follower.follow()
    assert follower.known_pages([1, 2, 3, 4], "") == 4
    tree.unlock(lock)
    tree.unlock(again)
    tree.match(tokens_of([1, 2, 3, 4]))  # locked: the forgotten half goes first
    tree.evict(0, 2)
    follower.follow()
    assert follower.known_pages([1, 2, 3, 4], "") == 4
    assert follower.marks == {*(tree.marks() or ())}


def test_too_many_changes_are_told_as_such_once():
    tree = make_tree(most_changes=2)
    insert(tree, [1, 2, 3, 4, 5, 6])
    changes = tree.take_changes()
    assert changes is not None
    assert changes.overflown
    assert not changes.stored
    assert tree.take_changes() is None
    assert len(tree.marks() or ()) == 3
    insert(tree, [7, 8])
    changes = tree.take_changes()
    assert changes is not None
    assert len(changes.stored) == 1


def test_an_index_that_is_not_asked_hashes_nothing():
    tree = RadixTree(PAGE_SIZE, (None,))
    insert(tree, [1, 2])
    assert tree.take_changes() is None
    assert tree.marks() is None
    assert NoPrefixIndex(PAGE_SIZE, (None,)).marks() is None


@pytest.mark.parametrize("windows", [(None,), (None, 2 * PAGE_SIZE)])
@pytest.mark.parametrize("seed", range(4))
def test_in_random_use_a_follower_knows_what_is_found(seed, windows):
    rng, tree = random.Random(seed), make_tree(windows)
    follower = Follower(tree)
    locks: list[PrefixLock] = []
    for _ in range(600):
        pages = [rng.randrange(2) for _ in range(rng.randint(1, 8))]
        namespace = rng.choice(("a", "b"))
        chance = rng.random()
        if chance < 0.5:
            locks.append(insert(tree, pages, namespace))
        elif chance < 0.6:
            locks.append(tree.match(tokens_of(pages), namespace))
        elif chance < 0.65:
            start = rng.randrange(len(pages)) * PAGE_SIZE
            tree.forget(tokens_of(pages), start, namespace)
        elif chance < 0.7:
            tree.evict(rng.randrange(len(windows)), rng.randint(1, 6))
        elif locks:
            tree.unlock(locks.pop(rng.randrange(len(locks))))
        if rng.random() < 0.3:
            follower.follow()
            assert follower.marks == {*(tree.marks() or ())}
            held = tree.hold(tokens_of(pages), namespace)
            assert follower.known_pages(pages, namespace) == held.num_pages // 2 * 2
            tree.unlock(held)
        tree.audit()
