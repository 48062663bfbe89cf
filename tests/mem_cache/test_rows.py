"""Rows and page tables while forwards read them: scenarios 7 to 9."""

from __future__ import annotations

import numpy as np
import pytest

from kvrelay.mem_cache.errors import KVCacheError
from kvrelay.mem_cache.leases.rows import Rows
from kvrelay.mem_cache.release import Outcome, release_kv_cache
from tests.mem_cache.scenarios import (
    CACHED,
    OTHERS,
    TOKENS,
    assert_at_baseline,
    compute,
    end_all_forwards,
    full,
    generate,
    holding,
    lengths,
    make,
    start,
    times_freed,
)


def test_scenario_7_row_and_table_between_chunks_while_the_rows_are_full():
    memory = make(4, 24, rows=2)
    chunked = start(memory, TOKENS, 40)
    compute(memory, chunked, 16)
    table, row = chunked.lease.pages(), chunked.lease.row
    first = start(memory, OTHERS, 12)
    assert memory.open(OTHERS, 12) is None, "the rows are full"
    compute(memory, first, 12)
    other_row = first.lease.row
    memory.release(first, Outcome.FINISHED)
    second = start(memory, OTHERS[::-1], 12)
    assert second.lease.row == other_row != row
    compute(memory, second, 12)
    assert chunked.lease.row == row
    assert chunked.lease.pages().tolist() == table.tolist()
    compute(memory, chunked, 16, 8)
    assert chunked.lease.pages()[:4].tolist() == table.tolist()
    assert lengths(chunked.lease) == (0, 40, 40)
    memory.check()
    memory.release(chunked, Outcome.FINISHED)
    memory.release(second, Outcome.FINISHED)
    assert_at_baseline(memory)


@CACHED
def test_scenario_8_finished_in_result_n_while_forward_n_plus_1_reads(cached):
    memory = make(4, 9, rows=2, cached=cached)
    finished = start(memory, TOKENS, 12, known=0)
    generate(memory, finished, 8, 2, overlap=True)
    assert lengths(finished.lease) == (0, 10, 10)
    (running,) = memory.forwards
    table, row = running.tables[0].copy(), finished.lease.row
    memory.release(finished, Outcome.FINISHED)
    assert memory.open(OTHERS, 28) is None, "its pages are not to be had, nor to be evicted"
    admitted = start(memory, OTHERS, 24)
    pull = memory.pull(admitted, 24)
    assert pull is not None
    memory.end(pull)  # writes at once
    assert not set(admitted.lease.pages()) & set(table)
    assert admitted.lease.row != row
    assert memory.open(OTHERS, 0) is None, "its row is not to be had"
    np.testing.assert_array_equal(running.tables[0], table)
    assert full(memory).quarantined == (1 if cached else 3)
    assert full(memory).cached_protected == (2 if cached else 0)
    end_all_forwards(memory)  # checks what forward N+1 read
    later = start(memory, OTHERS, 12, known=0)
    assert later.lease.row == row
    memory.release(later, Outcome.ABORTED)
    memory.release(admitted, Outcome.FINISHED)
    assert_at_baseline(memory)


def test_scenario_9_aborted_chunk_holds_nothing_when_its_forward_ends():
    memory = make(4, 8, rows=1)
    chunked = start(memory, TOKENS, 24)
    compute(memory, chunked, 8)
    assert memory.compute(chunked, 8)
    own = chunked.lease.own_pages()
    memory.release(chunked, Outcome.ABORTED)
    assert (full(memory).held, full(memory).promised, full(memory).quarantined) == (0, 0, 4)
    assert memory.open(OTHERS, 4) is None, "the forward still uses the row"
    memory.end_forward()  # the result comes
    for late in (memory.kv_cache.commit, memory.kv_cache.grow, memory.kv_cache.lengths.trim):
        with pytest.raises(KVCacheError, match="RELEASED"):
            late(chunked.lease, 24)
    assert not release_kv_cache(memory.kv_cache, chunked.lease, Outcome.FINISHED)
    assert memory.kv_cache.allocator.reclaim() == 4
    assert times_freed(memory.kv_cache, own) == {1}
    assert full(memory).free == full(memory).total, "nothing of it was published"
    assert_at_baseline(memory)


def test_scenario_9_result_that_comes_late_publishes_nothing():
    memory = make(4, 8, rows=1)
    aborted = holding(memory, 8, 8)
    memory.release(aborted, Outcome.ABORTED)
    other = holding(memory, 8, 8, tokens=OTHERS)
    with pytest.raises(KVCacheError, match="RELEASED"):
        memory.kv_cache.sharing.publish(aborted.lease, aborted.ids(8))
    assert full(memory).held == 2
    memory.release(other, Outcome.ABORTED)
    assert_at_baseline(memory)


@pytest.mark.parametrize(("change", "value"), [
    pytest.param("set_allocated", 7, id="allocated-below-committed"),
    pytest.param("set_committed", 3, id="committed-below-protected"),
    pytest.param("set_committed", 13, id="committed-beyond-allocated"),
])  # fmt: skip
def test_rows_assert_the_order_of_lengths_at_every_change(change, value):
    rows = rows_of_lengths(4, 8, 12)
    with pytest.raises(AssertionError):
        getattr(rows, change)(0, value)
    assert (rows.protected[0], rows.committed[0], rows.allocated[0]) == (4, 8, 12)


@pytest.mark.parametrize("wrong", [7, 13])
def test_rows_raise_the_lengths_of_all_or_of_none(wrong):
    rows, both = rows_of_lengths(4, 8, 12), np.array([1, 0])
    assert rows.raise_committed(both, np.array([0, wrong])).tolist() == [1]
    rows.raise_allocated(both, np.array([16, 7]))
    assert rows.raise_committed(both, np.array([16, 12])).tolist() == []
    assert rows.committed.tolist() == [12, 16, 0]
    assert rows.allocated.tolist() == [12, 16, 0]


@pytest.mark.parametrize("tokens", [2, 12, -4])
def test_rows_protect_whole_pages_of_what_is_committed_alone(tokens):
    rows = rows_of_lengths(4, 8, 12)
    with pytest.raises(AssertionError):
        rows.protect(0, [np.array([3], np.int32)], tokens)
    assert rows.page_tables[0, 0].tolist() == [1, -1, -1, -1]


def test_nobody_else_can_write_into_the_arrays_of_rows():
    rows = rows_of_lengths(4, 8, 12)
    shown = {name: one for name, one in vars(rows).items() if name[0] != "_"}
    arrays = {name for name, one in shown.items() if isinstance(one, np.ndarray)}
    assert arrays == {
        "states", "committed", "allocated", "protected", "promised_tokens", "promised_pages",
        "frontiers", "page_tables",
    }  # fmt: skip
    for name in arrays:
        with pytest.raises(ValueError, match="read-only"):
            shown[name][..., 0] = 1


def rows_of_lengths(protected: int, committed: int, allocated: int) -> Rows:
    """Two rows of four pages of four tokens, of which the first has these lengths."""
    rows = Rows(1, 2, 4, 4)
    rows.set_allocated(0, allocated)
    rows.set_committed(0, committed)
    rows.protect(0, [np.array([1], np.int32)], protected)
    return rows
