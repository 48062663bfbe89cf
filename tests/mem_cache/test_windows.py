"""Pools of layers with a sliding window: scenarios 6, 26 to 30 and 50.

Unless a test says otherwise p=4; a window of 8 tokens and 4 ahead make 4 pages at a time.
"""

from __future__ import annotations

import pytest

from kvrelay.mem_cache.release import Outcome
from kvrelay.mem_cache.shape import PoolShape
from tests.mem_cache.memory import Memory
from tests.mem_cache.scenarios import (
    CACHED,
    OTHERS,
    OVERLAP,
    TOKENS,
    assert_at_baseline,
    compute,
    end_all_forwards,
    generate,
    lengths,
    make,
    publish,
    start,
    state,
    times_freed,
)


@CACHED
@OVERLAP
def test_scenario_6_end_of_sequence_with_a_window_frees_the_last_slot(overlap, cached):
    """p=1, a window of 4, L=6 and three outputs: the window holds the tokens from 5 on."""
    memory = make(1, 32, window=4, window_pages=32, ahead=8, cached=cached)
    holder = start(memory, TOKENS, 9, known=0)
    generate(memory, holder, 6, 3, overlap=overlap)
    end = 9 if overlap else 8
    assert lengths(holder.lease) == (0, end, end)
    assert holder.lease.first_pages == (0, 5)
    own = [holder.lease.own_pages(pool) for pool in (0, 1)]
    assert [len(pages) for pages in own] == [end, end - 5]
    last = [pages[-1:] for pages in own]
    (before,) = times_freed(memory.kv_cache, last[1], 1)  # the window has used it before
    memory.release(holder, Outcome.FINISHED)
    end_all_forwards(memory)
    kept = [8, 3] if cached else [0, 0]
    for pool, counts in enumerate(memory.kv_cache.audit.page_counts()):
        assert counts.cached_evictable == kept[pool]
        assert counts.free == counts.total - kept[pool]
    if overlap or not cached:
        assert times_freed(memory.kv_cache, last[0], 0) == {1}
        assert times_freed(memory.kv_cache, last[1], 1) == {before + 1}
    assert_at_baseline(memory)


def test_scenario_26_budget_without_the_page_of_margin_is_refused():
    memory = make(4, 40, window=8, window_pages=7, ahead=4)
    first = start(memory, TOKENS, 40)
    before = memory.kv_cache.audit.counts()
    assert before[1].free - before[1].promised == (8 + 4) // 4
    assert memory.open(OTHERS, 40) is None
    assert memory.kv_cache.audit.counts() == before
    most = 0
    for count in (1, *[4] * 9, 3):
        memory.slide(first)
        compute(memory, first, count)
        most = max(most, len(first.lease.own_pages(1)))
    assert most == 4, "the margin is needed"
    memory.release(first, Outcome.ABORTED)
    second = start(memory, OTHERS, 40)
    memory.release(second, Outcome.ABORTED)
    alone = make(4, 40, window=8, window_pages=3, ahead=4)
    assert alone.open(TOKENS, 40) is None
    assert alone.kv_cache.max_lease_tokens == 12, "what needs no fourth page fits"
    for one in (memory, alone):
        assert_at_baseline(one)


def test_scenario_27_deferred_chunk_moves_on_in_a_later_step():
    memory = make(4, 40, window=8, window_pages=5, ahead=4)
    running, deferred = start(memory, TOKENS, 24), start(memory, OTHERS, 4)
    moved = []
    for _ in range(8):
        for holder in memory.holders:
            memory.slide(holder)
        if running in memory.holders:
            assert memory.compute(running, 4), "the next step moves on"
        before = lengths(deferred.lease), deferred.lease.tables()
        moved.append(memory.compute(deferred, 4))
        if not moved[-1]:
            assert (lengths(deferred.lease), deferred.lease.tables()) == before
        end_all_forwards(memory)
        memory.check()
        if running in memory.holders and running.written == 24:
            memory.release(running, Outcome.FINISHED)
    assert moved == [True, False, False, False, False, True, True, True]
    assert lengths(deferred.lease) == (0, 16, 16)
    memory.release(deferred, Outcome.FINISHED)
    assert_at_baseline(memory)


