"""Scenarios 13 to 22, by number: what may go wrong between two turns of a session."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvrelay.engine.config import Speculation
from kvrelay.engine.scheduler.commands import FromRouter
from kvrelay.mem_cache.leases.lease import Lease
from kvrelay.wire.submit import ForgetSessionRequest
from tests.engine.conversations import Conversation, talk
from tests.engine.session_cluster import (
    FIRST,
    MODES,
    SECOND,
    cluster,
    ends,
    finish,
    generating,
    place,
    pools,
    rows,
    turns,
)
from tests.engine.simulation import count, reference
from tests.engine.test_scenarios import step_until


@pytest.mark.parametrize(("page_size", "prefix", "freed"), [
    pytest.param(1, 39, 9, id="13"),
    pytest.param(16, 39, 0, id="14-p16"),
    pytest.param(4, 13, 8, id="15"),
])  # fmt: skip
def test_scenario_13_to_15_a_rewound_turn_frees_the_tail_before_it_writes(
    page_size: int, prefix: int, freed: int
) -> None:
    """A history of 49 tokens, 48 of them with KV, without a prefix index."""
    simulation = cluster("aggregated", page_size=page_size, pages=512 // page_size, cached=False)
    session, worker = Conversation(simulation, "s"), simulation.decodes[0]
    talk(session, FIRST, 49 - len(FIRST))
    kept = pools(worker).session
    turn = session.say([1], 3, rewind_to=prefix)
    worker.turn()
    request = worker.context.requests[turn.key]
    assert request.borrowed_len == prefix
    assert kept - -(-prefix // page_size) == freed
    assert pools(worker).held == -(-(prefix + 1) // page_size)
    simulation.run()
    assert turn.output == reference(turn.prompt, 3)
    finish(simulation, session)


@MODES
def test_scenario_16_outputs_that_a_stop_cut_off_are_freed(kind: str) -> None:
    """With drafts and overlap more is allocated and committed than is kept: the next turn cuts it.

    What it then has is what both share, to the token, before anything is computed.
    """
    simulation = cluster(
        kind, page_size=1, pages=200, speculation=Speculation.NGRAM, cached=False, seed=3
    )
    session, at = Conversation(simulation, "s"), place(simulation, kind)
    worker, prompt = simulation.decodes[0], list(FIRST)
    while (output := reference(prompt, 12)).index(output[-1]) != 11:
        prompt[-1] += 1
    first = session.say(prompt, 40, place=at, stop_token_ids=frozenset({output[-1]}))
    simulation.run()
    session.take()
    assert first.output == output
    kept, shared = pools(worker).session, len(prompt) + 12 - 1
    assert kept > shared, "the drafts behind the stop have pages"
    leases, cut = worker.kv_cache.leases, []
    borrow = leases.borrow

    def watched(lease: Lease, *args: Any, **options: Any) -> bool:
        lent = borrow(lease, *args, **options)
        cut.append((lease.kv_committed_len, lease.kv_allocated_len, pools(worker).held))
        return lent

    leases.borrow = watched  # type: ignore[method-assign]
    turn = session.say([5], 3, place=at)
    simulation.run()
    assert cut == [(shared, shared, shared)]
    assert turn.output == reference(turn.prompt, 3)
    finish(simulation, session)


def test_scenario_17_admission_refuses_twice_after_a_restore() -> None:
    """Others hold the memory; the session is as it was until its turn fits, and goes on then."""
    simulation = cluster("aggregated", pages=30, rows=4, cached=False, growth_min=0.0)
    session, worker = Conversation(simulation, "s"), simulation.decodes[0]
    talk(session, FIRST, 7)
    others = simulation.submit(random.Random(3).choices(range(97), k=70), 8)
    step_until(simulation, lambda: generating(others))
    before = pools(worker).session
    session.say(random.Random(4).choices(range(97), k=40), 4)
    for _ in range(2):
        worker.turn()
        assert pools(worker).session == before
        worker.end_step()
        worker.turn()
    assert turns(worker, "resumed") == 0
    simulation.run()
    assert (turns(worker, "resumed"), ends(worker, "room")) == (1, 0)
    turn = simulation.submitted[-1]
    assert turn.output == reference(turn.prompt, 4)
    finish(simulation, session)


@MODES
@pytest.mark.parametrize("when", ["waiting", "computed", "generating"])
@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
def test_scenario_18_an_aborted_turn_leaves_the_last_good_one(
    kind: str, when: str, later: bool
) -> None:
    simulation = cluster(kind)
    session, at = Conversation(simulation, "s"), place(simulation, kind)
    worker = simulation.decodes[0]
    if later:
        talk(session, FIRST, 7, place=at)
    history, kept = list(session.tokens), pools(worker).session
    turn = session.say(SECOND * 3, 30, place=at)
    if when != "waiting":
        reached = (lambda: bool(worker.steps)) if when == "computed" else lambda: generating(turn)
        if not (kind == "pair" and when == "computed"):
            step_until(simulation, reached)
    simulation.cancel(turn, worker)
    simulation.run()
    session.take()
    assert session.tokens == history
    assert (pools(worker).session, pools(worker).held) == (kept, 0)
    resumed = turns(worker, "resumed")
    talk(session, SECOND, 4, place=at)
    assert turns(worker, "resumed") == resumed + later
    finish(simulation, session)


def test_scenario_19_a_turn_that_is_cancelled_before_it_starts_leaves_the_first_alone() -> None:
    """Two turns at a time: a router does not do that, and a worker survives it."""
    simulation = cluster("local", rows=1)
    session, at = Conversation(simulation, "s"), place(simulation, "local")
    worker = simulation.decodes[0]
    talk(session, FIRST, 7, place=at)
    first = session.say(SECOND, 12, place=at)
    step_until(simulation, lambda: generating(first))
    second = simulation.submit(first.prompt, 5, session=first.session, place=at)
    worker.turn()
    simulation.cancel(second, worker)
    simulation.run()
    session.take()
    assert first.output == reference(first.prompt, 12)
    assert not second.tokens
    talk(session, SECOND, 4, place=at)
    assert turns(worker, "resumed") == 2
    finish(simulation, session)


@MODES
@pytest.mark.parametrize("ends_by", ["finish", "abort"])
def test_scenario_20_a_session_closed_while_its_turn_decodes_is_released_once_after_it(
    kind: str, ends_by: str
) -> None:
    simulation = cluster(kind)
    session, at = Conversation(simulation, "s"), place(simulation, kind)
    worker = simulation.decodes[0]
    talk(session, FIRST, 7, place=at)
    turn = session.say(SECOND, 12, place=at)
    step_until(simulation, lambda: generating(turn))
    worker.inbox.post(FromRouter(worker.link, ForgetSessionRequest("s")))
    worker.turn()
    assert generating(turn), "it goes on"
    if ends_by == "abort":
        simulation.cancel(turn, worker)
    simulation.run()
    if ends_by == "finish":
        assert turn.output == reference(turn.prompt, 12)
    assert len(worker.context.session_turns) == 0
    simulation.assert_at_baseline()


@MODES
def test_scenario_21_a_lent_session_is_counted_once(kind: str) -> None:
    simulation = cluster(kind)
    session, at = Conversation(simulation, "s"), place(simulation, kind)
    worker = simulation.decodes[0]
    talk(session, FIRST, 7, place=at)
    assert (rows(worker).session, rows(worker).held) == (1, 0)
    turn = session.say(SECOND, 12, place=at)
    step_until(simulation, lambda: generating(turn))
    assert (rows(worker).session, rows(worker).held, pools(worker).session) == (0, 1, 0)
    simulation.run()
    assert (rows(worker).session, rows(worker).held, pools(worker).held) == (1, 0, 0)
    finish(simulation, session)


@pytest.mark.parametrize("seed", range(8))
def test_scenario_22_accepted_drafts_at_a_page_boundary_stay(seed: int) -> None:
    simulation = cluster("aggregated", seed, speculation=Speculation.NGRAM, num_draft_tokens=5)
    session = Conversation(simulation, "s")
    for length in (3, 4, 5, 1, 2):
        talk(session, SECOND[:length], 4 + length)
    worker = simulation.decodes[0]
    assert count(worker, "accepted_draft_tokens") > 0
    assert turns(worker, "resumed") == 4
    finish(simulation, session)
