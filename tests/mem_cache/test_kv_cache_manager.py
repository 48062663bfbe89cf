"""The account of pages and rows, without a model and without a network."""

from __future__ import annotations

import numpy as np
import pytest

from kvrelay.mem_cache.errors import KVCacheError
from kvrelay.mem_cache.fence import StepClock, StepFence
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager
from kvrelay.mem_cache.leases.lease import Batch, LeaseState
from kvrelay.mem_cache.prefix.radix_tree import RadixTree
from kvrelay.mem_cache.release import Outcome, release_kv_cache
from kvrelay.mem_cache.shape import PoolShape


def make_kv_cache(
    pages: int = 16, page_size: int = 4, rows: int = 4, *, cached: bool = False
) -> KVCacheManager:
    return KVCacheManager(
        [PoolShape("full", pages)],
        page_size=page_size,
        total_rows=rows,
        max_row_tokens=pages * page_size,
        index=RadixTree(page_size, [None]) if cached else None,
    )


def assert_at_baseline(kv_cache: KVCacheManager) -> None:
    kv_cache.audit.check_pages()
    pages, rows = kv_cache.audit.counts()
    assert (pages.free, pages.promised, rows.free) == (pages.total, 0, rows.total)


def test_lengths_are_recorded_where_they_change():
    kv_cache = make_kv_cache()
    lease = kv_cache.open("a", promised_tokens=10)
    assert lease is not None
    assert (lease.kv_committed_len, lease.kv_allocated_len) == (0, 0)
    assert kv_cache.grow(lease, 9)
    assert (lease.kv_committed_len, lease.kv_allocated_len, lease.num_pages) == (0, 9, 3)
    kv_cache.commit(lease, 7)
    assert (lease.kv_committed_len, lease.kv_allocated_len) == (7, 9)
    kv_cache.audit.check_pages()
    release_kv_cache(kv_cache, lease, Outcome.FINISHED)
    assert_at_baseline(kv_cache)


@pytest.mark.parametrize(("page_size", "committed", "allocated"), [
    (1, 6, 6), (1, 5, 7), (4, 14, 18), (16, 48, 121), (3, 0, 1), (3, 0, 0),
])  # fmt: skip
def test_release_gives_back_tail_and_over_allocation(page_size, committed, allocated):
    kv_cache = make_kv_cache(pages=128, page_size=page_size)
    lease = kv_cache.open("a", promised_tokens=allocated)
    assert lease is not None
    assert kv_cache.grow(lease, allocated)
    kv_cache.commit(lease, committed)
    assert release_kv_cache(kv_cache, lease, Outcome.ABORTED)
    assert_at_baseline(kv_cache)


def test_release_twice_releases_once():
    kv_cache = make_kv_cache()
    lease = kv_cache.open("a", 8)
    assert lease is not None
    assert kv_cache.grow(lease, 8)
    assert release_kv_cache(kv_cache, lease, Outcome.FINISHED)
    assert not release_kv_cache(kv_cache, lease, Outcome.ABORTED)
    assert_at_baseline(kv_cache)


def test_commit_past_the_allocation_fails_loudly():
    kv_cache = make_kv_cache()
    lease = kv_cache.open("a", 8)
    assert lease is not None
    assert kv_cache.grow(lease, 5)
    with pytest.raises(KVCacheError, match="commit of 6 tokens"):
        kv_cache.commit(lease, 6)
    kv_cache.commit(lease, 5)
    with pytest.raises(KVCacheError, match="commit of 4 tokens"):
        kv_cache.commit(lease, 4)


def test_closed_lease_cannot_grow():
    kv_cache = make_kv_cache()
    lease = kv_cache.open("a", 8)
    assert lease is not None
    kv_cache.leases.close_lease(lease)
    with pytest.raises(KVCacheError, match="CLOSED"):
        kv_cache.grow(lease, 1)
    release_kv_cache(kv_cache, lease, Outcome.ABORTED)
    with pytest.raises(KVCacheError, match="RELEASED"):
        kv_cache.commit(lease, 0)
    assert lease.state is LeaseState.RELEASED


