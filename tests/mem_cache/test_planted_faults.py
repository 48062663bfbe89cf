"""The model-based test finds each of these faults: so it would find one like them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvrelay.mem_cache import growth
from kvrelay.mem_cache.account import NO_PAGES
from kvrelay.mem_cache.books import Books
from kvrelay.mem_cache.lease import Lease, LeaseState
from kvrelay.mem_cache.ledger import Ledger
from kvrelay.mem_cache.prefix_index import PrefixLock
from kvrelay.mem_cache.radix_tree import RadixTree
from tests.mem_cache.test_memory_model import MemoryMachine

SEARCH = settings(
    max_examples=1000, stateful_step_count=60, deadline=None, database=None, derandomize=True,
    phases=[Phase.generate], suppress_health_check=list(HealthCheck), print_blob=False,
)  # fmt: skip

Plant = Callable[[pytest.MonkeyPatch], None]
FAULTS: dict[str, Plant] = {}


def fault(plant: Plant) -> Plant:
    FAULTS[plant.__name__] = plant
    return plant


def wrap(patch: pytest.MonkeyPatch, owner: type, name: str, around: Callable[..., Any]) -> None:
    """Call ``around(original, self, ...)`` in place of a method."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda self, *args, **kw: around(original, self, *args, **kw))


@fault
def give_back_twice(patch: pytest.MonkeyPatch) -> None:
    def twice(original: Any, ledger: Ledger, lease: Lease, pending: Any) -> None:
        pages = lease.own_pages()
        original(ledger, lease, pending)
        if len(pages) and not pending:
            ledger._books.let_go(
                lease.holder, [pages, *[NO_PAGES] * (len(ledger.pools) - 1)], pending
            )

    wrap(patch, Ledger, "give_back", twice)


@fault
def skip_the_tail(patch: pytest.MonkeyPatch) -> None:
    """What is allocated beyond what is committed is forgotten."""

    def shorter(ledger: Ledger, lease: Lease, pending: Any) -> None:
        ledger._books.rows.allocated[lease.row] = lease.kv_committed_len
        give_back(ledger, lease, pending)

    give_back = Ledger.give_back
    patch.setattr(Ledger, "give_back", shorter)


@fault
def unlock_twice(patch: pytest.MonkeyPatch) -> None:
    def twice(original: Any, tree: RadixTree, lock: PrefixLock) -> None:
        original(tree, lock)
        original(tree, lock)

    wrap(patch, RadixTree, "unlock", twice)


@fault
def never_unlock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixTree, "unlock", lambda self, lock: None)


