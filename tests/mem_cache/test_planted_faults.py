"""The model-based test finds each of these faults: so it would find one like them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize, run_state_machine_as_test

from kvrelay.mem_cache.account import NO_PAGES
from kvrelay.mem_cache.leases.lease import Lease, LeaseState
from kvrelay.mem_cache.leases.lease_lengths import LeaseLengths
from kvrelay.mem_cache.leases.lease_table import LeaseTable
from kvrelay.mem_cache.leases.promises import Promises
from kvrelay.mem_cache.leases.publishing import PrefixSharing
from kvrelay.mem_cache.page_allocator import PageAllocator
from kvrelay.mem_cache.prefix.eviction_queue import EvictionQueue
from kvrelay.mem_cache.prefix.prefix_index import PrefixLock
from kvrelay.mem_cache.prefix.radix_forest import RadixForest
from kvrelay.mem_cache.prefix.radix_node import RadixNode
from kvrelay.mem_cache.prefix.radix_tree import RadixTree
from kvrelay.mem_cache.release import Outcome
from tests.mem_cache.planting import SEARCH, Faults, find, wrap
from tests.mem_cache.test_fork import (
    test_choice_ends_before_its_page_is_copied as choice_scenario,
)
from tests.mem_cache.test_memory_model import KINDS, MemoryMachine
from tests.mem_cache.test_settled import (
    test_a_duplicate_stays_its_leases_own_until_its_release as duplicate_scenario,
)
from tests.mem_cache.test_settled import (
    test_a_page_that_is_not_full_is_not_published_though_it_has_room as tail_scenario,
)
from tests.pairwise import few

FAULTS = Faults()


class DeviceMachine(MemoryMachine):
    """Without a host tier, whose faults other files have, and with small pages."""

    @initialize(
        kind=st.sampled_from(KINDS),
        page_size=st.sampled_from([1, 3]),
        pages=st.integers(2, 40),
        rows=st.integers(1, 6),
        window=st.sampled_from([1, 2, 5, 16]),
        long_row=st.sampled_from([2, 3, 8]),
        host=st.just(0),
    )
    def build(self, **options: Any) -> None:
        super().build(**options)


@FAULTS.add
def free_twice(patch: pytest.MonkeyPatch) -> None:
    def twice(original: Any, leases: LeaseTable, lease: Lease, pending: Any) -> None:
        allocator, pages = leases._allocator, lease.own_pages()
        original(leases, lease, pending)
        if len(pages) and not pending:
            others = [NO_PAGES] * (len(allocator.accounts) - 1)
            allocator.free_after(pending, lease.holder, [pages, *others])

    wrap(patch, LeaseTable, "end_lease", twice)


@FAULTS.add
def skip_the_tail(patch: pytest.MonkeyPatch) -> None:
    """What is allocated beyond what is committed is forgotten."""

    def shorter(original: Any, leases: LeaseTable, lease: Lease, pending: Any) -> None:
        leases._rows.set_allocated(lease.row, lease.kv_committed_len)
        original(leases, lease, pending)

    wrap(patch, LeaseTable, "end_lease", shorter)


@FAULTS.add
def unlock_twice(patch: pytest.MonkeyPatch) -> None:
    def twice(original: Any, tree: RadixTree, lock: PrefixLock) -> None:
        original(tree, lock)
        original(tree, lock)

    wrap(patch, RadixTree, "unlock", twice)


@FAULTS.add
def never_unlock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixTree, "unlock", lambda self, lock: None)


@FAULTS.add
def publish_the_unaligned_page(patch: pytest.MonkeyPatch) -> None:
    def more(
        original: Any, sharing: PrefixSharing, lease: Lease, tokens: Any, pending: Any = ()
    ) -> None:
        end = -(-len(tokens) // lease.page_size) * lease.page_size
        end = min(end, lease.kv_allocated_len)
        sharing._lengths._rows.set_committed(lease.row, max(lease.kv_committed_len, end))
        padded = np.concatenate([tokens, np.zeros(max(0, end - len(tokens)), np.int32)])
        original(sharing, lease, padded, pending)

    wrap(patch, PrefixSharing, "publish", more)


@FAULTS.add
def publish_before_it_is_written(patch: pytest.MonkeyPatch) -> None:
    """What a forward still writes is found by others."""

    def early(
        original: Any, sharing: PrefixSharing, lease: Lease, tokens: Any, pending: Any = ()
    ) -> bool:
        # Tokens repeat in this model, so the ones that are not known here are guessed well.
        more = np.full(
            max(0, lease.kv_committed_len - len(tokens)), tokens[-1] if len(tokens) else 1, np.int32
        )
        return bool(original(sharing, lease, np.concatenate([tokens, more]), pending))

    wrap(patch, PrefixSharing, "publish_settled", early)


@FAULTS.add
def replace_pages_that_a_peer_reads(patch: pytest.MonkeyPatch) -> None:
    """Duplicates are freed while a lease goes on, as if nobody could read them."""

    def replace_all(original: Any, sharing: PrefixSharing, *args: Any, **kw: Any) -> bool:
        return bool(original(sharing, *args, **{**kw, "only_new": False}))

    wrap(patch, PrefixSharing, "_move_to_index", replace_all)


@FAULTS.add
def reclaim_before_the_fence(patch: pytest.MonkeyPatch) -> None:
    def hasty(original: Callable[..., int], allocator: PageAllocator) -> int:
        for entry in allocator.quarantine:
            object.__setattr__(entry, "fences", entry.fences[1:])
        return original(allocator)

    wrap(patch, PageAllocator, "reclaim", hasty)


@FAULTS.add
def free_what_is_fenced(patch: pytest.MonkeyPatch) -> None:
    wrap(
        patch,
        LeaseTable,
        "end_lease",
        lambda original, leases, lease, pending: original(leases, lease, ()),
    )


@FAULTS.add
def forget_duplicates(patch: pytest.MonkeyPatch) -> None:
    def forgetful(
        original: Any, allocator: PageAllocator, pending: Any, holder: str, pages: Any, **kw: Any
    ) -> None:
        pages = pages if "row" in kw else [NO_PAGES for _ in allocator.accounts]
        original(allocator, pending, holder, pages, **kw)

    wrap(patch, PageAllocator, "free_after", forgetful)


@FAULTS.add
def evict_what_is_locked(patch: pytest.MonkeyPatch) -> None:
    def unlocked(original: Callable[..., bool], queue: EvictionQueue, node: RadixNode) -> bool:
        locks, node.locks = node.locks, [0] * len(node.locks)
        try:
            return original(queue, node)
        finally:
            node.locks = locks

    wrap(patch, EvictionQueue, "is_evictable", unlocked)


@FAULTS.add
def split_without_its_locks(patch: pytest.MonkeyPatch) -> None:
    def unlocked(
        original: Callable[..., RadixNode], node: RadixNode, at: int, page_size: int
    ) -> RadixNode:
        upper = original(node, at, page_size)
        upper.locks = [0] * len(upper.locks)
        return upper

    wrap(patch, RadixNode, "split", unlocked)


@FAULTS.add
def slide_a_page_too_far(patch: pytest.MonkeyPatch) -> None:
    wrap(
        patch,
        LeaseLengths,
        "_advance_frontiers",
        lambda original, lengths, pool, holders, rows, frontiers: original(
            lengths, pool, holders, rows, frontiers + 1
        ),
    )


@FAULTS.add
def grow_without_recording_it(patch: pytest.MonkeyPatch) -> None:
    def silent(
        original: Callable[..., bool], lengths: LeaseLengths, leases: Any, tokens: Any
    ) -> bool:
        before = [lease.kv_allocated_len for lease in leases]
        grown = original(lengths, leases, tokens)
        for lease, length in zip(leases, before, strict=True):
            if length:
                less = max(length, lease.kv_allocated_len - lease.page_size)
                lengths._rows._allocated[lease.row] = less
        return grown

    wrap(patch, LeaseLengths, "grow", silent)


@FAULTS.add
def release_a_session_as_a_request(patch: pytest.MonkeyPatch) -> None:
    def close(leases: LeaseTable, lease: Lease) -> None:
        leases._rows.set_state(lease.row, LeaseState.CLOSED)

    patch.setattr(LeaseTable, "close_lease", close)


@FAULTS.add
def match_another_tenants_prefix(patch: pytest.MonkeyPatch) -> None:
    wrap(
        patch,
        RadixForest,
        "top",
        lambda original, forest, namespace: original(forest, ""),
    )
    wrap(
        patch,
        RadixTree,
        "insert",
        lambda original, tree, tokens, pages, namespace="": original(tree, tokens, pages, ""),
    )


@FAULTS.add
def break_a_promise(patch: pytest.MonkeyPatch) -> None:
    wrap(
        patch,
        Promises,
        "unpromised",
        lambda original, promises, pool: original(promises, pool) + promises.totals[pool] // 2,
    )


@FAULTS.add
def fork_without_its_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lease, "pending", lambda lease, others: list(others))


@FAULTS.add
def share_without_a_lock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixTree, "lock_again", lambda tree, lock: None)


@FAULTS.add
def share_the_unaligned_page(patch: pytest.MonkeyPatch) -> None:
    """The choices' last pages keep what they had before."""

    def fork(original: Any, sharing: PrefixSharing, *args: Any, **kw: Any) -> Any:
        forked = original(sharing, *args, **kw)
        return forked and replace(forked, copies=forked.copies[1:])

    wrap(patch, PrefixSharing, "fork", fork)


