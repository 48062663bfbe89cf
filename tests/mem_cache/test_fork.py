"""Choices of one request: they share the prompt's whole pages, and end in any order."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from kvrelay.mem_cache.errors import KVCacheError
from kvrelay.mem_cache.fence import StepFence
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager
from kvrelay.mem_cache.release import Outcome
from kvrelay.mem_cache.shape import PoolShape
from tests.known import known
from tests.mem_cache.memory import Holder, Memory
from tests.mem_cache.scenarios import (
    CACHED,
    OTHERS,
    TOKENS,
    assert_at_baseline,
    compute,
    end_all_forwards,
    full,
    lengths,
    make,
    publish,
    start,
    state,
    times_freed,
)


def unpromised(kv_cache: KVCacheManager, pool: int) -> int:
    """Pages that can be had, free or by eviction, without breaking a promise."""
    counts = kv_cache.audit.page_counts()[pool]
    return counts.free + counts.cached_evictable - counts.promised


def prompt_of(memory: Memory, length: int, promised: int) -> Holder:
    """A request that has computed its prompt and nothing else."""
    holder = start(memory, TOKENS, promised, known=0)
    while holder.lease.kv_committed_len < length:
        memory.slide(holder)
        compute(memory, holder, min(4, length - holder.lease.kv_committed_len))
    memory.slide(holder)
    return holder


@CACHED
@pytest.mark.parametrize(("page_size", "prompt", "shared", "copied"), [
    pytest.param(1, 6, 6, 0, id="p1"),
    pytest.param(4, 8, 2, 0, id="aligned"),
    pytest.param(4, 10, 2, 1, id="unaligned"),
    pytest.param(16, 10, 0, 1, id="within-a-page"),
])  # fmt: skip
def test_choices_share_whole_pages_and_copy_the_last(page_size, prompt, shared, copied, cached):
    memory = make(page_size, 60, cached=cached)
    first = prompt_of(memory, prompt, prompt + 6)
    table = first.lease.pages()
    children = memory.fork(first, 2, prompt + 6)
    assert children is not None
    protected = shared * page_size
    for one in (first, *children):
        assert lengths(one.lease) == (protected, prompt, prompt)
        assert one.lease.pages()[:shared].tolist() == table[:shared].tolist()
        assert len(one.lease.own_pages()) == copied
    copies = [copy for forward in memory.forwards for copy in forward.copies]
    targets = [(0, table[shared], child.lease.pages()[shared]) for child in children if copied]
    assert copies == targets
    assert full(memory).cached_protected == shared
    wanted = -(-(prompt + 6) // page_size) - shared - copied
    assert full(memory).promised == 3 * wanted
    if copies:
        memory.end_forward()
    for one in (first, *children):
        compute(memory, one, 3, 3)
    memory.check()
    for one in (first, *children):
        memory.release(one, Outcome.FINISHED)
    end_all_forwards(memory)
    if not cached:
        assert full(memory).free == full(memory).total, "nothing stays cached"
    assert_at_baseline(memory)


@CACHED
@pytest.mark.parametrize("order", [*permutations(range(3))], ids=str)
def test_choices_of_a_windowed_model_end_in_any_order(order, cached):
    """p=4, a window of 6: after 18 tokens the window's pages are the fourth to the fifth."""
    memory = make(4, 60, window=6, window_pages=60, ahead=8, cached=cached)
    first = prompt_of(memory, 18, 30)
    window = first.lease.pages(1)
    children = memory.fork(first, 2, 30)
    assert children is not None
    for child in children:
        assert child.lease.first_pages == first.lease.first_pages == (0, 2)
        assert child.lease.pages(1)[:4].tolist() == window[:4].tolist()
        assert child.lease.pages(1)[4] != window[4]
    assert {copy.pool for copy in memory.forwards[0].copies} == {0, 1}
    memory.end_forward()
    choices = [first, *children]
    for _ in range(3):
        for one in choices:
            memory.slide(one)
            compute(memory, one, 4)
        memory.check()
    for number in order:
        memory.release(choices[number], Outcome.ABORTED)
        memory.check()
    end_all_forwards(memory)
    if not cached:
        assert all(counts.free == counts.total for counts in memory.kv_cache.audit.page_counts())
    assert_at_baseline(memory)


