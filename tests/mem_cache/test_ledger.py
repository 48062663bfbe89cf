"""The account of pages and rows, without a model and without a network."""

from __future__ import annotations

import numpy as np
import pytest

from kvrelay.mem_cache.account import Owner
from kvrelay.mem_cache.errors import ConservationError, LedgerError
from kvrelay.mem_cache.fence import StepClock, StepFence
from kvrelay.mem_cache.lease import Batch, LeaseState
from kvrelay.mem_cache.ledger import Ledger, PoolShape
from kvrelay.mem_cache.radix_tree import RadixTree
from kvrelay.mem_cache.release import Outcome, release_kv_cache


def make_ledger(
    pages: int = 16, page_size: int = 4, rows: int = 4, *, cached: bool = False
) -> Ledger:
    return Ledger(
        [PoolShape("full", pages)],
        page_size=page_size,
        total_rows=rows,
        max_row_tokens=pages * page_size,
        index=RadixTree(page_size, [None]) if cached else None,
    )


def assert_at_baseline(ledger: Ledger) -> None:
    ledger.audit_pages()
    pages, rows = ledger.counts()
    assert (pages.free, pages.promised, rows.free) == (pages.total, 0, rows.total)


def test_lengths_are_recorded_where_they_change():
    ledger = make_ledger()
    lease = ledger.open("a", promised_tokens=10)
    assert lease is not None
    assert (lease.kv_committed_len, lease.kv_allocated_len) == (0, 0)
    assert ledger.grow(lease, 9)
    assert (lease.kv_committed_len, lease.kv_allocated_len, lease.num_pages) == (0, 9, 3)
    ledger.commit(lease, 7)
    assert (lease.kv_committed_len, lease.kv_allocated_len) == (7, 9)
    ledger.audit_pages()
    release_kv_cache(ledger, lease, Outcome.FINISHED)
    assert_at_baseline(ledger)


@pytest.mark.parametrize(("page_size", "committed", "allocated"), [
    (1, 6, 6), (1, 5, 7), (4, 14, 18), (16, 48, 121), (3, 0, 1), (3, 0, 0),
])  # fmt: skip
def test_release_gives_back_tail_and_over_allocation(page_size, committed, allocated):
    ledger = make_ledger(pages=128, page_size=page_size)
    lease = ledger.open("a", promised_tokens=allocated)
    assert lease is not None
    assert ledger.grow(lease, allocated)
    ledger.commit(lease, committed)
    assert release_kv_cache(ledger, lease, Outcome.ABORTED)
    assert_at_baseline(ledger)


def test_release_twice_releases_once():
    ledger = make_ledger()
    lease = ledger.open("a", 8)
    assert lease is not None
    assert ledger.grow(lease, 8)
    assert release_kv_cache(ledger, lease, Outcome.FINISHED)
    assert not release_kv_cache(ledger, lease, Outcome.ABORTED)
    assert_at_baseline(ledger)


def test_commit_past_the_allocation_fails_loudly():
    ledger = make_ledger()
    lease = ledger.open("a", 8)
    assert lease is not None
    assert ledger.grow(lease, 5)
    with pytest.raises(LedgerError, match="commit of 6 tokens"):
        ledger.commit(lease, 6)
    ledger.commit(lease, 5)
    with pytest.raises(LedgerError, match="commit of 4 tokens"):
        ledger.commit(lease, 4)


def test_closed_lease_cannot_grow():
    ledger = make_ledger()
    lease = ledger.open("a", 8)
    assert lease is not None
    ledger.close(lease)
    with pytest.raises(LedgerError, match="CLOSED"):
        ledger.grow(lease, 1)
    release_kv_cache(ledger, lease, Outcome.ABORTED)
    with pytest.raises(LedgerError, match="RELEASED"):
        ledger.commit(lease, 0)
    assert lease.state is LeaseState.RELEASED


def test_shortage_changes_nothing():
    ledger = make_ledger(pages=4, page_size=4)
    first = ledger.open("first", 12)
    assert first is not None
    before = ledger.page_counts()
    assert ledger.open("second", 8) is None
    assert ledger.page_counts() == before
    second = ledger.open("second", 4)
    assert second is not None
    assert ledger.grow(second, 4)
    assert not ledger.grow(second, 5), "the rest is promised to the first"
    assert second.kv_allocated_len == 4
    assert ledger.grow(first, 12), "a promise is kept"
    ledger.audit_pages()