@pytest.mark.parametrize(("full_pages", "window_pages"), [
    pytest.param(40, 5, id="28"), pytest.param(11, 40, id="28-reversed"),
])  # fmt: skip
def test_scenario_28_what_one_pool_grants_goes_back_when_the_other_refuses(
    full_pages, window_pages
):
    memory = make(4, full_pages, window=8, window_pages=window_pages, ahead=4)
    first = start(memory, TOKENS, 40)
    before = memory.kv_cache.audit.counts()
    assert memory.open(OTHERS, 40) is None
    assert memory.kv_cache.audit.counts() == before
    second = start(memory, OTHERS, 4)
    compute(memory, second, 4)
    unchanged = state(memory, second)
    assert not memory.compute(second, 4)
    assert not memory.kv_cache.lengths.grow([first.lease, second.lease], [4, 8])
    assert lengths(first.lease) == (0, 0, 0)
    assert state(memory, second) == unchanged
    assert [counts.held for counts in memory.kv_cache.audit.page_counts()] == [1, 1]
    memory.release(first, Outcome.ABORTED)
    compute(memory, second, 4)
    memory.release(second, Outcome.FINISHED)
    assert_at_baseline(memory)


@pytest.mark.parametrize("outcome", [Outcome.FINISHED, Outcome.ABORTED])
def test_scenario_29_page_reused_after_it_left_the_window_of_a_request(outcome):
    memory = make(4, 8, window=4, window_pages=4, ahead=16)
    first = start(memory, TOKENS, 16)
    compute(memory, first, 16)
    left = first.lease.pages(1)[:3]
    memory.slide(first)
    assert first.lease.pages(1).tolist()[:3] == [-1, -1, -1]
    second = start(memory, OTHERS, 12)
    compute(memory, second, 12)
    assert set(second.lease.own_pages(1)) == set(left)
    memory.release(first, outcome)
    assert set(second.lease.own_pages(1)) == set(left)
    assert times_freed(memory.kv_cache, left, 1) == {1}
    memory.check()
    memory.release(second, Outcome.FINISHED)
    assert_at_baseline(memory)


def test_scenario_29_page_reused_after_the_index_evicted_it_from_its_window():
    memory = make(4, 8, window=4, window_pages=5, ahead=8)
    first = start(memory, TOKENS, 16)
    compute(memory, first, 8)
    published = set(first.lease.pages(1))
    publish(memory, first)
    compute(memory, first, 8)
    published |= set(first.lease.pages(1))
    publish(memory, first)
    assert first.lease.pages(1).tolist()[:2] == [-1, -1]
    second = start(memory, OTHERS, 8)
    compute(memory, second, 8)
    reused = published & set(second.lease.own_pages(1))
    assert reused, "the index has let go of window pages that nobody sees any more"
    assert [memory.kv_cache.index.size(pool) for pool in (0, 1)] == [4, 3]
    memory.release(first, Outcome.FINISHED)
    third = start(memory, OTHERS[::-1], 12)
    compute(memory, third, 12)
    assert [memory.kv_cache.index.size(pool) for pool in (0, 1)] == [0, 0]
    assert times_freed(memory.kv_cache, reused, 1) == {1}
    assert set(second.lease.own_pages(1)) >= reused
    memory.check()
    memory.release(second, Outcome.FINISHED)
    memory.release(third, Outcome.FINISHED)
    assert_at_baseline(memory)


def test_scenario_30_evicted_frontier_never_empties_a_leaf_of_the_index():
    """p=64, a window of 16, position 150: the leaf ends at 128 and is continued from 113 on."""
    memory = make(64, 8, window=16, window_pages=5, ahead=150)
    first = start(memory, TOKENS, 151)
    compute(memory, first, 150)
    memory.slide(first)
    assert first.lease.first_pages == (0, 1), "not (0, 2), where token 135 is"
    kept = first.lease.pages(1)[1]
    publish(memory, first)
    assert lengths(first.lease) == (128, 150, 150)
    memory.release(first, Outcome.FINISHED)
    evictable = [counts.cached_evictable for counts in memory.kv_cache.audit.page_counts()]
    assert evictable == [2, 1]
    second = start(memory, TOKENS, 151)
    assert second.lease.cache_protected_len == 128
    assert second.lease.pages(1).tolist() == [-1, kept]
    compute(memory, second, 23)  # reads the window's tokens from 113 on
    memory.release(second, Outcome.FINISHED)
    assert_at_baseline(memory)


