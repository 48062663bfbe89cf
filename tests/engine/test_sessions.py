"""Sessions on real schedulers: scenarios 13 to 22 by number, and everything at random.

The model reads the whole context from the pages, so a page that was overwritten, freed or
swapped wrongly gives wrong tokens; every page is audited after every pass.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvrelay.decode_worker.request import HandedOverRequest
from kvrelay.engine.config import Speculation
from kvrelay.engine.scheduler.commands import Cancel, ForgetSession
from kvrelay.mem_cache.host_tier import HostPrefix, HostTier, Load
from kvrelay.mem_cache.lease import Lease
from kvrelay.wire.output import EndReason
from kvrelay.wire.speeds import StepSpeeds
from tests.engine.conversations import Conversation, computed_tokens, talk
from tests.engine.simulation import SimRequest, Simulation, SimWorker, count, reference
from tests.engine.test_scenarios import one_pair, step_until

FIRST = random.Random(1).choices(range(97), k=26)
SECOND = random.Random(2).choices(range(97), k=11)

KINDS = {
    "aggregated": {"aggregated": True},
    "local": {},
    "pair": {},
}
MODES = pytest.mark.parametrize("kind", KINDS)
OVERLAP = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "sync"])


def cluster(kind: str, seed: int = 0, **options: Any) -> Simulation:
    return one_pair(seed, **{**KINDS[kind], **options})


def place(simulation: Simulation, kind: str) -> tuple[SimWorker, SimWorker]:
    decode = simulation.decodes[0]
    return (simulation.prefills[0], decode) if kind == "pair" else (decode, decode)


def pools(worker: SimWorker) -> Any:
    return worker.kv_cache.counts()[0]


def rows(worker: SimWorker) -> Any:
    return worker.kv_cache.counts()[-1]


def turns(worker: SimWorker, start: str) -> int:
    return sample(worker, "session_turns", start=start)


def ends(worker: SimWorker, reason: str) -> int:
    return sample(worker, "session_ends", reason=reason)


def sample(worker: SimWorker, name: str, **labels: str) -> int:
    labels |= {"role": worker.role_name, "worker": worker.name, "model": "sim"}
    registry = worker.context.metrics.registry
    return int(registry.get_sample_value(f"kvrelay_{name}_total", labels) or 0)


def read_from(simulation: Simulation, worker: SimWorker) -> int:
    """Pages that were read from a worker."""
    return sum(pull.num_pages for pull in simulation.pulls if pull.peer == worker.name)


def generating(request: SimRequest) -> bool:
    mine = request.decode.context.requests.get(request.key)
    return mine is not None and mine.every_step is not None


def finish(simulation: Simulation, *conversations: Conversation) -> None:
    for one in conversations:
        one.take()
        one.close()
    simulation.run()
    simulation.assert_at_baseline()


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
    leases, cut = worker.kv_cache.sessions, []
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
    worker.inbox.post(ForgetSession(worker.link, "s"))
    worker.turn()
    assert generating(turn), "it goes on"
    if ends_by == "abort":
        simulation.cancel(turn, worker)
    simulation.run()
    if ends_by == "finish":
        assert turn.output == reference(turn.prompt, 12)
    assert len(worker.context.sessions) == 0
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


@MODES
def test_the_session_that_was_idle_for_longest_makes_room_and_stays_findable(kind: str) -> None:
    simulation = cluster(kind, pages=44, rows=6)
    at, worker = place(simulation, kind), simulation.decodes[0]
    sessions = [Conversation(simulation, name) for name in "abc"]
    for index, session in enumerate(sessions):
        talk(session, random.Random(index).choices(range(97), k=40), 8, place=at)
    # Each has 12 pages; a request of 20 needs what the oldest one has.
    request = simulation.submit(random.Random(9).choices(range(97), k=60), 12, place=at)
    simulation.run()
    assert request.output == reference(request.prompt, 12)
    assert ends(worker, "room") >= 1
    assert worker.context.sessions.take_ended(worker.link) == ()  # they were told
    talk(sessions[2], SECOND, 4, place=at)
    assert turns(worker, "resumed") == 1, "the latest one was spared"
    finish(simulation, *sessions)


@pytest.mark.parametrize("greedy", [True, False])
def test_who_keeps_more_than_his_share_makes_room_first(greedy: bool) -> None:
    """The newest sessions of one who keeps most go before the older ones of another."""
    simulation = cluster("aggregated", pages=60, rows=8, cached=False, growth_min=0.0)
    worker = simulation.decodes[0]
    small = Conversation(simulation, "small", owner="alice")
    big = [Conversation(simulation, str(n), owner="bob" if greedy else "alice") for n in range(3)]
    for session, length in zip([small, *big], (12, 60, 60, 60), strict=True):
        talk(session, random.Random(length).choices(range(97), k=length), 4)
    request = simulation.submit(random.Random(9).choices(range(97), k=80), 4)
    simulation.run()
    assert request.output == reference(request.prompt, 4)
    assert ends(worker, "room") >= 1
    talk(small, SECOND, 4)
    assert turns(worker, "resumed") == greedy
    finish(simulation, small, *big)


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
    assert len(worker.context.sessions) == 0
    simulation.assert_at_baseline()


def test_a_cancel_of_no_request_changes_no_session() -> None:
    simulation = cluster("aggregated")
    session, worker = Conversation(simulation, "s"), simulation.decodes[0]
    turn = talk(session, FIRST, 7)
    worker.inbox.post(Cancel(turn.key))
    worker.inbox.post(ForgetSession(worker.link, "another"))
    worker.turn()
    assert rows(worker).session == 1
    finish(simulation, session)


@MODES
def test_idle_sessions_are_room_and_no_load(kind: str) -> None:
    """Those pages too that they lock in the prefix index."""
    simulation = cluster(kind)
    at, worker = place(simulation, kind), simulation.decodes[0]
    sessions = [Conversation(simulation, name) for name in "ab"]
    for number, session in enumerate(sessions):
        talk(session, [number, *FIRST], 7, place=at)
        talk(session, SECOND, 7, place=at)
    assert pools(worker).cached_protected > 0
    load = worker.scheduler.load()
    assert (load.room_tokens, load.held_tokens) == (pools(worker).total * 4, 0)
    turn = sessions[0].say(SECOND, 12, place=at)
    step_until(simulation, lambda: generating(turn))
    load = worker.scheduler.load()
    assert load.held_tokens >= len(turn.prompt) - 4
    simulation.run()
    finish(simulation, *sessions)


def test_idle_sessions_make_room_for_the_choices_of_a_request() -> None:
    """The prompt fits, and the choices' own pages only without the session."""
    simulation = cluster("aggregated", pages=32, rows=8, cached=False)
    session, worker = Conversation(simulation, "s"), simulation.decodes[0]
    talk(session, FIRST, 22)
    assert pools(worker).free == 20
    choices = simulation.submit_choices(4, random.Random(5).choices(range(97), k=74), 6)
    simulation.run()
    for number, one in enumerate(choices):
        assert one.output == reference(one.prompt, 6, choice=number)
    assert ends(worker, "room") == 1
    assert count(worker, "retractions") == 0
    finish(simulation, session)