@CACHED
@pytest.mark.parametrize("who", ["the first", "a child", "all"])
@pytest.mark.parametrize("outcome", [Outcome.ABORTED, Outcome.FINISHED])
def test_choice_ends_before_its_page_is_copied(who, outcome, cached):
    """The page that is read, and the one that is written, wait for the copying forward."""
    memory = make(4, 10, cached=cached)
    first = prompt_of(memory, 10, 12)
    children = memory.fork(first, 2, 12)
    assert children is not None
    ending = {"the first": [first], "a child": children[:1], "all": [first, *children]}[who]
    last = [one.lease.pages()[2] for one in ending]
    for one in ending:
        memory.release(one, outcome)
    assert full(memory).quarantined == len(ending)
    other = start(memory, OTHERS, 4 * full(memory).free, known=0)
    pull = memory.pull(other, 4 * full(memory).free)
    assert pull is not None
    memory.end(pull)
    assert not set(other.lease.own_pages()) & set(last)
    end_all_forwards(memory)
    assert times_freed(memory.kv_cache, last) == {1}
    for one in list(memory.holders):
        memory.check()
        memory.release(one, Outcome.FINISHED)
    if not cached:
        assert full(memory).free == full(memory).total, "nothing stays cached"
    assert_at_baseline(memory)


@CACHED
@pytest.mark.parametrize("short", ["rows", "pages", "window pages"])
def test_fork_refused_changes_nothing(short, cached):
    memory = make(
        4,
        11 if short == "pages" else 40,
        rows=2 if short == "rows" else 4,
        window=6,
        window_pages=6 if short == "window pages" else 40,
        ahead=4,
        cached=cached,
    )
    first = prompt_of(memory, 10, 20)
    before = state(memory, first)
    for _ in range(2):
        copied = StepFence(memory.steps, memory.steps.launched + 1)
        ids = first.ids(10)
        holders = ["second", "third"]
        forked = memory.kv_cache.sharing.fork(first.lease, holders, ids, 30, copied=copied)
        assert forked is None
        assert state(memory, first) == before
        memory.check()
    memory.release(first, Outcome.FINISHED)
    assert_at_baseline(memory)


@CACHED
def test_choice_forks_again(cached):
    memory = make(4, 40, rows=6, cached=cached)
    first = prompt_of(memory, 10, 24)
    [second] = known(memory.fork(first, 1, 24))
    memory.end_forward()
    compute(memory, second, 5)
    [third] = known(memory.fork(second, 1, 24))
    memory.end_forward()
    assert lengths(third.lease) == (12, 15, 15)
    assert third.lease.pages()[:3].tolist() == second.lease.pages()[:3].tolist()
    compute(memory, first, 6)
    compute(memory, third, 6)
    memory.release(second, Outcome.ABORTED)
    memory.check()
    compute(memory, third, 3)
    memory.release(first, Outcome.FINISHED)
    memory.release(third, Outcome.FINISHED)
    end_all_forwards(memory)
    if not cached:
        assert full(memory).free == full(memory).total, "nothing stays cached"
    assert_at_baseline(memory)


def test_fork_of_a_prompt_that_another_has_published():
    """Its own copies are duplicates; a peer reads them to the end."""
    memory = make(4, 12)
    other = prompt_of(memory, 8, 8)
    first = prompt_of(memory, 10, 12)
    publish(memory, other)
    memory.announce(first)
    own = first.lease.pages()
    [second] = known(memory.fork(first, 1, 12))
    assert first.lease.pages()[:2].tolist() == other.lease.pages().tolist()
    assert full(memory).quarantined == 2
    end_all_forwards(memory)
    assert full(memory).quarantined == 2
    memory.check()  # what the peer reads is right
    for one in (other, first, second):
        memory.release(one, Outcome.FINISHED)
    end_all_forwards(memory)
    assert times_freed(memory.kv_cache, own[:2]) == {1}
    assert_at_baseline(memory)