def test_shortage_changes_nothing():
    kv_cache = make_kv_cache(pages=4, page_size=4)
    first = kv_cache.open("first", 12)
    assert first is not None
    before = kv_cache.audit.page_counts()
    assert kv_cache.open("second", 8) is None
    assert kv_cache.audit.page_counts() == before
    second = kv_cache.open("second", 4)
    assert second is not None
    assert kv_cache.grow(second, 4)
    assert not kv_cache.grow(second, 5), "the rest is promised to the first"
    assert second.kv_allocated_len == 4
    assert kv_cache.grow(first, 12), "a promise is kept"
    kv_cache.audit.check_pages()


def test_rows_run_out_before_pages():
    kv_cache = make_kv_cache(rows=1)
    lease = kv_cache.open("a", 4)
    assert lease is not None
    assert kv_cache.open("b", 4) is None
    release_kv_cache(kv_cache, lease, Outcome.FINISHED)
    assert kv_cache.open("b", 4) is not None


def test_pages_that_a_forward_still_reads_are_not_reused():
    kv_cache = make_kv_cache(pages=4, page_size=4, rows=2)
    steps = StepClock()
    first = kv_cache.open("first", 16)
    assert first is not None
    assert kv_cache.grow(first, 16)
    steps.launch()
    release_kv_cache(kv_cache, first, Outcome.FINISHED, fences=[StepFence(steps, 1)])
    assert kv_cache.audit.page_counts()[0].quarantined == 4
    assert kv_cache.audit.row_counts().quarantined == 1
    assert kv_cache.open("second", 4) is None
    assert kv_cache.allocator.reclaim() == 0
    kv_cache.audit.check_pages()
    steps.end()
    assert kv_cache.allocator.reclaim() == 4
    assert_at_baseline(kv_cache)


def test_quarantine_waits_for_every_fence():
    kv_cache = make_kv_cache()
    steps, other = StepClock(), StepClock()
    lease = kv_cache.open("a", 4)
    assert lease is not None
    assert kv_cache.grow(lease, 4)
    steps.launch()
    other.launch()
    release_kv_cache(
        kv_cache, lease, Outcome.ABORTED, fences=[StepFence(steps, 1), StepFence(other, 1)]
    )
    steps.end()
    assert kv_cache.allocator.reclaim() == 0
    other.end()
    assert kv_cache.allocator.reclaim() == 1
    assert_at_baseline(kv_cache)


def test_page_table_snapshot_does_not_change_afterwards():
    kv_cache = make_kv_cache()
    lease = kv_cache.open("a", 8)
    assert lease is not None
    assert kv_cache.grow(lease, 8)
    (snapshot,) = kv_cache.lengths.page_tables([lease])
    kept = snapshot.copy()
    release_kv_cache(kv_cache, lease, Outcome.FINISHED)
    np.testing.assert_array_equal(snapshot, kept)


def make_windowed(window_pages: int, ahead: int) -> KVCacheManager:
    return KVCacheManager(
        [PoolShape("full", 200), PoolShape("window", window_pages, window=128)],
        page_size=16,
        total_rows=2,
        max_row_tokens=2048,
        ahead=ahead,
        index=RadixTree(16, (None, 128)),
    )


def test_a_prefix_that_fills_the_window_pool_does_not_keep_its_own_continuation_out():
    """The pool holds what one request needs, and the index has all of it."""
    kv_cache = make_windowed(window_pages=41, ahead=512)
    tokens = np.arange(1000, dtype=np.int32)
    first = kv_cache.open("first", 512)
    assert first is not None
    assert kv_cache.grow(first, 512)
    kv_cache.commit(first, 512)
    release_kv_cache(kv_cache, first, Outcome.FINISHED, token_ids=tokens[:512])
    assert kv_cache.audit.page_counts()[1].cached_evictable == 32
    second = kv_cache.open("second", 1000, token_ids=tokens[:999])
    assert second is not None
    assert kv_cache.grow(second, 512), "a promise is kept"
    kv_cache.audit.check_pages()
    release_kv_cache(kv_cache, second, Outcome.ABORTED)