def sharing(simulation: Simulation, number: int) -> list[Conversation]:
    """Idle sessions that have a long prefix in common, and little else."""
    prefix = random.Random(7).choices(range(97), k=80)
    sessions = [Conversation(simulation, str(name)) for name in range(number)]
    for index, session in enumerate(sessions):
        talk(session, [*prefix, *random.Random(index).choices(range(97), k=4)], 4)
    return sessions


def test_sessions_that_share_a_prefix_do_not_end_in_vain() -> None:
    """What they share comes back once."""
    simulation = cluster("aggregated", pages=100, rows=12, growth_min=0.0)
    worker, sessions = simulation.decodes[0], sharing(simulation, 5)
    big = simulation.submit(random.Random(3).choices(range(97), k=160), 40)
    step_until(simulation, lambda: generating(big))
    idle = worker.context.sessions
    assert len(idle) == 5
    assert idle.locked_tokens == 80 + 5 * 4
    second = simulation.submit(random.Random(4).choices(range(97), k=200), 4)
    for _ in range(6):
        simulation.step()
    assert worker.context.requests[second.key].lease is None
    assert (len(idle), ends(worker, "room")) == (5, 0)
    simulation.run()
    assert second.output == reference(second.prompt, 4)
    finish(simulation, *sessions)


def test_a_request_that_shares_a_running_ones_prefix_gets_the_room_of_sessions() -> None:
    """The prefix is locked and comes back from nobody, and the request does not need it anew."""
    simulation = cluster("aggregated", pages=100, rows=12, growth_min=0.0)
    worker, prefix = simulation.decodes[0], random.Random(7).choices(range(97), k=200)
    session = Conversation(simulation, "s")
    talk(session, random.Random(8).choices(range(97), k=60), 4)
    big = simulation.submit([*prefix, 1, 2], 20)
    step_until(simulation, lambda: generating(big))
    free = pools(worker).free + pools(worker).cached_evictable - pools(worker).promised
    second = simulation.submit([*prefix, *random.Random(9).choices(range(97), k=160)], 4)
    assert free < 40, "it does not fit beside the session"
    step_until(simulation, lambda: generating(second))
    assert generating(big)
    assert ends(worker, "room") == 1
    simulation.run()
    assert second.output == reference(second.prompt, 4)
    finish(simulation, session)


