"""Memory scenarios that broke other engines, each by its number, on the ledger alone.

After every one nobody has anything but what the index may let go of, and every
page and row can be had again. Where contents matter, `tests.mem_cache.memory`
checks what is read. `p` page size, `L` prompt tokens, `C` committed, `A`
allocated, `P` protected length.

| no. | what went wrong elsewhere | shown by |
| --- | --- | --- |
| 1 | p=1, L=4, 3 new tokens, overlap, a pool of 7: the delayed step's slot | at_finish |
| 2 | L=4, two outputs: C=A is 6 with overlap, 5 without | at_finish |
| 3 | what a release keeps, what it frees, and that nothing leaks unpublished | release |
| 4 | a stop string matches two tokens before the last committed one | release |
| 5 | the extra slot of the next step, in a batch of chunks and decodes | mixed_batch |
| 6 | end of sequence with a window: the last slot is released too | with_a_window |
| 7 | a chunked request keeps its row and table while others come and go | between_chunks |
| 8 | pages and row of a finished request that forward N+1 still reads | finished_in_result_n |
| 9 | a chunked prefill is aborted, its forward ends later | aborted_chunk; tests/engine |
| 10 | drain while a finished prefill is not merged yet | tests/engine/test_scenarios.py |
| 11 | a session's first turn: P is 8, not 14 | first_turn |
| 12 | another publishes the same tokens between two chunks | duplicates |
| 13-16 | what a resumed session frees of its tail | session_tail |
| 17 | admission refuses twice after a restore | refused_twice |
| 18 | a first turn, a later turn is aborted | turn_is_aborted |
| 19 | a second turn is cancelled while the first runs | cancelled_before_it_starts |
| 20 | a session is closed while its turn decodes | closed_while_its_turn |
| 21 | a lent session is counted once | counted_once |
| 22 | rejected drafts on a page boundary | rejected_drafts |
| 23 | a draft path grows a request: A moves in the same call | draft_path |
| 24 | C never exceeds A | exceeds |
| 25 | the reserve shrinks under a forward in flight | reserve_shrinks |
| 26 | a budget without the page of margin | page_of_margin |
| 27 | a deferred chunk moves on | deferred_chunk |
| 28 | one pool grants, the other refuses | window_pool_refuses |
| 29 | a page is reused after it left a window | reused_after |
| 30 | the frontier never empties a leaf | empties_a_leaf |
| 36 | nothing travels but the first token | tests/engine/test_roles.py (both_indexes) |
| 37 | the index changes after a request was planned | index_changes |
| 46 | no token is sampled from a chunk but the last | tests/engine/test_scenarios.py |
| 49 | a duplicate that a peer, or a forward, still reads | still_reads |
| 50 | eviction of what a forward still reads or writes | never_evicted |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from kvrelay.mem_cache.account import Owner
from kvrelay.mem_cache.errors import LedgerError
from kvrelay.mem_cache.fence import StepClock, StepFence
from kvrelay.mem_cache.lease import Lease, LeaseState
from kvrelay.mem_cache.ledger import Ledger, PoolCounts, PoolShape
from kvrelay.mem_cache.release import Outcome, release_kv_cache
from kvrelay.mem_cache.session import Sessions
from tests.mem_cache.memory import Holder, Memory

TOKENS = list(range(1, 161))
OTHERS = [token + 1000 for token in TOKENS]

OVERLAP = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "plain"])
CACHED = pytest.mark.parametrize("cached", [True, False], ids=["radix", "none"])


def make(
    page_size: int,
    pages: int,
    *,
    rows: int = 4,
    window: int | None = None,
    window_pages: int = 0,
    ahead: int = 64,
    cached: bool = True,
) -> Memory:
    pools = [PoolShape("full", pages)]
    if window is not None:
        pools.append(PoolShape("window", window_pages, window))
    return Memory(pools, page_size, rows, pages * page_size, cached=cached, ahead=ahead)


def start(memory: Memory, tokens: Sequence[int], promised: int, known: int = -1) -> Holder:
    holder = memory.open(list(tokens), promised, known=known)
    assert holder is not None
    return holder


def compute(memory: Memory, holder: Holder, *counts: int) -> None:
    """One forward after the other, each to its end."""
    for count in counts:
        assert memory.compute(holder, count)
        memory.settle()


def generate(memory: Memory, holder: Holder, prompt: int, outputs: int, *, overlap: bool) -> None:
    """Forwards until the result is read that has the last output.

    With overlap each forward is launched before the result of the one before is read.
    """
    assert memory.compute(holder, prompt)
    for number in range(outputs):
        if overlap or number:
            assert memory.compute(holder, 1)
        memory.settle()
        memory.slide(holder)


def holding(
    memory: Memory, committed: int, allocated: int, *, protected: int = 0, tokens=TOKENS
) -> Holder:
    """A request of these lengths; nothing of it is in flight."""
    holder = start(memory, tokens, allocated)
    if protected:
        compute(memory, holder, protected)
        publish(memory, holder)
    if committed > protected:
        compute(memory, holder, committed - protected)
    assert memory.ledger.grow(holder.lease, allocated)
    assert lengths(holder.lease) == (protected, committed, allocated)
    return holder


def publish(memory: Memory, holder: Holder) -> None:
    """What has settled; only what still runs fences its duplicates."""
    memory.ledger.publish(holder.lease, holder.ids(holder.settled), memory.pending(holder))


def settle_all(memory: Memory) -> None:
    while memory.forwards:
        memory.settle()
    memory.reclaim()


def lengths(lease: Lease) -> tuple[int, int, int]:
    return (lease.cache_protected_len, lease.kv_committed_len, lease.kv_allocated_len)


def state(memory: Memory, holder: Holder) -> object:
    """All that a refusal might have changed."""
    lease = holder.lease
    pools = range(len(memory.ledger.pools))
    tables = [lease.pages(pool).tolist() for pool in pools]
    return (lengths(lease), lease.row, lease.state, tables, memory.ledger.counts())


def full(memory: Memory) -> PoolCounts:
    return memory.ledger.page_counts()[0]


def times_freed(ledger: Ledger, pages: Iterable[int], pool: int = 0) -> set[int]:
    """How often these pages became free; by the history of the account."""
    return {ledger.history(pool, int(page)).count("to FREE") for page in pages}


def assert_at_baseline(memory: Memory) -> None:
    """Everything has ended: nobody has anything, and all of it can be had again."""
    ledger = memory.ledger
    assert not [*memory.forwards, *memory.others, *memory.holders, *memory.saved]
    memory.check()
    for counts in ledger.page_counts():
        assert counts.free + counts.cached_evictable == counts.total
        assert counts.promised == 0
    assert ledger.row_counts().free == ledger.total_rows
    all_of_it = ledger.open("all of it", ledger.max_lease_tokens)
    assert all_of_it is not None
    if not any(ledger.windowed):
        assert ledger.grow(all_of_it, ledger.max_lease_tokens)
    release_kv_cache(ledger, all_of_it, Outcome.ABORTED)
    ledger.audit_pages()


# Lengths


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
    kept = memory.ledger.index.size(0)
    assert kept in ({held - overlap, 0} if pages == held else {cached * (held - overlap)})
    assert full(memory).quarantined == (held - kept if overlap else 0)
    settle_all(memory)
    assert full(memory).free == pages - kept
    assert not release_kv_cache(memory.ledger, holder.lease, Outcome.FINISHED)
    assert times_freed(memory.ledger, own[kept:]) <= {1}
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
    holder.settled = known
    memory.release(holder, outcome)
    assert full(memory).free - before == freed
    assert times_freed(memory.ledger, pages[kept:]) == {1}
    assert times_freed(memory.ledger, pages[:kept]) <= {0}
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
    ledger, steps = memory.ledger, StepClock()

    def launch(*parts: tuple[Lease, int]) -> np.ndarray:
        """One forward for all of them; returns the page tables that it reads."""
        leases = [lease for lease, _ in parts]
        ends = [lease.kv_committed_len + count for lease, count in parts]
        assert ledger.grow_all(leases, ends)
        ledger.commit_all(leases, ends)
        steps.launch()
        return ledger.page_tables(leases)[0]

    decoding, chunked = ledger.open("decoding", 8), ledger.open("chunked", 12)
    assert decoding is not None
    assert chunked is not None
    launch((decoding, 4), (chunked, 4))
    steps.settle()
    launch((decoding, 1), (chunked, 4))
    table = launch((decoding, 1), (chunked, 3))
    steps.settle()
    assert lengths(decoding) == (0, 6, 6)
    own, seen, still = decoding.own_pages(), table.copy(), chunked.pages()
    fences = [StepFence(steps, steps.launched)]
    known = np.asarray(TOKENS[:5], np.int32)
    assert release_kv_cache(ledger, decoding, Outcome.FINISHED, token_ids=known, fences=fences)
    kept = 5 // page_size if cached else 0
    assert full(memory).quarantined == len(own) - kept
    assert ledger.reclaim() == 0
    assert full(memory).held == len(still)
    steps.settle()
    assert ledger.reclaim() == len(own) - kept
    assert ledger.reclaim() == 0
    assert times_freed(ledger, own[kept:]) == {1}
    assert not release_kv_cache(ledger, decoding, Outcome.ABORTED, fences=fences)
    np.testing.assert_array_equal(table, seen)
    np.testing.assert_array_equal(chunked.pages(), still)
    assert lengths(chunked) == (0, 11, 11)
    release_kv_cache(ledger, chunked, Outcome.ABORTED)
    assert_at_baseline(memory)


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
    (before,) = times_freed(memory.ledger, last[1], 1)  # the window has used it before
    memory.release(holder, Outcome.FINISHED)
    settle_all(memory)
    kept = [8, 3] if cached else [0, 0]
    for pool, counts in enumerate(memory.ledger.page_counts()):
        assert counts.cached_evictable == kept[pool]
        assert counts.free == counts.total - kept[pool]
    if overlap or not cached:
        assert times_freed(memory.ledger, last[0], 0) == {1}
        assert times_freed(memory.ledger, last[1], 1) == {before + 1}
    assert_at_baseline(memory)


# Rows and page tables in flight


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
    settle_all(memory)  # checks what forward N+1 read
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
    memory.settle()  # the result comes
    for late in (memory.ledger.commit, memory.ledger.grow, memory.ledger.trim):
        with pytest.raises(LedgerError, match="RELEASED"):
            late(chunked.lease, 24)
    assert not release_kv_cache(memory.ledger, chunked.lease, Outcome.FINISHED)
    assert memory.ledger.reclaim() == 4
    assert times_freed(memory.ledger, own) == {1}
    assert full(memory).free == full(memory).total, "nothing of it was published"
    assert_at_baseline(memory)


# Protected length


@pytest.mark.parametrize(("allocated", "tail"), [
    pytest.param(14, 2, id="11-A14"), pytest.param(21, 4, id="11-A21"),
])  # fmt: skip
def test_scenario_11_first_turn_protects_what_it_published_not_what_it_committed(allocated, tail):
    """A prompt of 10 and 5 outputs: the third page, [8, 12), is the session's."""
    memory = make(4, 8)
    holder = start(memory, TOKENS, allocated)
    compute(memory, holder, 10)
    publish(memory, holder)
    compute(memory, holder, 1, 1, 1, 1)
    assert memory.ledger.grow(holder.lease, allocated)
    assert lengths(holder.lease) == (8, 14, allocated)
    memory.save(holder)
    assert lengths(holder.lease) == (8, 14, allocated)
    assert (full(memory).session, full(memory).cached_protected) == (tail, 2)
    pages = holder.lease.pages()
    memory.release(holder, Outcome.ABORTED)
    assert times_freed(memory.ledger, pages[2:]) == {1}
    assert (full(memory).free, full(memory).cached_evictable) == (6, 2)
    assert_at_baseline(memory)


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
    assert memory.ledger.index.size(0) == indexed
    publish(memory, first)
    assert lengths(first.lease) == (protected, 50, 50)
    assert full(memory).free - before.free == duplicates
    assert times_freed(memory.ledger, mine[:duplicates]) == {1}
    assert first.lease.own_pages().tolist() == mine[duplicates:].tolist()
    publish(memory, first)  # there is nothing new to publish
    assert full(memory).free - before.free == duplicates
    compute(memory, first, 50)
    mine, before = first.lease.pages(), full(memory)
    publish(memory, first)
    assert first.lease.cache_protected_len == 100 // page_size * page_size
    assert full(memory).free - before.free == later
    assert memory.ledger.index.size(0) == indexed + taken
    assert memory.ledger.cache_counts.duplicate_pages == duplicates + later
    memory.check()
    memory.release(first, Outcome.FINISHED)
    memory.release(second, Outcome.FINISHED)
    assert_at_baseline(memory)