RARE: dict[str, Callable[[], None]] = {
    "fork_without_its_fence": partial(choice_scenario, "the first", Outcome.ABORTED, cached=True),
    "replace_pages_that_a_peer_reads": duplicate_scenario,
    "publish_the_unaligned_page": tail_scenario,
}
"""A search takes up to a minute to find these; the scenarios find them at once."""


@few(2)
@pytest.mark.parametrize("name", sorted(FAULTS.keys() - RARE.keys()))
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch):
    find(FAULTS[name], monkeypatch, DeviceMachine, SEARCH)


@pytest.mark.slow
@pytest.mark.parametrize("name", RARE)
def test_a_fault_that_seldom_shows_is_found(name: str, monkeypatch: pytest.MonkeyPatch):
    find(FAULTS[name], monkeypatch, DeviceMachine, settings(SEARCH, max_examples=8000), few=None)


@pytest.mark.parametrize("name", RARE)
def test_a_fault_that_seldom_shows_is_found_by_its_scenario(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    FAULTS[name](monkeypatch)
    with pytest.raises(AssertionError):
        RARE[name]()


@pytest.mark.parametrize("walks", [30, pytest.param(100, marks=pytest.mark.slow)])
def test_without_a_fault_nothing_is_found(walks: int):
    """Or else the tests above would show nothing."""
    run_state_machine_as_test(DeviceMachine, settings=settings(SEARCH, max_examples=walks))