@pytest.mark.parametrize("lacks", ["rows", "pages"])
def test_choices_that_never_fit_end_no_session(lacks: str) -> None:
    few_rows = lacks == "rows"
    simulation = cluster("aggregated", pages=200 if few_rows else 40, rows=8 if few_rows else 40)
    worker = simulation.decodes[0]
    sessions = [Conversation(simulation, str(name)) for name in range(4)]
    for index, session in enumerate(sessions):
        talk(session, random.Random(50 + index).choices(range(97), k=8), 4)
    number = 12 if few_rows else 30
    fork, forks = worker.context.fork, []

    def recorded(request: Any, others: Any) -> bool:
        forks.append((fork(request, others), ends(worker, "room")))
        return forks[-1][0]

    worker.context.fork = recorded  # type: ignore[method-assign]
    choices = simulation.submit_choices(number, random.Random(1).choices(range(97), k=57), 3)
    simulation.run()
    assert forks[0] == (False, 0)
    for index, one in enumerate(choices):
        assert one.output == reference(one.prompt, 3, choice=index)
    finish(simulation, *sessions)


def test_a_step_that_sessions_have_too_little_for_ends_none() -> None:
    """Six requests need a page each, and the session has two: one of the six is retracted."""
    simulation = cluster(
        "aggregated", page_size=1, pages=80, rows=8, cached=False, growth_min=0.0, growth_max=0.0
    )
    session, worker = Conversation(simulation, "s"), simulation.decodes[0]
    talk(session, FIRST[:2], 1)
    requests = [simulation.submit(FIRST[index : index + 10], 30) for index in range(6)]
    step_until(simulation, lambda: count(worker, "retractions") > 0)
    assert ends(worker, "room") == 0
    simulation.run()
    for one in requests:
        assert one.output == reference(one.prompt, 30)
    finish(simulation, session)


def test_idle_sessions_make_room_for_what_comes_back_from_the_host() -> None:
    """A request that fits in their room is not computed again for want of it."""
    simulation = cluster("aggregated", pages=44, rows=8, host_pages=400, growth_min=0.0)
    worker, prompt = simulation.decodes[0], random.Random(1).choices(range(97), k=80)
    simulation.submit(prompt, 4)
    simulation.run()
    sessions = [Conversation(simulation, str(name)) for name in range(4)]
    for index, session in enumerate(sessions):
        talk(session, random.Random(50 + index).choices(range(97), k=36), 5)
    assert worker.kv_cache.count_cached(np.array(prompt, np.int32)) < 20, "the rest was evicted"
    assert len(worker.context.sessions) == 4
    computed = computed_tokens(worker)
    again = simulation.submit(prompt, 4)
    simulation.run()
    assert again.output == reference(prompt, 4)
    assert computed_tokens(worker) - computed < 20
    assert 0 < len(worker.context.sessions) < 4
    finish(simulation, *sessions)


def test_a_load_in_the_room_of_a_session_is_waited_for_as_long_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the session had of the prefix need not come back any more."""
    simulation = cluster("aggregated", pages=44, rows=8, host_pages=400, growth_min=0.0)
    worker, rng = simulation.decodes[0], random.Random(1)
    first, second = rng.choices(range(97), k=20), rng.choices(range(97), k=40)
    prompt = [*first, *reference(first, 5), *second, *rng.choices(range(97), k=15)]
    simulation.submit(prompt, 4)
    simulation.run()
    for _ in range(3):  # it is evicted
        simulation.submit(rng.choices(range(97), k=80), 4)
        simulation.run()
    sessions = [Conversation(simulation, str(name)) for name in range(3)]
    talk(sessions[0], first, 5)
    talk(sessions[0], second, 5)  # which is not published yet
    for session in sessions[1:]:
        talk(session, rng.choices(range(97), k=36), 5)
    second_a_token = StepSpeeds(seconds_per_token=1.0, prompts_known=True)
    monkeypatch.setattr(worker.context.speed_learner, "speeds", second_a_token)
    begun = []
    load = HostTier.load

    def note(tier: HostTier, found: HostPrefix, spare: Sequence[int]) -> Load | None:
        begun.append((found.num_tokens, load(tier, found, spare)))
        return begun[-1][1]

    monkeypatch.setattr(HostTier, "load", note)
    again = simulation.submit(prompt, 4)
    step_until(simulation, lambda: bool(begun and begun[-1][1]))
    [request] = worker.context.requests.values()
    (refused, nothing), (tokens, _) = begun[0], begun[-1]
    assert nothing is None
    assert request.tier_load is not None
    assert tokens < refused
    assert request.tier_load.until - worker.kv_cache.clock() == tokens
    simulation.run()
    assert again.output == reference(prompt, 4)
    finish(simulation, *sessions)
