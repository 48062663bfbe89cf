"""What workers keep of histories, and how another router gets one."""

from __future__ import annotations

from array import array
from functools import partial

import pytest

from kvrelay.engine.config import Speculation
from kvrelay.engine.scheduler.commands import FindHistory
from kvrelay.engine.scheduler.history_store import OVERHEAD_TOKENS, HistoryStore
from kvrelay.engine.scheduler.metrics import SESSION_HISTORY_TOKENS
from kvrelay.wire.history_digest import history_digest
from tests.engine.conversations import Conversation, computed_tokens, talk
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
)
from tests.engine.simulation import SimWorker
from tests.engine.test_scenarios import step_until


def tokens(start: int, count: int) -> array[int]:
    return array("I", range(start, start + count))


def test_the_oldest_histories_make_room() -> None:
    store = HistoryStore(3 * (6 + OVERHEAD_TOKENS) + 2)
    for number in range(4):
        store.put(("r", str(number)), "alice", tokens(number, 6))
    assert (len(store), store.room_tokens) == (3, 210)
    assert store.find("alice", history_digest(tokens(0, 6))) is None
    store.put(("r", "1"), "alice", tokens(50, 8))
    assert (len(store), store.room_tokens) == (3, 212)
    assert store.find("alice", history_digest(tokens(50, 8))) == (("r", "1"), tokens(50, 8))
    store.put(("r", "long"), "alice", tokens(0, 149))
    assert (len(store), store.room_tokens) == (0, 0), "it is longer than all may be"


def test_an_owner_with_many_histories_displaces_its_own() -> None:
    """As with the KV of idle sessions."""
    each = 6 + OVERHEAD_TOKENS
    store = HistoryStore(4 * each)
    store.put(("r", "of bob"), "bob", tokens(0, 6))
    for number in range(10):
        store.put(("r", str(number)), "alice", tokens(number, 6))
    assert store.find("bob", history_digest(tokens(0, 6))) is not None
    found = [store.find("alice", history_digest(tokens(number, 6))) for number in range(10)]
    assert [one is not None for one in found] == [False] * 7 + [True] * 3
    for number in range(3):
        store.put(("r", f"of bob {number}"), "bob", tokens(20 + number, 6))
    assert len(store) == 4
    assert store.find("bob", history_digest(tokens(0, 6))) is None, "bob's share is two"
    assert store.find("alice", history_digest(tokens(9, 6))) is not None
    assert store.room_tokens == 4 * each


def test_a_history_is_hashed_once_and_only_for_who_knows_its_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed: list[int] = []

    def counted(token_ids: array[int]) -> str:
        hashed.append(len(token_ids))
        return history_digest(token_ids)

    monkeypatch.setattr("kvrelay.engine.scheduler.history_store.history_digest", counted)
    store = HistoryStore(10_000)
    for number in range(5):
        store.put(("r", str(number)), "alice", tokens(number, 6 + number % 2))
    for _ in range(3):
        assert store.find("alice", "6-" + 64 * "0") is None
    assert hashed == [6, 6, 6]
    assert store.find("alice", history_digest(tokens(2, 6))) == (("r", "2"), tokens(2, 6))
    assert hashed == [6, 6, 6]


def test_a_history_belongs_to_its_owner_and_is_forgotten_by_name() -> None:
    store = HistoryStore(100)
    store.put(("r", "1"), "alice", tokens(0, 6))
    digest = history_digest(tokens(0, 6))
    assert store.find("bob", digest) is None
    assert store.find("", digest) is None
    store.forget(("other", "1"))
    assert store.find("alice", digest) is not None
    store.forget(("r", "1"))
    assert (store.find("alice", digest), store.room_tokens) == (None, 0)


def asked(worker: SimWorker, owner: str, digest: str) -> array[int] | None:
    answers: list[array[int] | None] = []
    worker.inbox.post(FindHistory(owner, digest, answers.append))
    worker.turn()
    [answer] = answers
    return answer