def test_a_session_does_not_go_back_behind_its_window():
    kv_cache = make_windowed(window_pages=41, ahead=512)
    lease = kv_cache.open("turn", 512)
    assert lease is not None
    assert kv_cache.grow(lease, 512)
    kv_cache.commit(lease, 512)
    kv_cache.slide(lease, 512)
    release_kv_cache(kv_cache, lease, Outcome.SAVED)
    with pytest.raises(KVCacheError, match="cannot be cut to 100 tokens"):
        kv_cache.leases.borrow(lease, "next turn", 100, 200)
    assert kv_cache.leases.borrow(lease, "next turn", 512, 600)
    kv_cache.audit.check_pages()


def test_a_batch_looks_again_when_a_lease_was_released():
    kv_cache = make_kv_cache(rows=2)
    first, second = kv_cache.open("first", 16), kv_cache.open("second", 16)
    assert first is not None
    assert second is not None
    batch = Batch([first, second])
    for tokens in (1, 5, 6):
        assert kv_cache.lengths.grow(batch, [tokens, tokens + 2])
        kv_cache.lengths.commit(batch, np.array([tokens, tokens + 1]))
    assert kv_cache.lengths.committed(batch).tolist() == [6, 7]
    assert (first.kv_allocated_len, second.kv_allocated_len) == (6, 8)
    release_kv_cache(kv_cache, first, Outcome.ABORTED)
    third = kv_cache.open("third", 16)
    assert third is not None
    for late in (kv_cache.lengths.grow, kv_cache.lengths.commit):
        with pytest.raises(KVCacheError, match="of first: its lease is RELEASED"):
            late(batch, [7, 8])
    assert (third.kv_allocated_len, second.kv_allocated_len) == (0, 8)
    assert kv_cache.lengths.grow(Batch([third, second]), [3, 9])
    assert kv_cache.lengths.grow(Batch(), [])
    kv_cache.audit.check_pages()


def test_a_released_lease_has_nothing():
    kv_cache = make_kv_cache()
    lease = kv_cache.open("a", 8)
    assert lease is not None
    assert kv_cache.grow(lease, 8)
    release_kv_cache(kv_cache, lease, Outcome.FINISHED)
    assert (lease.row, lease.kv_allocated_len, lease.promised_tokens) == (-1, 0, 0)
    assert lease.pages().tolist() == []
    assert_at_baseline(kv_cache)


def test_each_lease_has_a_number():
    kv_cache = make_kv_cache()
    lease = kv_cache.open("a", 8)
    assert lease is not None
    with pytest.raises(KVCacheError, match="2 numbers for 1 leases"):
        kv_cache.lengths.grow([lease], [1, 2])


def test_room_version_rises_when_there_is_more_room_and_only_then():
    kv_cache = make_kv_cache(pages=8, rows=3, cached=True)
    steps = StepClock()
    tokens = np.arange(12, dtype=np.int32)
    versions = [kv_cache.room_version]

    def rose() -> bool:
        versions.append(kv_cache.room_version)
        assert versions[-1] - versions[-2] in (0, 1)
        return versions[-1] > versions[-2]

    assert not rose()
    first, second = kv_cache.open("first", 16), kv_cache.open("second", 8)
    assert first is not None
    assert second is not None
    assert kv_cache.lengths.grow([first, second], [16, 8])
    kv_cache.lengths.commit([first, second], [16, 8])
    assert kv_cache.open("third", 12) is None
    assert not rose(), "taken, promised and refused"
    kv_cache.sharing.publish(first, tokens)
    assert rose(), "another may find it"
    kv_cache.sharing.publish(first, tokens)
    assert not rose(), "the index had it"
    kv_cache.lengths.trim(first, 12)
    assert not rose(), "the page is promised again"
    steps.launch()
    release_kv_cache(kv_cache, second, Outcome.ABORTED, fences=[StepFence(steps, 1)])
    assert not rose(), "quarantined"
    kv_cache.allocator.reclaim()
    assert not rose()
    steps.end()
    kv_cache.allocator.reclaim()
    assert rose(), "reclaimed"
    kv_cache.leases.close_lease(first)
    assert rose(), "its promise is broken"
    release_kv_cache(kv_cache, first, Outcome.ABORTED)
    assert rose(), "its row is free, and the prefix is unlocked"
    assert not rose()
    third = kv_cache.open("third", 16, token_ids=tokens)
    assert third is not None
    assert not rose()
    release_kv_cache(kv_cache, third, Outcome.ABORTED)
    assert rose()
