"""What a request holds is freed once, whatever its lengths are: scenarios 1 to 5 and 24."""

from __future__ import annotations

import numpy as np
import pytest

from kvrelay.mem_cache.errors import KVCacheError
from kvrelay.mem_cache.fence import StepClock, StepFence
from kvrelay.mem_cache.leases.lease import Lease
from kvrelay.mem_cache.release import Outcome, release_kv_cache
from tests.mem_cache.scenarios import (
    CACHED,
    TOKENS,
    assert_at_baseline,
    end_all_forwards,
    full,
    generate,
    holding,
    lengths,
    make,
    start,
    state,
    times_freed,
)


@CACHED
@pytest.mark.parametrize(("pages", "outputs", "overlap", "held"), [
    pytest.param(7, 3, True, 7, id="1"),
    pytest.param(7, 3, False, 6, id="1-plain"),
    pytest.param(16, 2, True, 6, id="2-overlap"),
    pytest.param(16, 2, False, 5, id="2-plain"),
])  # fmt: skip
def test_scenario_1_2_at_finish_every_slot_is_freed_once(pages, outputs, overlap, held, cached):
    memory = make(1, pages, cached=cached)
    holder = start(memory, TOKENS, 4 + outputs, known=0)
    generate(memory, holder, 4, outputs, overlap=overlap)
    assert lengths(holder.lease) == (0, held, held)
    own = holder.lease.own_pages()
    assert len(own) == held
    memory.release(holder, Outcome.FINISHED)
    # What the forwards wrote that have ended may be kept; the delayed one's slot waits for it.
    kept = memory.kv_cache.index.size(0)
    assert kept in ({held - overlap, 0} if pages == held else {cached * (held - overlap)})
    assert full(memory).quarantined == (held - kept if overlap else 0)
    end_all_forwards(memory)
    assert full(memory).free == pages - kept
    assert not release_kv_cache(memory.kv_cache, holder.lease, Outcome.FINISHED)
    assert times_freed(memory.kv_cache, own[kept:]) <= {1}
    assert_at_baseline(memory)


@pytest.mark.parametrize(("page_size", "lengths", "known", "outcome", "kept", "freed"), [
    pytest.param(4, (8, 14, 18), 14, Outcome.FINISHED, 3, 2, id="3-finished"),
    pytest.param(16, (48, 121, 121), 121, Outcome.ABORTED, 3, 5, id="3-unpublished"),
    pytest.param(16, (48, 48, 121), 48, Outcome.ABORTED, 3, 5, id="3-unpublished-uncommitted"),
    pytest.param(1, (0, 10, 11), 8, Outcome.FINISHED, 8, 3, id="4-p1"),
    pytest.param(4, (0, 10, 11), 8, Outcome.FINISHED, 2, 1, id="4-p4"),
    pytest.param(4, (0, 9, 10), 7, Outcome.FINISHED, 1, 2, id="4-p4-unaligned"),
    pytest.param(16, (0, 10, 11), 8, Outcome.FINISHED, 0, 1, id="4-p16"),
])  # fmt: skip
def test_scenario_3_4_release_keeps_and_frees(page_size, lengths, known, outcome, kept, freed):
    """`known`: tokens that the request's output has; a stop string cut off the rest."""
    protected, committed, allocated = lengths
    memory = make(page_size, 24)
    holder = holding(memory, committed, allocated, protected=protected)
    pages, before = holder.lease.pages(), full(memory).free
    holder.written = known
    memory.release(holder, outcome)
    assert full(memory).free - before == freed
    assert times_freed(memory.kv_cache, pages[kept:]) == {1}
    assert times_freed(memory.kv_cache, pages[:kept]) <= {0}
    again = start(memory, TOKENS, allocated)
    assert again.lease.cache_protected_len == kept * page_size
    assert again.lease.pages().tolist() == pages[:kept].tolist()
    memory.check()
    memory.release(again, Outcome.ABORTED)
    assert_at_baseline(memory)


@CACHED
@pytest.mark.parametrize("page_size", [1, 4])
def test_scenario_5_finish_in_a_mixed_batch_with_the_next_step_launched(page_size, cached):
    memory = make(page_size, 40, cached=cached)
    kv_cache, steps = memory.kv_cache, StepClock()

    def launch(*parts: tuple[Lease, int]) -> np.ndarray:
        """One forward for all of them; returns the page tables that it reads."""
        leases = [lease for lease, _ in parts]
        ends = [lease.kv_committed_len + count for lease, count in parts]
        assert kv_cache.lengths.grow(leases, ends)
        kv_cache.lengths.commit(leases, ends)
        steps.launch()
        return kv_cache.lengths.page_tables(leases)[0]

    decoding, chunked = kv_cache.open("decoding", 8), kv_cache.open("chunked", 12)
    assert decoding is not None
    assert chunked is not None
    launch((decoding, 4), (chunked, 4))
    steps.end()
    launch((decoding, 1), (chunked, 4))
    table = launch((decoding, 1), (chunked, 3))
    steps.end()
    assert lengths(decoding) == (0, 6, 6)
    own, seen, still = decoding.own_pages(), table.copy(), chunked.pages()
    fences = [StepFence(steps, steps.launched)]
    known = np.asarray(TOKENS[:5], np.int32)
    assert release_kv_cache(kv_cache, decoding, Outcome.FINISHED, token_ids=known, fences=fences)
    kept = 5 // page_size if cached else 0
    assert full(memory).quarantined == len(own) - kept
    assert kv_cache.allocator.reclaim() == 0
    assert full(memory).held == len(still)
    steps.end()
    assert kv_cache.allocator.reclaim() == len(own) - kept
    assert kv_cache.allocator.reclaim() == 0
    assert times_freed(kv_cache, own[kept:]) == {1}
    assert not release_kv_cache(kv_cache, decoding, Outcome.ABORTED, fences=fences)
    np.testing.assert_array_equal(table, seen)
    np.testing.assert_array_equal(chunked.pages(), still)
    assert lengths(chunked) == (0, 11, 11)
    release_kv_cache(kv_cache, chunked, Outcome.ABORTED)
    assert_at_baseline(memory)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_scenario_24_committed_length_never_exceeds_the_allocated_one(page_size):
    """Though the page may have room for it."""
    memory = make(page_size, 24 // page_size + 1)
    holder = holding(memory, 4, 5)
    before = state(memory, holder)
    with pytest.raises(KVCacheError, match="commit of 6 tokens"):
        memory.kv_cache.commit(holder.lease, 6)
    assert state(memory, holder) == before
    with pytest.raises(KVCacheError, match="commit of 6 tokens"):
        memory.kv_cache.lengths.commit([holder.lease, holder.lease], [5, 6])
    assert state(memory, holder) == before
    memory.release(holder, Outcome.ABORTED)
    assert_at_baseline(memory)
