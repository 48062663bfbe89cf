"""What is published while its lease goes on: found, locked, let go of as the window moves."""

from __future__ import annotations

import pytest

from kvrelay.mem_cache.release import Outcome
from tests.mem_cache.memory import Memory
from tests.mem_cache.scenarios import (
    CACHED,
    OTHERS,
    TOKENS,
    assert_at_baseline,
    compute,
    end_all_forwards,
    full,
    generate,
    lengths,
    make,
    publish,
    start,
)


def test_published_pages_stay_in_the_table():
    memory = make(4, 12)
    first = start(memory, TOKENS, 20)
    compute(memory, first, 10)
    table = first.lease.tables()
    assert memory.publish_settled(first)
    assert not memory.publish_settled(first), "nothing has settled since"
    assert first.lease.tables() == table
    assert lengths(first.lease) == (8, 10, 10)
    second = start(memory, TOKENS, 12)
    assert lengths(second.lease) == (8, 8, 8)
    compute(memory, first, 6)
    compute(memory, second, 2)
    memory.check()
    for holder in (first, second):
        memory.release(holder, Outcome.ABORTED)
    end_all_forwards(memory)
    assert_at_baseline(memory)


def test_a_page_that_is_not_full_is_not_published_though_it_has_room():
    memory = make(4, 12)
    holder = start(memory, TOKENS, 16)
    assert memory.kv_cache.grow(holder.lease, 16)
    compute(memory, holder, 10)
    publish(memory, holder)
    assert lengths(holder.lease) == (8, 10, 16)
    memory.release(holder, Outcome.FINISHED)
    assert full(memory).cached_evictable == 2
    assert_at_baseline(memory)


def test_a_duplicate_stays_its_leases_own_until_its_release():
    memory = make(4, 12)
    first, second = start(memory, TOKENS, 12), start(memory, TOKENS, 12)
    compute(memory, first, 8)
    compute(memory, second, 12)
    assert memory.publish_settled(first)
    memory.announce(second)
    assert not memory.publish_settled(second)
    assert lengths(second.lease) == (0, 12, 12)
    memory.release(first, Outcome.HANDED_OVER)
    assert (full(memory).held, full(memory).cached_evictable) == (3, 2)
    memory.release(second, Outcome.HANDED_OVER)
    end_all_forwards(memory)
    assert full(memory).cached_evictable == 3
    assert_at_baseline(memory)


@pytest.mark.parametrize("outcome", [Outcome.ABORTED, Outcome.FAILED])
def test_what_is_settled_is_found_after_an_abort_and_not_after_a_failure(outcome):
    memory = make(4, 12)
    found = start(memory, TOKENS, 4)
    compute(memory, found, 4)
    memory.release(found, Outcome.FINISHED)
    first = start(memory, TOKENS, 16)
    compute(memory, first, 8)
    assert memory.publish_settled(first)
    assert memory.compute(first, 4)
    memory.release(first, outcome)
    end_all_forwards(memory)
    second = start(memory, TOKENS, 16)
    assert second.lease.cache_protected_len == (12 if outcome is Outcome.ABORTED else 4)
    memory.release(second, Outcome.ABORTED)
    assert_at_baseline(memory)


def test_who_has_locked_what_is_forgotten_goes_on_and_publishes_nothing_after_it():
    memory = make(4, 20)
    first = start(memory, TOKENS, 16)
    compute(memory, first, 8)
    memory.publish_settled(first)
    second = start(memory, TOKENS, 20)
    memory.release(first, Outcome.FAILED)
    compute(memory, second, 8)
    assert not memory.publish_settled(second)
    third = start(memory, TOKENS, 16)
    assert third.lease.cache_protected_len == 0
    compute(memory, third, 12)
    assert memory.publish_settled(third)
    assert not memory.publish_settled(second), "others read its pages where they are"
    memory.release(second, Outcome.FINISHED)
    memory.release(third, Outcome.FINISHED)
    end_all_forwards(memory)
    fourth = start(memory, TOKENS, 20)
    assert fourth.lease.cache_protected_len == 12, "what continued the forgotten pages is not found"
    memory.release(fourth, Outcome.ABORTED)
    assert_at_baseline(memory)


def windowed(cached: bool = True, window_pages: int = 9) -> Memory:
    return make(4, 40, window=6, window_pages=window_pages, ahead=4, cached=cached)


def window_protected(memory: Memory) -> int:
    return memory.kv_cache.audit.page_counts()[1].cached_protected


@CACHED
def test_a_window_that_has_passed_what_was_published_locks_it_no_longer(cached):
    memory = windowed(cached)
    first = start(memory, TOKENS, 60)
    generate(memory, first, 4, 5, overlap=False)
    published = memory.publish_settled(first)
    assert published is cached
    assert window_protected(memory) == (2 if cached else 0)
    generate(memory, first, 1, 20, overlap=False)
    assert window_protected(memory) == 0
    assert memory.kv_cache.audit.page_counts()[0].cached_protected == (2 if cached else 0)
    memory.release(first, Outcome.FINISHED)
    end_all_forwards(memory)
    assert_at_baseline(memory)


def test_a_locked_leaf_may_lose_its_window_and_is_removed_when_it_is_unlocked():
    memory = windowed(window_pages=7)
    first = start(memory, TOKENS, 28)
    generate(memory, first, 4, 5, overlap=False)
    memory.publish_settled(first)
    generate(memory, first, 1, 20, overlap=False)
    other = start(memory, OTHERS, 60, known=0)
    assert memory.kv_cache.grow(other.lease, 4 * 4), "it needs what the window has left"
    memory.check()
    assert memory.kv_cache.cache_counts.evicted_pages
    memory.release(other, Outcome.ABORTED)
    memory.release(first, Outcome.ABORTED)
    end_all_forwards(memory)
    assert full(memory).free == full(memory).total, "nobody could continue from what is left"
    assert_at_baseline(memory)


@CACHED
def test_choices_share_what_was_published_after_the_window_has_moved(cached):
    memory = windowed(cached, window_pages=16)
    first = start(memory, TOKENS, 20)
    generate(memory, first, 4, 5, overlap=False)
    memory.publish_settled(first)
    generate(memory, first, 1, 8, overlap=False)
    children = memory.fork(first, 2, 24)
    assert children is not None
    end_all_forwards(memory)
    for holder in [first, *children]:
        compute(memory, holder, 1)
    memory.check()
    for holder in list(memory.holders):
        memory.release(holder, Outcome.FINISHED)
    end_all_forwards(memory)
    assert_at_baseline(memory)