def test_rows_run_out_before_pages():
    ledger = make_ledger(rows=1)
    lease = ledger.open("a", 4)
    assert lease is not None
    assert ledger.open("b", 4) is None
    release_kv_cache(ledger, lease, Outcome.FINISHED)
    assert ledger.open("b", 4) is not None


def test_pages_that_a_forward_still_reads_are_not_reused():
    ledger = make_ledger(pages=4, page_size=4, rows=2)
    steps = StepClock()
    first = ledger.open("first", 16)
    assert first is not None
    assert ledger.grow(first, 16)
    steps.launch()
    release_kv_cache(ledger, first, Outcome.FINISHED, fences=[StepFence(steps, 1)])
    assert ledger.page_counts()[0].quarantined == 4
    assert ledger.row_counts().quarantined == 1
    assert ledger.open("second", 4) is None
    assert ledger.reclaim() == 0
    ledger.audit_pages()
    steps.settle()
    assert ledger.reclaim() == 4
    assert_at_baseline(ledger)


def test_quarantine_waits_for_every_fence():
    ledger = make_ledger()
    steps, other = StepClock(), StepClock()
    lease = ledger.open("a", 4)
    assert lease is not None
    assert ledger.grow(lease, 4)
    steps.launch()
    other.launch()
    release_kv_cache(
        ledger, lease, Outcome.ABORTED, fences=[StepFence(steps, 1), StepFence(other, 1)]
    )
    steps.settle()
    assert ledger.reclaim() == 0
    other.settle()
    assert ledger.reclaim() == 1
    assert_at_baseline(ledger)


def test_page_table_snapshot_does_not_change_afterwards():
    ledger = make_ledger()
    lease = ledger.open("a", 8)
    assert lease is not None
    assert ledger.grow(lease, 8)
    (snapshot,) = ledger.page_tables([lease])
    kept = snapshot.copy()
    release_kv_cache(ledger, lease, Outcome.FINISHED)
    np.testing.assert_array_equal(snapshot, kept)


def test_audit_names_a_lost_page_and_its_history():
    ledger = make_ledger()
    lease = ledger.open("culprit", 4)
    assert lease is not None
    assert ledger.grow(lease, 4)
    page = int(lease.pages()[0])
    ledger._books.rows.allocated[lease.row] = 0
    with pytest.raises(ConservationError, match=rf"page {page} has 0 owners: culprit: FREE to"):
        ledger.audit_pages()


def test_freeing_a_page_twice_is_caught_at_once():
    ledger = make_ledger()
    lease = ledger.open("a", 4)
    assert lease is not None
    assert ledger.grow(lease, 4)
    pages = lease.own_pages()
    release_kv_cache(ledger, lease, Outcome.FINISHED)
    with pytest.raises(ConservationError, match="should be owned by LEASE and is by FREE"):
        ledger._books.accounts[0].move("a", pages, Owner.LEASE, Owner.FREE)


def make_windowed(window_pages: int, ahead: int) -> Ledger:
    return Ledger(
        [PoolShape("full", 200), PoolShape("window", window_pages, window=128)],
        page_size=16,
        total_rows=2,
        max_row_tokens=2048,
        ahead=ahead,
        index=RadixTree(16, (None, 128)),
    )


def test_a_prefix_that_fills_the_window_pool_does_not_keep_its_own_continuation_out():
    """The pool holds what one request needs, and the index has all of it."""
    ledger = make_windowed(window_pages=41, ahead=512)
    tokens = np.arange(1000, dtype=np.int32)
    first = ledger.open("first", 512)
    assert first is not None
    assert ledger.grow(first, 512)
    ledger.commit(first, 512)
    release_kv_cache(ledger, first, Outcome.FINISHED, token_ids=tokens[:512])
    assert ledger.page_counts()[1].cached_evictable == 32
    second = ledger.open("second", 1000, token_ids=tokens[:999])
    assert second is not None
    assert ledger.grow(second, 512), "a promise is kept"
    ledger.audit_pages()
    release_kv_cache(ledger, second, Outcome.ABORTED)


