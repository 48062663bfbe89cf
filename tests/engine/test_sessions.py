"""Sessions on real schedulers, turn by turn and at random.

The model reads the whole context from the pages, so a page that was overwritten, freed or
swapped wrongly gives wrong tokens; every page is audited after every pass.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from kvrelay.decode_worker.request import HandedOverRequest
from kvrelay.engine.config import Speculation
from kvrelay.engine.scheduler.commands import FromRouter
from kvrelay.wire.output import EndReason
from kvrelay.wire.submit import CancelRequest, ForgetSessionRequest
from tests.engine.conversations import Conversation, computed_tokens, talk
from tests.engine.session_cluster import (
    FIRST,
    MODES,
    OVERLAP,
    SECOND,
    cluster,
    ends,
    finish,
    generating,
    place,
    pools,
    read_from,
    rows,
    turns,
)
from tests.engine.simulation import SimRequest, Simulation, count, reference
from tests.engine.test_scenarios import step_until
from tests.pairwise import few


@MODES
@OVERLAP
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    "speculation", [Speculation.NONE, Speculation.NGRAM], ids=["plain", "drafts"]
)
def test_a_turn_goes_on_with_the_pages_of_the_turn_before(
    kind: str, overlap: bool, page_size: int, speculation: Speculation
) -> None:
    """All of the history but its last token, whose KV nobody has computed, is not computed."""
    simulation = cluster(
        kind, page_size=page_size, pages=512 // page_size, overlap=overlap, speculation=speculation
    )
    session, at = Conversation(simulation, "s"), place(simulation, kind)
    worker = simulation.decodes[0]
    talk(session, FIRST, 7, place=at)
    for number in range(2, 5):
        history, before = len(session.tokens), computed_tokens(worker)
        prefill = at[0]
        read, computed = read_from(simulation, prefill), computed_tokens(prefill)
        talk(session, SECOND, 6, place=at)
        assert turns(worker, "resumed") == number - 1
        if kind == "pair":
            new_pages = -(-(history + len(SECOND)) // page_size) - (history - 1) // page_size
            assert read_from(simulation, prefill) - read == new_pages
            kept = (history - 1) // page_size * page_size
            assert computed_tokens(prefill) - computed == history + len(SECOND) - kept
        else:
            assert session.turn is None
            drafts = count(worker, "draft_tokens") if speculation is not Speculation.NONE else 0
            most = len(SECOND) + 1 + 6 + drafts
            assert len(SECOND) + 1 <= computed_tokens(worker) - before <= most
    assert turns(worker, "opened") == 1
    finish(simulation, session)


@few(2)
@MODES
@pytest.mark.parametrize("windows", [(None,), (None, 7)], ids=["full", "hybrid"])
@pytest.mark.parametrize("seed", range(6))
def test_sessions_at_random_give_right_tokens_and_lose_nothing(
    kind: str, windows: Any, seed: int
) -> None:
    """Turns of many sessions, rewinds, cancels, closes and retractions, in too little memory."""
    walk(kind, windows, seed)


def walk(kind: str, windows: Any, seed: int, number: int = 40) -> Simulation:
    rng = random.Random(seed)
    simulation = cluster(
        kind, seed, windows=windows, pages=60, rows=5, workers=2, overlap=seed % 2 == 0,
        speculation=rng.choice([Speculation.NONE, Speculation.NGRAM]),
        debug_retract_every=rng.choice([0, 7]), local=0.5 if kind == "pair" else 1.0,
        cached=rng.random() < 0.7,
    )  # fmt: skip
    simulation.slow_forwards = seed % 3 == 0
    if seed % 3 == 1:
        read_late(simulation, rng)
    sessions = [Conversation(simulation, str(name), rng.choice([60, 1 << 20])) for name in range(8)]
    said = 0
    while said < number:
        for _ in range(rng.randrange(rng.choice([4, 20, 60]))):
            simulation.step()
        session = rng.choice(sessions)
        session.take()
        if session.turn is not None:
            disturb(simulation, session, rng)
            continue
        said += 1
        new = rng.choices(range(97), k=rng.randint(1, 20))
        rewind = rng.randint(0, len(session.tokens)) if rng.random() < 0.2 else None
        if len(session.tokens) > 120:
            rewind = 0
        sticky = None
        if session.worker and rng.random() < 0.8:
            by_prefill = kind == "pair" and rng.random() < 0.5
            prefill = rng.choice(simulation.prefills) if by_prefill else session.worker
            sticky = (prefill, session.worker)
        session.say(new, rng.randint(1, 12), rewind_to=rewind, place=sticky)
    simulation.run()
    for request in simulation.submitted:
        expected = reference(request.prompt, request.max_tokens, request.decode.windows)
        assert request.output == expected[: len(request.output)]
        assert len(request.output) == request.max_tokens or request.disturbed
    finish(simulation, *sessions)
    return simulation


def read_late(simulation: Simulation, rng: random.Random) -> None:
    """Reads take long."""
    end_read = simulation.end_read
    simulation.end_read = lambda worker: rng.random() < 0.05 and end_read(worker)  # type: ignore


def is_read(turn: SimRequest) -> bool:
    mine = turn.decode.context.requests.get(turn.key)
    return isinstance(mine, HandedOverRequest) and bool(mine.reading)


def disturb(simulation: Simulation, session: Conversation, rng: random.Random) -> None:
    turn = session.turn
    assert turn is not None
    if rng.random() < (0.5 if is_read(turn) else 0.1):
        simulation.cancel(turn, rng.choice([turn.prefill, turn.decode]))
    elif rng.random() < 0.1:
        session.close()


def test_sessions_that_are_too_long_are_not_kept_and_what_is_told_of_them() -> None:
    simulation = cluster("aggregated")
    told: list[str] = []
    simulation.take_step = lambda worker, step: told.extend(step.ended_sessions)  # type: ignore
    session = Conversation(simulation, "s", most_kept_tokens=40)
    talk(session, FIRST, 7)
    assert pools(simulation.decodes[0]).session
    talk(session, SECOND, 7)
    assert not pools(simulation.decodes[0]).session
    assert told == ["s"]
    finish(simulation, session)


@MODES
def test_a_retracted_turn_keeps_its_session(kind: str) -> None:
    simulation = cluster(kind, debug_retract_every=9)
    session, at = Conversation(simulation, "s"), place(simulation, kind)
    worker = simulation.decodes[0]
    talk(session, FIRST, 7, place=at)
    turn = session.say(SECOND, 20, place=at)
    simulation._place = lambda *_: at  # type: ignore[method-assign]
    simulation.run()
    session.take()
    assert count(worker, "retractions") >= 1
    assert turn.output == reference(turn.prompt, 20)
    assert turns(worker, "resumed") >= 2, "again after the retraction"
    finish(simulation, session)


def test_a_failed_forward_ends_the_session() -> None:
    simulation = cluster("aggregated")
    session, worker = Conversation(simulation, "s"), simulation.decodes[0]
    talk(session, FIRST, 7)
    turn = session.say(SECOND, 12)
    step_until(simulation, lambda: generating(turn))
    worker.turn()
    worker.fail_step()
    simulation.run()
    session.take()
    assert turn.ends[worker.name].reason is EndReason.FAILED
    assert ends(worker, "failed") == 1
    prompt = np.array(turn.prompt, np.int32)
    assert worker.kv_cache.count_cached(prompt) == 0, "what the turn has published may be wrong"
    talk(session, SECOND, 4)
    assert turns(worker, "opened") == 2
    finish(simulation, session)


def test_a_routers_sessions_end_with_its_stream() -> None:
    simulation = cluster("local")
    session, at = Conversation(simulation, "s"), place(simulation, "local")
    worker = simulation.decodes[0]
    talk(session, FIRST, 7, place=at)
    turn = session.say(SECOND, 12, place=at)
    step_until(simulation, lambda: generating(turn))
    simulation.detach(worker)
    simulation.run()
    assert len(worker.context.session_turns) == 0
    simulation.assert_at_baseline()


def test_a_cancel_of_no_request_changes_no_session() -> None:
    simulation = cluster("aggregated")
    session, worker = Conversation(simulation, "s"), simulation.decodes[0]
    turn = talk(session, FIRST, 7)
    worker.inbox.post(CancelRequest(turn.key))
    worker.inbox.post(FromRouter(worker.link, ForgetSessionRequest("another")))
    worker.turn()
    assert rows(worker).session == 1
    finish(simulation, session)