def test_fork_counts_the_duplicates_that_come_back_at_once():
    """What it locks of the index was others' promise, and its duplicates take that place."""
    memory = make(4, 9)
    other = prompt_of(memory, 8, 8)
    memory.release(other, Outcome.FINISHED)
    first = prompt_of(memory, 10, 12)
    waiting = start(memory, OTHERS, 20, known=0)
    assert unpromised(memory.kv_cache, 0) == 1
    assert memory.fork(first, 2, 12) is None
    children = memory.fork(first, 1, 12)
    assert children is not None
    assert memory.kv_cache.grow(waiting.lease, 20), "a promise was broken"
    end_all_forwards(memory)
    for one in (first, *children, waiting):
        memory.release(one, Outcome.ABORTED)
    end_all_forwards(memory)
    assert_at_baseline(memory)


def test_fork_of_what_it_cannot_be():
    memory = make(4, 20)
    first = prompt_of(memory, 10, 12)
    fence = StepFence(memory.steps, 1)
    with pytest.raises(KVCacheError, match="after 9 tokens"):
        memory.kv_cache.sharing.fork(first.lease, ["second"], first.ids(9), 12, copied=fence)
    with pytest.raises(KVCacheError, match="promise of 9 tokens"):
        memory.kv_cache.sharing.fork(first.lease, ["second"], first.ids(10), 9, copied=fence)
    memory.release(first, Outcome.ABORTED)
    with pytest.raises(KVCacheError, match="RELEASED"):
        memory.kv_cache.sharing.fork(first.lease, ["second"], first.ids(10), 12, copied=fence)
    assert_at_baseline(memory)


# What admission asks


def make_windowed() -> KVCacheManager:
    return KVCacheManager(
        [PoolShape("full", 20), PoolShape("window", 8, window=6)],
        page_size=4,
        total_rows=4,
        max_row_tokens=80,
        ahead=4,
    )


def test_most_pages_is_what_is_promised():
    kv_cache = make_windowed()
    assert [kv_cache.shape.most_pages(pool, 3) for pool in (0, 1)] == [1, 1]
    assert [kv_cache.shape.most_pages(pool, 80) for pool in (0, 1)] == [20, 4]
    lease = kv_cache.open("a", 60)
    assert lease is not None
    assert [counts.promised for counts in kv_cache.audit.page_counts()] == [15, 4]
    assert [unpromised(kv_cache, pool) for pool in (0, 1)] == [5, 4]


@pytest.mark.parametrize(("headroom", "opened"), [
    (None, True), ([0, 0], True), ([5, 4], True), ([6, 0], False), ([0, 5], False),
])  # fmt: skip
def test_open_leaves_pages_unpromised(headroom, opened):
    kv_cache = make_windowed()
    before = kv_cache.audit.counts()
    lease = kv_cache.open("a", 60, headroom=headroom)
    assert (lease is not None) is opened
    if not opened:
        assert kv_cache.audit.counts() == before


def test_open_without_its_prefix_if_that_leaves_too_little():
    memory = make(4, 40, window=16, window_pages=8, ahead=4)
    first = prompt_of(memory, 20, 20)
    memory.release(first, Outcome.FINISHED)
    ids = np.asarray(TOKENS[:20], np.int32)
    plain = memory.kv_cache.open("plain", 24, token_ids=ids)
    assert plain is not None
    assert plain.cache_protected_len == 20
    assert unpromised(memory.kv_cache, 1) == 3
    memory.kv_cache.leases.close_lease(plain)
    memory.kv_cache.leases.end_lease(plain, ())
    careful = memory.kv_cache.open("careful", 24, token_ids=ids, headroom=[0, 3])
    assert careful is not None
    memory.kv_cache.leases.close_lease(careful)
    memory.kv_cache.leases.end_lease(careful, ())
    assert memory.kv_cache.open("too careful", 24, token_ids=ids, headroom=[0, 8]) is None
    assert_at_baseline(memory)
