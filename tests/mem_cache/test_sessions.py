"""What a session keeps between its turns: scenarios 11 and 13 to 21."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvrelay.mem_cache.errors import KVCacheError
from kvrelay.mem_cache.fence import Fence
from kvrelay.mem_cache.leases.lease import Lease, LeaseState
from kvrelay.mem_cache.release import Outcome, release_kv_cache
from kvrelay.mem_cache.session_memory import SessionMemory
from tests.mem_cache.memory import Memory
from tests.mem_cache.scenarios import (
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
    publish,
    start,
    state,
    times_freed,
)


def save(
    memory: Memory,
    sessions: SessionMemory[str],
    name: str,
    lease: Lease,
    fences: Sequence[Fence] = (),
) -> None:
    """End a turn well."""
    outcome = sessions.keep(name, lease)
    assert outcome is Outcome.SAVED
    assert release_kv_cache(memory.kv_cache, lease, outcome, fences=fences)


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
    assert memory.kv_cache.grow(holder.lease, allocated)
    assert lengths(holder.lease) == (8, 14, allocated)
    memory.save(holder)
    assert lengths(holder.lease) == (8, 14, allocated)
    assert (full(memory).session, full(memory).cached_protected) == (tail, 2)
    pages = holder.lease.pages()
    memory.release(holder, Outcome.ABORTED)
    assert times_freed(memory.kv_cache, pages[2:]) == {1}
    assert (full(memory).free, full(memory).cached_evictable) == (6, 2)
    assert_at_baseline(memory)


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
    assert times_freed(memory.kv_cache, pages[kept:]) == ({1} if freed else set())
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
    kv_cache, sessions = memory.kv_cache, SessionMemory[str](memory.kv_cache)
    tokens, held = (50, 65) if later else (20, 20)
    lease = kv_cache.open("turn", tokens)
    assert lease is not None
    assert kv_cache.grow(lease, tokens)
    if later:
        kv_cache.commit(lease, 50)
        save(memory, sessions, "s", lease)
        assert full(memory).session == 50 // page_size
        assert sessions.borrow("s", "turn'", 50, 65) is lease
        assert kv_cache.grow(lease, 65)
    assert full(memory).held == held // page_size
    assert release_kv_cache(kv_cache, lease, Outcome.ABORTED)
    assert full(memory).free == full(memory).total
    assert (kv_cache.audit.row_counts().free, kv_cache.audit.row_counts().total) == (2, 2)
    if later:
        # Its tokens are the router's; the next turn computes those of the last good one again.
        sessions.forget("s")
        assert "s" not in sessions
        again = kv_cache.open("again", 65)
        assert again is not None
        save(memory, sessions, "s", again)
        sessions.close("s")
    assert_at_baseline(memory)


def test_scenario_19_second_turn_cancelled_before_it_starts_leaves_the_first_alone():
    memory = make(4, 12)
    sessions = SessionMemory[str](memory.kv_cache)
    first = holding(memory, 10, 12)
    save(memory, sessions, "s", first.lease)
    assert sessions.borrow("s", "first", 10, 20) is first.lease
    assert memory.compute(first, 4)
    before = state(memory, first)
    with pytest.raises(KVCacheError, match="lent to a turn"):
        sessions.borrow("s", "second", 10, 20)
    with pytest.raises(KVCacheError, match="Lease"):
        memory.kv_cache.leases.borrow(first.lease, "second", 10, 20)
    assert state(memory, first) == before
    memory.end_forward()
    compute(memory, first, 2)
    save(memory, sessions, "s", first.lease, memory.readers(first))
    assert lengths(first.lease) == (0, 16, 16)
    assert sessions.borrow("s", "third", 16, 20) is first.lease
    compute(memory, first, 4)
    save(memory, sessions, "s", first.lease)
    memory.holders.remove(first)
    sessions.close("s")
    assert_at_baseline(memory)


@pytest.mark.parametrize("ends", ["saved", "rolled back", "aborted"])
def test_scenario_20_session_closed_while_its_turn_decodes_is_released_once_after_it(ends):
    memory = make(4, 12)
    sessions = SessionMemory[str](memory.kv_cache)
    turn = holding(memory, 10, 12)
    save(memory, sessions, "s", turn.lease)
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
        outcome = sessions.keep("s", turn.lease)
    elif ends == "rolled back":
        outcome = sessions.roll_back("s", fences)
    else:
        outcome = sessions.forget("s")
    assert release_kv_cache(memory.kv_cache, turn.lease, outcome, fences=fences)
    assert "s" not in sessions
    assert turn.lease.state is LeaseState.RELEASED
    assert (full(memory).session, full(memory).quarantined) == (0, 4)
    end_all_forwards(memory)
    assert times_freed(memory.kv_cache, pages) == {1}
    assert not release_kv_cache(memory.kv_cache, turn.lease, Outcome.FINISHED)
    with pytest.raises(KVCacheError, match="not known"):
        sessions.close("s")
    assert_at_baseline(memory)


def test_scenario_21_lent_session_is_counted_once_while_its_turn_runs():
    memory = make(4, 12)
    sessions = SessionMemory[str](memory.kv_cache)
    holder = holding(memory, 14, 18, protected=8)
    save(memory, sessions, "s", holder.lease)

    def account() -> tuple[int, ...]:
        memory.kv_cache.audit.check_pages()
        pages, rows = memory.kv_cache.audit.counts()
        return (pages.held, pages.session, pages.cached_protected, rows.held, rows.session)

    assert account() == (0, 3, 2, 0, 1)
    assert sessions.borrow("s", "turn", 14, 24) is holder.lease
    assert account() == (2, 0, 2, 1, 0)
    generate(memory, holder, 3, 1, overlap=True)
    assert account() == (3, 0, 2, 1, 0)
    assert len(sessions) == 1
    memory.holders.remove(holder)
    save(memory, sessions, "s", holder.lease, memory.readers(holder))
    assert account() == (0, 3, 2, 0, 1)
    sessions.close("s")
    assert account() == (0, 0, 2, 0, 0)
    end_all_forwards(memory)
    assert_at_baseline(memory)


def idle_sessions(*names: str) -> tuple[Memory, SessionMemory[str]]:
    """Sessions of two pages each, saved one after the other, and nothing free."""
    memory = make(4, 2 * len(names))
    sessions = SessionMemory[str](memory.kv_cache)
    for name in names:
        holder = holding(memory, 8, 8)
        memory.holders.remove(holder)
        save(memory, sessions, name, holder.lease)
    return memory, sessions


def test_the_session_that_was_idle_for_longest_makes_room_never_one_that_is_lent():
    memory, sessions = idle_sessions("first", "second", "third")
    turn = sessions.borrow("first", "turn", 8, 8)
    assert turn is not None
    assert memory.kv_cache.open("refused", 8) is None
    assert sessions.evict_oldest() == "second"
    assert full(memory).free == 2
    save(memory, sessions, "first", turn)
    assert [sessions.evict_oldest() for _ in range(3)] == ["third", "first", None]
    assert_at_baseline(memory)


@pytest.mark.parametrize("ends", ["saved", "rolled back", "aborted"])
def test_scenario_20_turn_that_computes_nothing_keeps_the_fences_of_the_one_before(ends):
    memory = make(4, 6)
    sessions = SessionMemory[str](memory.kv_cache)
    holder = start(memory, TOKENS, 24)
    generate(memory, holder, 8, 2, overlap=True)
    memory.holders.remove(holder)
    save(memory, sessions, "s", holder.lease, memory.readers(holder))
    assert sessions.borrow("s", "turn", 9, 20) is holder.lease
    if ends == "saved":
        save(memory, sessions, "s", holder.lease)
        sessions.close("s")
    elif ends == "rolled back":
        assert release_kv_cache(memory.kv_cache, holder.lease, sessions.roll_back("s"))
        sessions.close("s")
    else:
        assert release_kv_cache(memory.kv_cache, holder.lease, sessions.forget("s"))
    assert (full(memory).quarantined, full(memory).free) == (3, 3)
    end_all_forwards(memory)
    assert_at_baseline(memory)