@MODES
@pytest.mark.parametrize("router_lives", [False, True])
@pytest.mark.parametrize(
    "speculation", [Speculation.NONE, Speculation.NGRAM], ids=["plain", "drafts"]
)
def test_a_session_goes_on_by_its_digest(
    kind: str, router_lives: bool, speculation: Speculation
) -> None:
    """Its KV is found by the next turn, though another router sends that."""
    simulation = cluster(kind, pages=100, speculation=speculation)
    session, at = Conversation(simulation, "s", owner="alice"), place(simulation, kind)
    worker = simulation.decodes[0]
    for new in (FIRST, SECOND, SECOND):
        talk(session, new, 7, place=at)
    history = array("I", session.tokens)
    digest = history_digest(history)
    if not router_lives:
        for one in simulation.workers:
            simulation.detach(one)
        simulation.run()
    assert asked(worker, "bob", digest) is None
    assert asked(worker, "alice", history_digest(history[:-1])) is None
    assert asked(worker, "alice", digest) == history
    assert len(worker.context.session_turns) == 0
    assert pools(worker).session == 0
    if router_lives:
        assert ends(worker, "adopted") == 1
    computed = [computed_tokens(one) for one in {*at}]
    adopted = Conversation(simulation, "t", owner="alice", tokens=list(history))
    talk(adopted, SECOND, 4, place=(worker, worker) if kind == "local" else at)
    if kind != "pair":
        more = sum(computed_tokens(one) for one in {*at}) - sum(computed)
        assert more < len(SECOND) + 4 + 4 + 4 * (speculation is not Speculation.NONE) * 4
    finish(simulation, session, adopted)


def test_a_turn_that_runs_is_left_alone_and_the_history_is_that_of_the_last_good_one() -> None:
    simulation = cluster("aggregated", pages=100)
    session, worker = Conversation(simulation, "s"), simulation.decodes[0]
    talk(session, FIRST, 7)
    history = array("I", session.tokens)
    turn = session.say(SECOND, 12)
    step_until(simulation, lambda: generating(turn))
    assert asked(worker, "", history_digest(history)) == history
    assert generating(turn)
    simulation.run()
    session.take()
    assert asked(worker, "", history_digest(history)) is None
    finish(simulation, session)


def test_a_question_that_nobody_waits_for_takes_nothing_from_a_session() -> None:
    simulation = cluster("aggregated", pages=100)
    session, worker = Conversation(simulation, "s"), simulation.decodes[0]
    talk(session, FIRST, 7)
    answers: list[array[int] | None] = []
    digest = history_digest(array("I", session.tokens))
    worker.inbox.post(FindHistory("", digest, answers.append, lambda: False))
    worker.turn()
    assert (answers, len(worker.context.session_turns)) == ([], 1)
    finish(simulation, session)


def test_a_turn_that_fails_leaves_the_history_though_its_kv_is_gone() -> None:
    simulation = cluster("aggregated", pages=100)
    session, worker = Conversation(simulation, "s"), simulation.decodes[0]
    talk(session, FIRST, 7)
    history = array("I", session.tokens)
    turn = session.say(SECOND, 12, rewind_to=9)
    step_until(simulation, lambda: generating(turn))
    simulation.cancel(turn, worker)
    simulation.run()
    session.take()
    assert asked(worker, "", history_digest(history)) == history
    assert worker.context.session_turns.evict_oldest() is False
    assert asked(worker, "", history_digest(history)) == history
    finish(simulation, session)


def test_a_session_that_its_router_ends_leaves_no_history() -> None:
    """Now, and with the turn that runs."""
    simulation = cluster("aggregated", pages=100)
    worker = simulation.decodes[0]
    for name in ("now", "later"):
        session = Conversation(simulation, name)
        talk(session, FIRST, 7)
        history = array("I", session.tokens)
        assert history_tokens(worker) == len(history) + OVERHEAD_TOKENS
        if name == "later":
            turn = session.say(SECOND, 12)
            step_until(simulation, partial(generating, turn))
        session.close()
        simulation.run()
        session.take()
        for known in (history, array("I", session.tokens)):
            assert asked(worker, "", history_digest(known)) is None
    assert len(worker.context.session_turns._histories) == history_tokens(worker) == 0
    simulation.assert_at_baseline()


def history_tokens(worker: SimWorker) -> float:
    """The metric."""
    metrics = worker.context.metrics
    return {metric: value for metric, value, *_ in metrics._values()}[SESSION_HISTORY_TOKENS]