def test_scenario_50_window_pages_that_a_running_forward_reads_are_never_evicted():
    """p=4, a window of 5: the forward of token 7 sees token 3, a prefix of 8 tokens does not."""
    memory = make(4, 12, window=5, window_pages=5, ahead=8)
    first = start(memory, TOKENS, 8, known=0)
    compute(memory, first, 4)
    publish(memory, first)
    compute(memory, first, 3)
    assert memory.compute(first, 1)
    first.written = 8  # published too early, as with overlap where a last token is known
    memory.release(first, Outcome.FINISHED)
    other = start(memory, OTHERS, 12, known=0)
    memory.kv_cache.grow(other.lease, 16)
    (running,) = memory.forwards
    assert not set(other.lease.own_pages(1)) & set(running.tables[1])
    end_all_forwards(memory)
    memory.release(other, Outcome.ABORTED)
    assert_at_baseline(memory)


def test_scenario_49_promises_are_kept_when_a_window_finds_duplicates():
    """Its window is one page; the node of the index that it locks has four."""
    memory = make(4, 40, window=4, window_pages=11, ahead=16)
    first, second = start(memory, TOKENS, 16), start(memory, TOKENS, 16)
    compute(memory, first, 16)
    memory.release(first, Outcome.FINISHED)
    compute(memory, second, 16)
    memory.slide(second)
    others = [start(memory, OTHERS, 16, known=0) for _ in range(2)]
    publish(memory, second)
    memory.kv_cache.audit.check_pages()
    assert memory.kv_cache.lengths.grow([other.lease for other in others], [16, 16])
    for holder in list(memory.holders):
        memory.release(holder, Outcome.ABORTED)
    assert_at_baseline(memory)


def test_promise_is_kept_when_window_pages_are_published_on_the_way():
    """What the index locks of them does not come back as the window moves on."""
    memory = make(4, 40, window=8, window_pages=6, ahead=4)
    kv_cache = memory.kv_cache
    first = start(memory, TOKENS, 40)
    for _ in range(3):
        memory.slide(first)
        compute(memory, first, 4)
    publish(memory, first)
    other = memory.open(OTHERS, 12, known=0)
    while first.written < 40:
        memory.slide(first)
        compute(memory, first, 4)
        memory.check()
    assert first.lease.cache_protected_len == 12
    for holder in [first, *([other] if other else [])]:
        memory.release(holder, Outcome.ABORTED)
    memory.reclaim()
    assert kv_cache.audit.page_counts()[1].promised == 0
    assert_at_baseline(memory)


@CACHED
def test_a_leaf_that_every_window_has_passed_is_let_go_of_with_the_last_lock(cached):
    """Without a full pool: the near window's pages are evicted while the far one locks theirs."""
    pools = [PoolShape("near", 7, 8), PoolShape("far", 30, 24)]
    memory = Memory(pools, 4, 4, 120, cached=cached, ahead=8)
    first = start(memory, TOKENS, 60, known=0)
    compute(memory, first, 8, 8)
    publish(memory, first)
    for count in (4, 4):
        memory.slide(first)
        compute(memory, first, count)
    memory.slide(first)
    other = start(memory, OTHERS, 8, known=0)
    compute(memory, other, 8)
    compute(memory, first, 8)
    assert index_sizes(memory) == ([0, 4] if cached else [0, 0])
    while first.written < 60:
        memory.slide(first)
        compute(memory, first, 4)
        memory.check()
    assert index_sizes(memory) == [0, 0]
    publish(memory, first)
    for holder in (first, other):
        memory.release(holder, Outcome.FINISHED)
    assert_at_baseline(memory)


def index_sizes(memory: Memory) -> list[int]:
    return [memory.kv_cache.index.size(pool) for pool in (0, 1)]
