"""What is in the prefix index while others use it: scenarios 12, 37, 49 and 50."""

from __future__ import annotations

import pytest

from kvrelay.mem_cache.account import Owner
from kvrelay.mem_cache.audit import OwnerRun
from kvrelay.mem_cache.release import Outcome
from tests.mem_cache.scenarios import (
    OTHERS,
    TOKENS,
    assert_at_baseline,
    compute,
    end_all_forwards,
    full,
    holding,
    lengths,
    make,
    publish,
    start,
    times_freed,
)


@pytest.mark.parametrize(("page_size", "duplicates", "protected", "later", "taken"), [
    pytest.param(1, 50, 50, 49, 1, id="12-p1"),
    pytest.param(4, 12, 48, 12, 1, id="12-p4"),
    pytest.param(16, 3, 48, 3, 0, id="12-p16"),
])  # fmt: skip
def test_scenario_12_duplicates_between_chunks_are_freed_page_aligned_and_once(
    page_size, duplicates, protected, later, taken
):
    """`later`: duplicates of the second chunk; `taken`: pages of it that only the first has."""
    memory = make(page_size, 220 // page_size + 4)
    first = start(memory, TOKENS, 100)
    compute(memory, first, 50)
    second = start(memory, TOKENS, 99)
    compute(memory, second, 99)
    publish(memory, second)
    indexed, mine, before = 99 // page_size, first.lease.pages(), full(memory)
    assert memory.kv_cache.index.size(0) == indexed
    publish(memory, first)
    assert lengths(first.lease) == (protected, 50, 50)
    assert full(memory).free - before.free == duplicates
    assert times_freed(memory.kv_cache, mine[:duplicates]) == {1}
    assert first.lease.own_pages().tolist() == mine[duplicates:].tolist()
    publish(memory, first)  # there is nothing new to publish
    assert full(memory).free - before.free == duplicates
    compute(memory, first, 50)
    mine, before = first.lease.pages(), full(memory)
    publish(memory, first)
    assert first.lease.cache_protected_len == 100 // page_size * page_size
    assert full(memory).free - before.free == later
    assert memory.kv_cache.index.size(0) == indexed + taken
    assert memory.kv_cache.cache_counts.duplicate_pages == duplicates + later
    memory.check()
    memory.release(first, Outcome.FINISHED)
    memory.release(second, Outcome.FINISHED)
    assert_at_baseline(memory)


@pytest.mark.parametrize("change", ["37-longer", "37-split", "37-pressure"])
def test_scenario_37_protected_length_stays_when_the_index_changes_after_planning(change):
    memory = make(4, 12)
    earlier = holding(memory, 8, 8)
    memory.release(earlier, Outcome.FINISHED)
    in_the_way, before = start(memory, OTHERS, 8 * 4), memory.kv_cache.audit.counts()
    assert memory.open(TOKENS, 6 * 4) is None, "planned, and refused"
    assert memory.kv_cache.audit.counts() == before
    memory.release(in_the_way, Outcome.ABORTED)
    planned = start(memory, TOKENS, 16)
    assert lengths(planned.lease) == (8, 8, 8)
    table = planned.lease.pages()
    if change == "37-pressure":
        other = start(memory, OTHERS, 8 * 4)
        assert memory.kv_cache.grow(other.lease, 8 * 4)
        assert not memory.kv_cache.grow(other.lease, 9 * 4), "what is locked is not evicted"
    else:
        shared = 16 if change == "37-longer" else 4
        other = start(memory, TOKENS[:shared] + OTHERS, 16)
        compute(memory, other, 16 - other.lease.kv_committed_len)
        publish(memory, other)
        assert memory.kv_cache.index.size(0) == (4 if change == "37-longer" else 2 + 3)
    assert lengths(planned.lease) == (8, 8, 8)
    assert planned.lease.pages().tolist() == table.tolist()
    compute(memory, planned, 8)
    assert planned.lease.pages()[:2].tolist() == table.tolist()
    duplicates_before = memory.kv_cache.cache_counts.duplicate_pages
    memory.release(planned, Outcome.FINISHED)
    assert full(memory).cached_protected == (0 if change == "37-pressure" else 4), "the other's"
    duplicates = memory.kv_cache.cache_counts.duplicate_pages - duplicates_before
    assert duplicates == (2 if change == "37-longer" else 0)
    memory.release(other, Outcome.ABORTED)
    assert full(memory).cached_protected == 0, "every lock is undone"
    assert_at_baseline(memory)


def test_scenario_49_duplicate_that_a_peer_still_reads_is_neither_freed_nor_reused():
    memory = make(4, 42)
    first = start(memory, TOKENS, 48)
    compute(memory, first, 48)
    memory.announce(first)
    assert first.lease.pages().tolist() == list(range(12))
    second = start(memory, TOKENS, 48)
    compute(memory, second, 48)
    publish(memory, second)
    publish(memory, first)
    assert first.lease.pages().tolist() == second.lease.pages().tolist() == list(range(12, 24))
    owners = memory.kv_cache.audit.owner_runs(0)
    assert OwnerRun(0, 12, Owner.QUARANTINE, first.lease.holder) in owners
    assert [run.first_page for run in owners[1:]] == [
        run.first_page + run.num_pages for run in owners[:-1]
    ]
    assert sum(run.num_pages for run in owners) == memory.kv_cache.shape.pools[0].total_pages
    assert owners[-1].owner is Owner.FREE
    assert memory.kv_cache.allocator.reclaim() == 0
    third = start(memory, OTHERS, 72)
    pull = memory.pull(third, 72)
    assert pull is not None
    memory.end(pull)
    assert third.lease.own_pages().tolist() == list(range(24, 42))
    assert memory.open(OTHERS, 4, known=0) is None
    memory.check()  # what the peer reads is right
    memory.release(first, Outcome.HANDED_OVER)  # ends its stream
    assert memory.kv_cache.allocator.reclaim() == 12
    assert times_freed(memory.kv_cache, range(12)) == {1}
    fourth = start(memory, OTHERS, 48, known=0)
    assert memory.kv_cache.grow(fourth.lease, 48)
    assert 10 in fourth.lease.own_pages()
    for holder in (second, third, fourth):
        memory.release(holder, Outcome.ABORTED)
    assert_at_baseline(memory)


def test_scenario_49_duplicate_that_a_forward_still_reads_at_its_end():
    memory = make(4, 8)
    first, second = start(memory, TOKENS, 9), start(memory, TOKENS, 8)
    compute(memory, first, 8)
    compute(memory, second, 8)
    memory.release(second, Outcome.FINISHED)
    assert memory.compute(first, 1)
    own = first.lease.own_pages()
    memory.release(first, Outcome.FINISHED)
    counts = full(memory)
    assert (counts.cached_protected, counts.quarantined, counts.free) == (2, 3, 3)
    other = start(memory, OTHERS, 12, known=0)
    pull = memory.pull(other, 12)
    assert pull is not None
    memory.end(pull)
    end_all_forwards(memory)  # checks what the forward read
    assert times_freed(memory.kv_cache, own) == {1}
    memory.release(other, Outcome.ABORTED)
    assert full(memory).cached_evictable == 2
    assert_at_baseline(memory)


@pytest.mark.parametrize("how", ["publish", "release"])
def test_scenario_49_promises_are_kept_while_duplicates_wait(how):
    memory = make(4, 8)
    first, second = start(memory, TOKENS, 9), start(memory, TOKENS, 8)
    compute(memory, first, 8)
    compute(memory, second, 8)
    memory.release(second, Outcome.FINISHED)
    assert memory.compute(first, 1)
    other = start(memory, OTHERS, 20, known=0)  # is promised what the index could evict
    if how == "publish":
        publish(memory, first)
        memory.kv_cache.audit.check_pages()
    else:
        memory.release(first, Outcome.FINISHED)
    assert memory.kv_cache.grow(other.lease, 20), "a promise was broken"
    for holder in list(memory.holders):
        memory.release(holder, Outcome.ABORTED)
    end_all_forwards(memory)
    assert_at_baseline(memory)


@pytest.mark.parametrize("use", ["50-reads", "50-writes"])
def test_scenario_50_what_a_running_forward_uses_is_never_evicted(use):
    """Another request wants every page that can be had, and writes to it at once."""
    memory = make(4, 6)
    kv_cache = memory.kv_cache
    first = start(memory, TOKENS, 12)
    if use == "50-reads":
        compute(memory, first, 8)
    else:
        assert memory.compute(first, 8)
        kv_cache.sharing.publish(first.lease, first.ids(8), memory.pending(first))  # too early
    assert memory.compute(first, 1)
    memory.release(first, Outcome.FINISHED)
    counts = full(memory)
    assert (counts.cached_protected, counts.cached_evictable, counts.quarantined) == (2, 0, 1)
    assert memory.open(OTHERS, 16, known=0) is None
    other = start(memory, OTHERS, 12, known=0)
    pull = memory.pull(other, 12)
    assert pull is not None
    memory.end(pull)
    assert not kv_cache.grow(other.lease, 16)
    assert kv_cache.cache_counts.evicted_pages == 0
    while memory.forwards:
        memory.end_forward()  # checks what it read
    assert not kv_cache.grow(other.lease, 16), "nobody has looked at the fences yet"
    assert kv_cache.allocator.reclaim() == 1
    assert kv_cache.grow(other.lease, 24)
    assert kv_cache.cache_counts.evicted_pages == 2
    memory.check()
    memory.release(other, Outcome.ABORTED)
    assert_at_baseline(memory)