def test_a_session_does_not_go_back_behind_its_window():
    ledger = make_windowed(window_pages=41, ahead=512)
    lease = ledger.open("turn", 512)
    assert lease is not None
    assert ledger.grow(lease, 512)
    ledger.commit(lease, 512)
    ledger.slide(lease, 512)
    release_kv_cache(ledger, lease, Outcome.SAVED)
    with pytest.raises(LedgerError, match="cannot be cut to 100 tokens"):
        ledger.borrow(lease, "next turn", 100, 200)
    assert ledger.borrow(lease, "next turn", 512, 600)
    ledger.audit_pages()


def test_no_page_is_no_page():
    ledger = make_ledger()
    with pytest.raises(ConservationError, match="-1 is no page"):
        ledger._books.accounts[0].move("a", np.array([-1], np.int32), Owner.LEASE, Owner.FREE)


def test_a_batch_looks_again_when_a_lease_was_released():
    ledger = make_ledger(rows=2)
    first, second = ledger.open("first", 16), ledger.open("second", 16)
    assert first is not None
    assert second is not None
    batch = Batch([first, second])
    for tokens in (1, 5, 6):
        assert ledger.grow_all(batch, [tokens, tokens + 2])
        ledger.commit_all(batch, np.array([tokens, tokens + 1]))
    assert ledger.committed(batch).tolist() == [6, 7]
    assert (first.kv_allocated_len, second.kv_allocated_len) == (6, 8)
    release_kv_cache(ledger, first, Outcome.ABORTED)
    third = ledger.open("third", 16)
    assert third is not None
    for late in (ledger.grow_all, ledger.commit_all):
        with pytest.raises(LedgerError, match="of first: its lease is RELEASED"):
            late(batch, [7, 8])
    assert (third.kv_allocated_len, second.kv_allocated_len) == (0, 8)
    assert ledger.grow_all(Batch([third, second]), [3, 9])
    assert ledger.grow_all(Batch(), [])
    ledger.audit_pages()


def test_a_released_lease_has_nothing():
    ledger = make_ledger()
    lease = ledger.open("a", 8)
    assert lease is not None
    assert ledger.grow(lease, 8)
    release_kv_cache(ledger, lease, Outcome.FINISHED)
    assert (lease.row, lease.kv_allocated_len, lease.promised_tokens) == (-1, 0, 0)
    assert lease.pages().tolist() == []
    assert_at_baseline(ledger)


def test_each_lease_has_a_number():
    ledger = make_ledger()
    lease = ledger.open("a", 8)
    assert lease is not None
    with pytest.raises(LedgerError, match="2 numbers for 1 leases"):
        ledger.grow_all([lease], [1, 2])


def test_room_version_rises_when_there_is_more_room_and_only_then():
    ledger = make_ledger(pages=8, rows=3, cached=True)
    steps = StepClock()
    tokens = np.arange(12, dtype=np.int32)
    versions = [ledger.room_version]

    def rose() -> bool:
        versions.append(ledger.room_version)
        assert versions[-1] - versions[-2] in (0, 1)
        return versions[-1] > versions[-2]

    assert not rose()
    first, second = ledger.open("first", 16), ledger.open("second", 8)
    assert first is not None
    assert second is not None
    assert ledger.grow_all([first, second], [16, 8])
    ledger.commit_all([first, second], [16, 8])
    assert ledger.open("third", 12) is None
    assert not rose(), "taken, promised and refused"
    ledger.publish(first, tokens)
    assert rose(), "another may find it"
    ledger.publish(first, tokens)
    assert not rose(), "the index had it"
    ledger.trim(first, 12)
    assert not rose(), "the page is promised again"
    steps.launch()
    release_kv_cache(ledger, second, Outcome.ABORTED, fences=[StepFence(steps, 1)])
    assert not rose(), "quarantined"
    ledger.reclaim()
    assert not rose()
    steps.settle()
    ledger.reclaim()
    assert rose(), "reclaimed"
    ledger.close(first)
    assert rose(), "its promise is broken"
    release_kv_cache(ledger, first, Outcome.ABORTED)
    assert rose(), "its row is free, and the prefix is unlocked"
    assert not rose()
    third = ledger.open("third", 16, token_ids=tokens)
    assert third is not None
    assert not rose()
    release_kv_cache(ledger, third, Outcome.ABORTED)
    assert rose()