# Sessions


@pytest.mark.parametrize(("page_size", "committed", "allocated", "prefix", "left", "freed"), [
    pytest.param(1, 40, 48, 39, 39, 9, id="13"),
    pytest.param(16, 40, 48, 39, 48, 0, id="14-p16"),
    pytest.param(16, 40, 56, 39, 48, 1, id="14-p16-A56"),
    pytest.param(256, 40, 48, 39, 48, 0, id="14-p256"),
    pytest.param(4, 18, 20, 13, 16, 1, id="15"),
    pytest.param(1, 40, 44, 26 + 12, 38, 6, id="16"),
])  # fmt: skip
def test_scenario_13_to_16_resuming_frees_the_whole_pages_of_the_session_tail(
    page_size, committed, allocated, prefix, left, freed
):
    """`left`: A afterwards; C is the prefix."""
    memory = make(page_size, 64 // page_size + 4)
    holder = holding(memory, committed, allocated)
    memory.save(holder)
    pages, before = holder.lease.pages(), full(memory).free
    kept = len(pages) - freed
    assert memory.borrow(holder, prefix, prefix)
    assert lengths(holder.lease) == (0, prefix, left)
    assert full(memory).free - before == freed
    assert times_freed(memory.ledger, pages[kept:]) == ({1} if freed else set())
    assert holder.lease.pages().tolist() == pages[:kept].tolist()
    memory.check()  # every token of the prefix is there
    compute(memory, holder, 3)
    memory.save(holder)
    memory.release(holder, Outcome.FINISHED)
    assert_at_baseline(memory)


@pytest.mark.parametrize("refused_by", ["memory", "the step"])
def test_scenario_17_admission_refused_twice_after_a_restore(refused_by):
    memory = make(4, 12)
    holder = holding(memory, 20, 24)
    memory.save(holder)
    promised = 40 if refused_by == "memory" else 24
    in_the_way = start(memory, OTHERS, 24)
    states = []
    for _ in range(2):
        if refused_by == "memory":
            assert not memory.borrow(holder, 18, promised)
        else:
            assert memory.borrow(holder, 18, promised)
            memory.save(holder)
        states.append(state(memory, holder))
    assert states[0] == states[1]
    assert lengths(holder.lease) == ((0, 20, 24) if refused_by == "memory" else (0, 18, 20))
    memory.release(in_the_way, Outcome.ABORTED)
    before = holder.lease.pages()
    assert memory.borrow(holder, 18, promised)
    assert lengths(holder.lease) == (0, 18, 20)
    assert holder.lease.pages().tolist() == before[:5].tolist()
    assert full(memory).promised == (promised - 20) // 4
    compute(memory, holder, promised - 18)
    memory.save(holder)
    memory.release(holder, Outcome.FINISHED)
    assert_at_baseline(memory)


@pytest.mark.parametrize("page_size", [1, 5])
@pytest.mark.parametrize("later", [False, True], ids=["18-first", "18-later"])
def test_scenario_18_turn_is_aborted_and_all_that_it_held_comes_back(later, page_size):
    """A first turn of A=20; a later one of A=65 that began with a session of A=50."""
    memory = make(page_size, 80 // page_size, rows=2)
    ledger, sessions = memory.ledger, Sessions(memory.ledger)
    tokens, held = (50, 65) if later else (20, 20)
    lease = ledger.open("turn", tokens)
    assert lease is not None
    assert ledger.grow(lease, tokens)
    if later:
        ledger.commit(lease, 50)
        sessions.save("s", lease)
        assert full(memory).session == 50 // page_size
        assert sessions.borrow("s", "turn'", 50, 65) is lease
        assert ledger.grow(lease, 65)
    assert full(memory).held == held // page_size
    assert release_kv_cache(ledger, lease, Outcome.ABORTED)
    assert full(memory).free == full(memory).total
    assert (ledger.row_counts().free, ledger.row_counts().total) == (2, 2)
    if later:
        # Its tokens are the router's; the next turn computes those of the last good one again.
        sessions.forget("s")
        assert "s" not in sessions
        again = ledger.open("again", 65)
        assert again is not None
        sessions.save("s", again)
        sessions.close("s")
    assert_at_baseline(memory)


def test_scenario_19_second_turn_cancelled_before_it_starts_leaves_the_first_alone():
    memory = make(4, 12)
    sessions = Sessions(memory.ledger)
    first = holding(memory, 10, 12)
    sessions.save("s", first.lease)
    assert sessions.borrow("s", "first", 10, 20) is first.lease
    assert memory.compute(first, 4)
    before = state(memory, first)
    with pytest.raises(LedgerError, match="lent to a turn"):
        sessions.borrow("s", "second", 10, 20)
    with pytest.raises(LedgerError, match="Lease"):
        memory.ledger.borrow(first.lease, "second", 10, 20)
    assert state(memory, first) == before
    memory.settle()
    compute(memory, first, 2)
    sessions.save("s", first.lease, memory.readers(first))
    assert lengths(first.lease) == (0, 16, 16)
    assert sessions.borrow("s", "third", 16, 20) is first.lease
    compute(memory, first, 4)
    sessions.save("s", first.lease)
    memory.holders.remove(first)
    sessions.close("s")
    assert_at_baseline(memory)


@pytest.mark.parametrize("ends", ["saved", "rolled back", "aborted"])
def test_scenario_20_session_closed_while_its_turn_decodes_is_released_once_after_it(ends):
    memory = make(4, 12)
    sessions = Sessions(memory.ledger)
    turn = holding(memory, 10, 12)
    sessions.save("s", turn.lease)
    assert sessions.borrow("s", "turn", 10, 24) is turn.lease
    generate(memory, turn, 2, 2, overlap=True)
    pages = turn.lease.pages()
    assert lengths(turn.lease) == (0, 14, 14)
    sessions.close("s")
    assert turn.lease.state is LeaseState.OPEN
    assert (full(memory).held, full(memory).session) == (4, 0)
    memory.holders.remove(turn)
    fences = memory.readers(turn)
    if ends == "saved":
        sessions.save("s", turn.lease, fences)
    elif ends == "rolled back":
        sessions.roll_back("s", fences)
    else:
        sessions.forget("s", fences)
    assert "s" not in sessions
    assert turn.lease.state is LeaseState.RELEASED
    assert (full(memory).session, full(memory).quarantined) == (0, 4)
    settle_all(memory)
    assert times_freed(memory.ledger, pages) == {1}
    assert not release_kv_cache(memory.ledger, turn.lease, Outcome.FINISHED)
    with pytest.raises(LedgerError, match="not known"):
        sessions.close("s")
    assert_at_baseline(memory)


def test_scenario_21_lent_session_is_counted_once_while_its_turn_runs():
    memory = make(4, 12)
    sessions = Sessions(memory.ledger)
    holder = holding(memory, 14, 18, protected=8)
    sessions.save("s", holder.lease)

    def account() -> tuple[int, ...]:
        memory.ledger.audit_pages()
        pages, rows = memory.ledger.counts()
        return (pages.held, pages.session, pages.cached_protected, rows.held, rows.session)

    assert account() == (0, 3, 2, 0, 1)
    assert sessions.borrow("s", "turn", 14, 24) is holder.lease
    assert account() == (2, 0, 2, 1, 0)
    generate(memory, holder, 3, 1, overlap=True)
    assert account() == (3, 0, 2, 1, 0)
    assert len(sessions) == 1
    memory.holders.remove(holder)
    sessions.save("s", holder.lease, memory.readers(holder))
    assert account() == (0, 3, 2, 0, 1)
    sessions.close("s")
    assert account() == (0, 0, 2, 0, 0)
    settle_all(memory)
    assert_at_baseline(memory)


def idle_sessions(*names: str) -> tuple[Memory, Sessions, list[float]]:
    """Sessions of two pages each, saved at seconds 0, 1 and so on, and nothing free."""
    memory = make(4, 2 * len(names))
    now = [0.0]
    sessions = Sessions(memory.ledger, lambda: now[0])
    for name in names:
        holder = holding(memory, 8, 8)
        memory.holders.remove(holder)
        sessions.save(name, holder.lease)
        now[0] += 1
    return memory, sessions, now


def test_the_session_that_was_idle_for_longest_makes_room_never_one_that_is_lent():
    memory, sessions, _ = idle_sessions("first", "second", "third")
    turn = sessions.borrow("first", "turn", 8, 8)
    assert turn is not None
    assert memory.ledger.open("refused", 8) is None
    assert sessions.evict_oldest() == "second"
    assert full(memory).free == 2
    sessions.save("first", turn)
    assert [sessions.evict_oldest() for _ in range(3)] == ["third", "first", None]
    assert_at_baseline(memory)


def test_sessions_expire_when_they_have_been_idle_for_so_long_but_not_while_they_are_lent():
    memory, sessions, now = idle_sessions("first", "second", "third")
    turn = sessions.borrow("first", "turn", 8, 8)
    assert turn is not None
    now[0] = 11
    assert sessions.expire(11) == []
    assert sessions.expire(10) == ["second"]
    sessions.save("first", turn)
    assert sessions.expire(1) == ["third"]
    assert "first" in sessions
    now[0] += 1
    assert sessions.expire(1) == ["first"]
    assert_at_baseline(memory)


# Speculation


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
    memory.ledger.trim(holder.lease, accepted)
    holder.settled = accepted
    holder.tokens[accepted:] = TOKENS[accepted:]
    kept = -(-accepted // 4)
    assert holder.lease.kv_committed_len == accepted
    assert holder.lease.pages().tolist() == pages[:kept].tolist()
    assert times_freed(memory.ledger, pages[kept:]) == ({1} if freed else set())
    assert full(memory).free == 4 - kept
    assert len(pages) - kept == freed
    memory.check()  # every accepted token is there
    compute(memory, holder, 16 - accepted)
    memory.release(holder, Outcome.FINISHED)
    assert full(memory).cached_evictable == 4
    assert_at_baseline(memory)


def test_scenario_23_draft_path_moves_the_allocated_length_in_the_same_call():
    memory = make(4, 7)
    ledger = memory.ledger
    first, second = holding(memory, 7, 7), holding(memory, 8, 8, tokens=OTHERS)
    leases = [first.lease, second.lease]
    assert ledger.grow_all(leases, [7 + 5, 8 + 5])
    assert [lengths(lease) for lease in leases] == [(0, 7, 12), (0, 8, 13)]
    assert [len(lease.own_pages()) for lease in leases] == [3, 4]
    assert (full(memory).held, full(memory).free) == (7, 0)
    assert not ledger.grow_all(leases, [12 + 1, 13 + 3]), "one page is short"
    assert [lengths(lease) for lease in leases] == [(0, 7, 12), (0, 8, 13)]
    memory.release(first, Outcome.FINISHED)
    assert (full(memory).held, full(memory).free) == (4, 2)
    memory.release(second, Outcome.RETRACTED)
    assert (full(memory).cached_evictable, full(memory).free) == (3, 4)
    assert_at_baseline(memory)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_scenario_24_committed_length_never_exceeds_the_allocated_one(page_size):
    """Though the page may have room for it."""
    memory = make(page_size, 24 // page_size + 1)
    holder = holding(memory, 4, 5)
    before = state(memory, holder)
    with pytest.raises(LedgerError, match="commit of 6 tokens"):
        memory.ledger.commit(holder.lease, 6)
    assert state(memory, holder) == before
    with pytest.raises(LedgerError, match="commit of 6 tokens"):
        memory.ledger.commit_all([holder.lease, holder.lease], [5, 6])
    assert state(memory, holder) == before
    memory.release(holder, Outcome.ABORTED)
    assert_at_baseline(memory)


def test_scenario_25_reserve_shrinks_between_steps_and_takes_nothing_from_a_running_forward():
    """Forward N verifies five drafts; the plan of N+1 has one."""
    memory = make(4, 6)
    holder = start(memory, TOKENS, 20)
    compute(memory, holder, 8)
    assert memory.compute(holder, 6)
    assert memory.ledger.grow(holder.lease, 8 + 2)
    assert lengths(holder.lease) == (0, 14, 14)
    assert memory.compute(holder, 3)
    assert lengths(holder.lease) == (0, 17, 17)
    pages = holder.lease.pages()
    memory.settle()  # N: two drafts are accepted, while N+1 runs
    memory.ledger.trim(holder.lease, 11, memory.pending(holder))
    assert lengths(holder.lease) == (0, 11, 12)
    assert (full(memory).held, full(memory).quarantined, full(memory).free) == (3, 2, 1)
    assert memory.ledger.reclaim() == 0
    other = start(memory, OTHERS, 4, known=0)
    pull = memory.pull(other, 4)
    assert pull is not None
    memory.end(pull)
    assert memory.open(OTHERS, 4, known=0) is None
    memory.settle()  # N+1 read and wrote its own pages
    holder.settled = 11
    assert memory.ledger.reclaim() == 2
    assert times_freed(memory.ledger, pages[3:]) == {1}
    memory.check()
    memory.release(other, Outcome.ABORTED)
    memory.release(holder, Outcome.FINISHED)
    assert full(memory).cached_evictable == 2
    assert_at_baseline(memory)


# Sliding window: p=4, a window of 8 tokens and 4 ahead make 4 pages at the same time


def test_scenario_26_budget_without_the_page_of_margin_is_refused():
    memory = make(4, 40, window=8, window_pages=7, ahead=4)
    first = start(memory, TOKENS, 40)
    before = memory.ledger.counts()
    assert before[1].free - before[1].promised == (8 + 4) // 4
    assert memory.open(OTHERS, 40) is None
    assert memory.ledger.counts() == before
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
    assert alone.ledger.max_lease_tokens == 12, "what needs no fourth page fits"
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
        settle_all(memory)
        memory.check()
        if running in memory.holders and running.settled == 24:
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
    before = memory.ledger.counts()
    assert memory.open(OTHERS, 40) is None
    assert memory.ledger.counts() == before
    second = start(memory, OTHERS, 4)
    compute(memory, second, 4)
    unchanged = state(memory, second)
    assert not memory.compute(second, 4)
    assert not memory.ledger.grow_all([first.lease, second.lease], [4, 8])
    assert lengths(first.lease) == (0, 0, 0)
    assert state(memory, second) == unchanged
    assert [counts.held for counts in memory.ledger.page_counts()] == [1, 1]
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
    assert times_freed(memory.ledger, left, 1) == {1}
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
    assert [memory.ledger.index.size(pool) for pool in (0, 1)] == [4, 3]
    memory.release(first, Outcome.FINISHED)
    third = start(memory, OTHERS[::-1], 12)
    compute(memory, third, 12)
    assert [memory.ledger.index.size(pool) for pool in (0, 1)] == [0, 0]
    assert times_freed(memory.ledger, reused, 1) == {1}
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
    evictable = [counts.cached_evictable for counts in memory.ledger.page_counts()]
    assert evictable == [2, 1]
    second = start(memory, TOKENS, 151)
    assert second.lease.cache_protected_len == 128
    assert second.lease.pages(1).tolist() == [-1, kept]
    compute(memory, second, 23)  # reads the window's tokens from 113 on
    memory.release(second, Outcome.FINISHED)
    assert_at_baseline(memory)


# The index, while others use what is in it


@pytest.mark.parametrize("change", ["37-longer", "37-split", "37-pressure"])
def test_scenario_37_protected_length_stays_when_the_index_changes_after_planning(change):
    memory = make(4, 12)
    earlier = holding(memory, 8, 8)
    memory.release(earlier, Outcome.FINISHED)
    in_the_way, before = start(memory, OTHERS, 8 * 4), memory.ledger.counts()
    assert memory.open(TOKENS, 6 * 4) is None, "planned, and refused"
    assert memory.ledger.counts() == before
    memory.release(in_the_way, Outcome.ABORTED)
    planned = start(memory, TOKENS, 16)
    assert lengths(planned.lease) == (8, 8, 8)
    table = planned.lease.pages()
    if change == "37-pressure":
        other = start(memory, OTHERS, 8 * 4)
        assert memory.ledger.grow(other.lease, 8 * 4)
        assert not memory.ledger.grow(other.lease, 9 * 4), "what is locked is not evicted"
    else:
        shared = 16 if change == "37-longer" else 4
        other = start(memory, TOKENS[:shared] + OTHERS, 16)
        compute(memory, other, 16 - other.lease.kv_committed_len)
        publish(memory, other)
        assert memory.ledger.index.size(0) == (4 if change == "37-longer" else 2 + 3)
    assert lengths(planned.lease) == (8, 8, 8)
    assert planned.lease.pages().tolist() == table.tolist()
    compute(memory, planned, 8)
    assert planned.lease.pages()[:2].tolist() == table.tolist()
    before = memory.ledger.cache_counts.duplicate_pages
    memory.release(planned, Outcome.FINISHED)
    assert full(memory).cached_protected == (0 if change == "37-pressure" else 4), "the other's"
    duplicates = memory.ledger.cache_counts.duplicate_pages - before
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
    assert memory.ledger.owner_map(0)[10] == (Owner.QUARANTINE, first.lease.holder)
    assert memory.ledger.reclaim() == 0
    third = start(memory, OTHERS, 72)
    pull = memory.pull(third, 72)
    assert pull is not None
    memory.end(pull)
    assert third.lease.own_pages().tolist() == list(range(24, 42))
    assert memory.open(OTHERS, 4, known=0) is None
    memory.check()  # what the peer reads is right
    memory.release(first, Outcome.HANDED_OVER)  # ends its stream
    assert memory.ledger.reclaim() == 12
    assert times_freed(memory.ledger, range(12)) == {1}
    fourth = start(memory, OTHERS, 48, known=0)
    assert memory.ledger.grow(fourth.lease, 48)
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
    settle_all(memory)  # checks what the forward read
    assert times_freed(memory.ledger, own) == {1}
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
        memory.ledger.audit_pages()
    else:
        memory.release(first, Outcome.FINISHED)
    assert memory.ledger.grow(other.lease, 20), "a promise was broken"
    for holder in list(memory.holders):
        memory.release(holder, Outcome.ABORTED)
    settle_all(memory)
    assert_at_baseline(memory)


@pytest.mark.parametrize("use", ["50-reads", "50-writes"])
def test_scenario_50_what_a_running_forward_uses_is_never_evicted(use):
    """Another request wants every page that can be had, and writes to it at once."""
    memory = make(4, 6)
    ledger = memory.ledger
    first = start(memory, TOKENS, 12)
    if use == "50-reads":
        compute(memory, first, 8)
    else:
        assert memory.compute(first, 8)
        ledger.publish(first.lease, first.ids(8), memory.pending(first))  # too early
    assert memory.compute(first, 1)
    memory.release(first, Outcome.FINISHED)
    counts = full(memory)
    assert (counts.cached_protected, counts.cached_evictable, counts.quarantined) == (2, 0, 1)
    assert memory.open(OTHERS, 16, known=0) is None
    other = start(memory, OTHERS, 12, known=0)
    pull = memory.pull(other, 12)
    assert pull is not None
    memory.end(pull)
    assert not ledger.grow(other.lease, 16)
    assert ledger.cache_counts.evicted_pages == 0
    while memory.forwards:
        memory.settle()  # checks what it read
    assert not ledger.grow(other.lease, 16), "nobody has looked at the fences yet"
    assert ledger.reclaim() == 1
    assert ledger.grow(other.lease, 24)
    assert ledger.cache_counts.evicted_pages == 2
    memory.check()
    memory.release(other, Outcome.ABORTED)
    assert_at_baseline(memory)


# What these scenarios have found here


def test_scenario_22_promise_outlives_rejected_drafts():
    memory = make(4, 4)
    holder = start(memory, TOKENS, 16)
    compute(memory, holder, 7, 6)
    memory.ledger.trim(holder.lease, 10)
    other = memory.open(OTHERS, 4)
    assert other is None or not memory.ledger.grow(other.lease, 4)
    assert memory.ledger.grow(holder.lease, 16), "a promise was broken"
    memory.release(holder, Outcome.FINISHED)
    assert_at_baseline(memory)


def test_scenario_9_result_that_comes_late_publishes_nothing():
    memory = make(4, 8, rows=1)
    aborted = holding(memory, 8, 8)
    memory.release(aborted, Outcome.ABORTED)
    other = holding(memory, 8, 8, tokens=OTHERS)
    with pytest.raises(LedgerError, match="RELEASED"):
        memory.ledger.publish(aborted.lease, aborted.ids(8))
    assert full(memory).held == 2
    memory.release(other, Outcome.ABORTED)
    assert_at_baseline(memory)


@pytest.mark.parametrize("ends", ["saved", "rolled back", "aborted"])
def test_scenario_20_turn_that_computes_nothing_keeps_the_fences_of_the_one_before(ends):
    memory = make(4, 6)
    sessions = Sessions(memory.ledger)
    holder = start(memory, TOKENS, 24)
    generate(memory, holder, 8, 2, overlap=True)
    memory.holders.remove(holder)
    sessions.save("s", holder.lease, memory.readers(holder))
    assert sessions.borrow("s", "turn", 9, 20) is holder.lease
    if ends == "saved":
        sessions.save("s", holder.lease)
        sessions.close("s")
    elif ends == "rolled back":
        assert sessions.roll_back("s")
        sessions.close("s")
    else:
        sessions.forget("s")
    assert (full(memory).quarantined, full(memory).free) == (3, 3)
    settle_all(memory)
    assert_at_baseline(memory)


def test_scenario_50_window_pages_that_a_running_forward_reads_are_never_evicted():
    """p=4, a window of 5: the forward of token 7 sees token 3, a prefix of 8 tokens does not."""
    memory = make(4, 12, window=5, window_pages=5, ahead=8)
    first = start(memory, TOKENS, 8, known=0)
    compute(memory, first, 4)
    publish(memory, first)
    compute(memory, first, 3)
    assert memory.compute(first, 1)
    first.settled = 8  # published too early, as with overlap where a last token is known
    memory.release(first, Outcome.FINISHED)
    other = start(memory, OTHERS, 12, known=0)
    memory.ledger.grow(other.lease, 16)
    (running,) = memory.forwards
    assert not set(other.lease.own_pages(1)) & set(running.tables[1])
    settle_all(memory)
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
    memory.ledger.audit_pages()
    assert memory.ledger.grow_all([other.lease for other in others], [16, 16])
    for holder in list(memory.holders):
        memory.release(holder, Outcome.ABORTED)
    assert_at_baseline(memory)


def test_promise_is_kept_when_window_pages_are_published_on_the_way():
    """What the index locks of them does not come back as the window moves on."""
    memory = make(4, 40, window=8, window_pages=6, ahead=4)
    ledger = memory.ledger
    first = start(memory, TOKENS, 40)
    for _ in range(3):
        memory.slide(first)
        compute(memory, first, 4)
    publish(memory, first)
    other = memory.open(OTHERS, 12, known=0)
    while first.settled < 40:
        memory.slide(first)
        compute(memory, first, 4)
        memory.check()
    assert first.lease.cache_protected_len == 12
    for holder in [first, *([other] if other else [])]:
        memory.release(holder, Outcome.ABORTED)
    memory.reclaim()
    assert ledger.page_counts()[1].promised == 0
    assert_at_baseline(memory)
