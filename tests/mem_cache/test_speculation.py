"""Drafted tokens and the pages that they need: scenarios 22, 23 and 25."""

from __future__ import annotations

import pytest

from kvrelay.mem_cache.release import Outcome
from tests.mem_cache.scenarios import (
    OTHERS,
    TOKENS,
    assert_at_baseline,
    compute,
    full,
    holding,
    lengths,
    make,
    start,
    times_freed,
)


@pytest.mark.parametrize(("committed", "freed"), [
    pytest.param(4, 1, id="22-C4"), pytest.param(5, 1, id="22-C5"),
    pytest.param(6, 0, id="22-C6"), pytest.param(7, 1, id="22-C7"),
])  # fmt: skip
def test_scenario_22_rejected_drafts_free_no_page_of_an_accepted_token(committed, freed):
    """p=4; a token and five drafts of it are verified, two of the drafts are accepted."""
    memory = make(4, 4)
    holder = start(memory, TOKENS, 16)
    compute(memory, holder, committed)
    accepted = committed + 1 + 2
    holder.tokens[accepted:] = OTHERS[accepted:]  # the drafts
    compute(memory, holder, 6)
    assert lengths(holder.lease) == (0, committed + 6, committed + 6)
    pages = holder.lease.pages()
    memory.kv_cache.lengths.trim(holder.lease, accepted)
    holder.written = accepted
    holder.tokens[accepted:] = TOKENS[accepted:]
    kept = -(-accepted // 4)
    assert holder.lease.kv_committed_len == accepted
    assert holder.lease.pages().tolist() == pages[:kept].tolist()
    assert times_freed(memory.kv_cache, pages[kept:]) == ({1} if freed else set())
    assert full(memory).free == 4 - kept
    assert len(pages) - kept == freed
    memory.check()  # every accepted token is there
    compute(memory, holder, 16 - accepted)
    memory.release(holder, Outcome.FINISHED)
    assert full(memory).cached_evictable == 4
    assert_at_baseline(memory)


def test_scenario_23_draft_path_moves_the_allocated_length_in_the_same_call():
    memory = make(4, 7)
    kv_cache = memory.kv_cache
    first, second = holding(memory, 7, 7), holding(memory, 8, 8, tokens=OTHERS)
    leases = [first.lease, second.lease]
    assert kv_cache.lengths.grow(leases, [7 + 5, 8 + 5])
    assert [lengths(lease) for lease in leases] == [(0, 7, 12), (0, 8, 13)]
    assert [len(lease.own_pages()) for lease in leases] == [3, 4]
    assert (full(memory).held, full(memory).free) == (7, 0)
    assert not kv_cache.lengths.grow(leases, [12 + 1, 13 + 3]), "one page is short"
    assert [lengths(lease) for lease in leases] == [(0, 7, 12), (0, 8, 13)]
    memory.release(first, Outcome.FINISHED)
    assert (full(memory).held, full(memory).free) == (4, 2)
    memory.release(second, Outcome.RETRACTED)
    assert (full(memory).cached_evictable, full(memory).free) == (3, 4)
    assert_at_baseline(memory)


def test_scenario_25_reserve_shrinks_between_steps_and_takes_nothing_from_a_running_forward():
    """Forward N verifies five drafts; the plan of N+1 has one."""
    memory = make(4, 6)
    holder = start(memory, TOKENS, 20)
    compute(memory, holder, 8)
    assert memory.compute(holder, 6)
    assert memory.kv_cache.grow(holder.lease, 8 + 2)
    assert lengths(holder.lease) == (0, 14, 14)
    assert memory.compute(holder, 3)
    assert lengths(holder.lease) == (0, 17, 17)
    pages = holder.lease.pages()
    memory.end_forward()  # N: two drafts are accepted, while N+1 runs
    memory.kv_cache.lengths.trim(holder.lease, 11, memory.pending(holder))
    assert lengths(holder.lease) == (0, 11, 12)
    assert (full(memory).held, full(memory).quarantined, full(memory).free) == (3, 2, 1)
    assert memory.kv_cache.allocator.reclaim() == 0
    other = start(memory, OTHERS, 4, known=0)
    pull = memory.pull(other, 4)
    assert pull is not None
    memory.end(pull)
    assert memory.open(OTHERS, 4, known=0) is None
    memory.end_forward()  # N+1 read and wrote its own pages
    holder.written = 11
    assert memory.kv_cache.allocator.reclaim() == 2
    assert times_freed(memory.kv_cache, pages[3:]) == {1}
    memory.check()
    memory.release(other, Outcome.ABORTED)
    memory.release(holder, Outcome.FINISHED)
    assert full(memory).cached_evictable == 2
    assert_at_baseline(memory)


def test_scenario_22_promise_outlives_rejected_drafts():
    memory = make(4, 4)
    holder = start(memory, TOKENS, 16)
    compute(memory, holder, 7, 6)
    memory.kv_cache.lengths.trim(holder.lease, 10)
    other = memory.open(OTHERS, 4)
    assert other is None or not memory.kv_cache.grow(other.lease, 4)
    assert memory.kv_cache.grow(holder.lease, 16), "a promise was broken"
    memory.release(holder, Outcome.FINISHED)
    assert_at_baseline(memory)