@fault
def publish_the_unaligned_page(patch: pytest.MonkeyPatch) -> None:
    def more(original: Any, ledger: Ledger, lease: Lease, tokens: Any, pending: Any = ()) -> None:
        end = min(-(-len(tokens) // ledger.page_size) * ledger.page_size, lease.kv_allocated_len)
        ledger._books.rows.committed[lease.row] = max(lease.kv_committed_len, end)
        padded = np.concatenate([tokens, np.zeros(max(0, end - len(tokens)), np.int32)])
        original(ledger, lease, padded, pending)

    wrap(patch, Ledger, "publish", more)


@fault
def reclaim_before_the_fence(patch: pytest.MonkeyPatch) -> None:
    def hasty(original: Any, ledger: Ledger) -> int:
        for entry in ledger._books.quarantine:
            object.__setattr__(entry, "fences", entry.fences[1:])
        return original(ledger)

    wrap(patch, Ledger, "reclaim", hasty)


@fault
def free_what_is_fenced(patch: pytest.MonkeyPatch) -> None:
    wrap(
        patch,
        Ledger,
        "give_back",
        lambda original, ledger, lease, pending: original(ledger, lease, ()),
    )


@fault
def forget_duplicates(patch: pytest.MonkeyPatch) -> None:
    def forgetful(
        original: Any, books: Books, holder: str, pages: Any, pending: Any, **kw: Any
    ) -> None:
        pages = [NO_PAGES for _ in books.pools] if not kw else pages
        original(books, holder, pages, pending, **kw)

    wrap(patch, Books, "let_go", forgetful)


@fault
def evict_what_is_locked(patch: pytest.MonkeyPatch) -> None:
    def unlocked(original: Any, tree: RadixTree, node: Any, pool: int) -> bool:
        locks, node.locks = node.locks, [0] * len(node.locks)
        try:
            return original(tree, node, pool)
        finally:
            node.locks = locks

    wrap(patch, RadixTree, "_is_evictable", unlocked)


@fault
def split_without_its_locks(patch: pytest.MonkeyPatch) -> None:
    def unlocked(original: Any, tree: RadixTree, node: Any, at: int) -> Any:
        upper = original(tree, node, at)
        upper.locks = [0] * len(upper.locks)
        return upper

    wrap(patch, RadixTree, "_split", unlocked)


@fault
def slide_a_page_too_far(patch: pytest.MonkeyPatch) -> None:
    original = growth._slide_pool
    patch.setattr(
        growth,
        "_slide_pool",
        lambda books, pool, holders, rows, frontiers: original(
            books, pool, holders, rows, frontiers + 1
        ),
    )


@fault
def grow_without_recording_it(patch: pytest.MonkeyPatch) -> None:
    def silent(original: Any, ledger: Ledger, leases: Any, tokens: Any) -> bool:
        before = [lease.kv_allocated_len for lease in leases]
        grown = original(ledger, leases, tokens)
        for lease, length in zip(leases, before, strict=True):
            if length:
                less = max(length, lease.kv_allocated_len - ledger.page_size)
                ledger._books.rows.allocated[lease.row] = less
        return grown

    wrap(patch, Ledger, "grow_all", silent)


@fault
def release_a_session_as_a_request(patch: pytest.MonkeyPatch) -> None:
    def close(ledger: Ledger, lease: Lease) -> None:
        ledger._books.rows.states[lease.row] = LeaseState.CLOSED

    patch.setattr(Ledger, "close", close)


@fault
def match_another_tenants_prefix(patch: pytest.MonkeyPatch) -> None:
    wrap(
        patch,
        RadixTree,
        "_root",
        lambda original, tree, namespace: original(tree, ""),
    )
    wrap(
        patch,
        RadixTree,
        "insert",
        lambda original, tree, tokens, pages, namespace="": original(tree, tokens, pages, ""),
    )


@fault
def break_a_promise(patch: pytest.MonkeyPatch) -> None:
    wrap(
        patch,
        Books,
        "unpromised",
        lambda original, books, pool: original(books, pool) + books.promised[pool] // 2,
    )


@fault
def fork_without_its_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lease, "pending", lambda lease, others: list(others))


@fault
def share_without_a_lock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixTree, "lock_again", lambda tree, lock: None)


@fault
def share_the_unaligned_page(patch: pytest.MonkeyPatch) -> None:
    """The choices' last pages keep what they had before."""

    def fork(original: Any, ledger: Ledger, *args: Any, **kw: Any) -> Any:
        forked = original(ledger, *args, **kw)
        return forked and replace(forked, copies=forked.copies[1:])

    wrap(patch, Ledger, "fork", fork)


RARE = {"publish_the_unaligned_page"}
"""Faults that a search of that length may miss."""


def find(plant: Plant, patch: pytest.MonkeyPatch, search: settings) -> None:
    plant(patch)
    with pytest.raises(Exception):  # noqa: B017, PT011 (it may show anywhere)
        run_state_machine_as_test(MemoryMachine, settings=search)


@pytest.mark.parametrize("name", sorted(FAULTS.keys() - RARE))
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch):
    find(FAULTS[name], monkeypatch, SEARCH)


@pytest.mark.parametrize("name", RARE)
def test_a_fault_that_seldom_shows_is_found(name: str, monkeypatch: pytest.MonkeyPatch):
    find(FAULTS[name], monkeypatch, settings(SEARCH, max_examples=8000))


def test_without_a_fault_nothing_is_found():
    """Or else the tests above would show nothing."""
    run_state_machine_as_test(MemoryMachine, settings=settings(SEARCH, max_examples=200))
