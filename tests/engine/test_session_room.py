"""Whom idle sessions make room for, and which of them end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvrelay.mem_cache.host.host_copies import HostPrefix, Load
from kvrelay.mem_cache.host.host_loads import HostLoads
from kvrelay.wire.speeds import StepSpeeds
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
    turns,
)
from tests.engine.simulation import Simulation, count, reference
from tests.engine.test_scenarios import step_until


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
    assert worker.context.session_turns.take_ended(worker.link) == ()  # they were told
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
    idle = worker.context.session_turns
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
    simulation = cluster("aggregated", pages=200 if few_rows else 28, rows=8 if few_rows else 40)
    worker = simulation.decodes[0]
    sessions = [Conversation(simulation, str(name)) for name in range(4)]
    for index, session in enumerate(sessions):
        talk(session, random.Random(50 + index).choices(range(97), k=8), 4)
    number = 12 if few_rows else 16
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
    assert len(worker.context.session_turns) == 4
    computed = computed_tokens(worker)
    again = simulation.submit(prompt, 4)
    simulation.run()
    assert again.output == reference(prompt, 4)
    assert computed_tokens(worker) - computed < 20
    assert 0 < len(worker.context.session_turns) < 4
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
    load = HostLoads.load

    def note(loads: HostLoads, found: HostPrefix, spare: Sequence[int]) -> Load | None:
        begun.append((found.num_tokens, load(loads, found, spare)))
        return begun[-1][1]

    monkeypatch.setattr(HostLoads, "load", note)
    again = simulation.submit(prompt, 4)
    step_until(simulation, lambda: bool(begun and begun[-1][1]))
    [request] = worker.context.requests.values()
    (refused, nothing), (tokens, _) = begun[0], begun[-1]
    assert nothing is None
    load = worker.scheduler._loads.wait_of(request).load
    assert load is not None
    assert tokens < refused
    assert load.until - worker.kv_cache.clock() == tokens
    simulation.run()
    assert again.output == reference(prompt, 4)
    finish(simulation, *sessions)
