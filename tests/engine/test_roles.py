"""A prefill and a decode scheduler in thousands of interleavings: right tokens, no page lost."""

from __future__ import annotations

import random

import pytest

from kvrelay.decode_worker.hand_over_stream import PeerMessage
from kvrelay.engine.scheduler.commands import Misdirected, PeerDied, Stop
from kvrelay.prefill_worker.request import (
    HandOverStream,
    StreamClosed,
    StreamMessage,
    StreamOpened,
)
from kvrelay.wire.hand_over import Ask, Ended, Grant, Released, Sequenced
from kvrelay.wire.output import EndReason
from tests.engine.simulation import SimRequest, Simulation, SimWorker, reference
from tests.pairwise import few

BASES = [random.Random(base).choices(range(97), k=60) for base in range(2)]


def random_prompt(rng: random.Random, longest: int) -> list[int]:
    """Random tokens, often after a beginning that others have, too."""
    length = rng.randint(1, longest)
    shared = rng.choice(BASES)[: rng.choice((0, rng.randint(0, length), length))]
    return shared + [rng.randrange(97) for _ in range(length - len(shared))]


def assert_complete(request: SimRequest) -> None:
    windows = request.prefill.windows
    assert request.output == reference(request.prompt, request.max_tokens, windows)
    ends = {end.reason for end in request.ends.values()}
    assert EndReason.LENGTH in ends
    assert EndReason.FAILED not in ends


def dropped(worker: SimWorker, kind: str) -> float:
    """How many messages of a kind the worker has dropped."""
    labels = {"role": worker.role_name, "worker": worker.name, "model": "sim", "kind": kind}
    value = worker.context.metrics.registry.get_sample_value(
        "kvrelay_dropped_messages_total", labels
    )
    assert value is not None
    return value


WINDOWS = ((None,), (None, 7), (20,))


@few(3)
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("seed", range(4))
def test_undisturbed_requests_give_the_models_tokens(seed, page_size, cached, windows):
    simulation = Simulation(
        seed, page_size, 160 // page_size, rows=6, chunk=16, cached=cached, windows=windows
    )
    rng = random.Random(seed)
    requests = []
    for _ in range(40):
        requests.append(simulation.submit(random_prompt(rng, 60), rng.randint(1, 12)))
        for _ in range(rng.randint(0, 30)):
            simulation.step()
    simulation.run()
    for request in requests:
        assert_complete(request)
    simulation.assert_at_baseline()


@few(3)
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("seed", range(8))
def test_disturbed_requests_leave_nothing_and_harm_nobody(seed, page_size, windows):
    simulation = Simulation(
        seed, page_size, pages=160 // page_size, rows=6, chunk=16, windows=windows
    )
    rng = random.Random(seed)
    requests = []
    for _ in range(60):
        requests.append(simulation.submit(random_prompt(rng, 60), rng.randint(1, 12)))
        for _ in range(rng.randint(0, 40)):
            simulation.step()
        if rng.random() < 0.3:
            victim = rng.choice(requests)
            for worker in rng.sample([victim.prefill, victim.decode], rng.randint(1, 2)):
                simulation.cancel(victim, worker)
        if rng.random() < 0.1:
            simulation.break_stream()
        if rng.random() < 0.03:
            simulation.detach(rng.choice(simulation.workers))
    simulation.run()
    for request in requests:
        if not request.disturbed:
            assert_complete(request)
    undisturbed = sum(not request.disturbed for request in requests)
    assert undisturbed >= 5, "the disturbance left too little to check"
    simulation.assert_at_baseline()


@pytest.mark.parametrize("seed", range(20))
def test_abort_during_a_forward_and_reuse_before_its_end(seed):
    """Scenario 8: pages of a request that a running forward still writes go to nobody else."""
    simulation = Simulation(seed, page_size=4, pages=24, rows=6, chunk=16)
    simulation.slow_forwards = True
    rng = random.Random(seed)
    requests = []
    for _ in range(60):
        requests.append(simulation.submit(random_prompt(rng, 40), rng.randint(4, 12)))
        for _ in range(rng.randint(0, 40)):
            simulation.step()
        computed = [
            simulation.requests[item.request.key]
            for worker in simulation.decodes
            for step in worker.steps
            for item in step.scheduled
        ]
        if computed and rng.random() < 0.7:
            victim = rng.choice(computed)
            simulation.cancel(victim, victim.decode)
    simulation.run()
    for request in requests:
        if not request.disturbed:
            assert_complete(request)
    simulation.assert_at_baseline()


@pytest.mark.parametrize("seed", range(6))
def test_pages_of_a_failed_read_wait_for_the_peers_death(seed):
    simulation = Simulation(seed, page_size=4, pages=60, rows=6, chunk=16)
    rng = random.Random(seed)
    for _ in range(20):
        simulation.submit(random_prompt(rng, 40), rng.randint(1, 8))
    failed = 0
    for _ in range(4000):
        if rng.random() < 0.02 and failed < 3:
            simulation.fail_read()
            failed += 1
        if not simulation.step():
            break
    quarantined = [
        worker.kv_cache.audit.page_counts()[0].quarantined for worker in simulation.decodes
    ]
    late = [len(worker.agent.ordered) for worker in simulation.decodes]
    assert all((pages > 0) == (reads > 0) for pages, reads in zip(quarantined, late, strict=True))
    simulation.settle_deaths()
    simulation.run()
    simulation.assert_at_baseline()


SIDES = ("prefill", "decode", "both")


@pytest.mark.parametrize("in_turn", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_abort_at_every_point_of_one_request(in_turn: bool):
    """One request, cancelled after k events for every k, on one side in turn, or on each."""
    for events in range(60):
        for sides in SIDES[events % 3 :][:1] if in_turn else SIDES:
            simulation = Simulation(events, page_size=4, pages=20, rows=2, chunk=8)
            request = simulation.submit(list(range(20)), 6)
            for _ in range(events):
                simulation.step()
            for worker in (request.prefill, request.decode):
                if sides in ("both", worker.role_name.value):
                    simulation.cancel(request, worker)
            simulation.run()
            simulation.assert_at_baseline()
            assert request.output == reference(request.prompt, 6)[: len(request.output)]


def test_two_prompts_that_do_not_fit_together_run_one_after_the_other():
    """Scenario 48: D has room for one and a half prompts; neither ends up holding half."""
    simulation = Simulation(1, page_size=4, pages=15, rows=4, chunk=8)
    simulation.prefills = simulation.prefills[:1]
    simulation.decodes = simulation.decodes[:1]
    requests = [simulation.submit(list(range(36)), 5) for _ in range(2)]
    simulation.run()
    for request in requests:
        assert_complete(request)
    simulation.assert_at_baseline()


def test_prompt_that_does_not_fit_any_pool_is_refused_and_others_live():
    simulation = Simulation(1, page_size=4, pages=10, rows=4, chunk=8)
    simulation.prefills = simulation.prefills[:1]
    simulation.decodes = simulation.decodes[:1]
    big = simulation.submit(list(range(50)), 5)
    small = simulation.submit(list(range(10)), 5)
    simulation.run()
    assert_complete(small)
    assert {end.reason for end in big.ends.values()} == {EndReason.FAILED}
    assert "one request can hold 40 here" in big.ends[big.prefill.name].error
    simulation.assert_at_baseline()


def test_scenario_42_ids_that_begin_alike_are_different_requests():
    """Scenario 42: aborting `1` leaves `10` alone."""
    simulation = Simulation(3, page_size=4, pages=60, rows=16, chunk=8)
    requests = [simulation.submit(list(range(12)), 4) for _ in range(11)]
    one, ten = requests[1], requests[10]
    assert (one.key.request_id, ten.key.request_id) == ("1", "10")
    for worker in (one.prefill, one.decode):
        simulation.cancel(one, worker)
    simulation.run()
    assert_complete(ten)
    simulation.assert_at_baseline()


def test_lower_priority_value_runs_first():
    simulation = Simulation(5, page_size=4, pages=10, rows=1, chunk=8)
    simulation.prefills = simulation.prefills[:1]
    simulation.decodes = simulation.decodes[:1]
    late = [simulation.submit([1, 2, 3], 3, priority=5) for _ in range(3)]
    urgent = simulation.submit([4, 5, 6], 3, priority=-1)
    finished: list[SimRequest] = []
    while simulation.step():
        for request in [*late, urgent]:
            if len(request.ends) == 2 and request not in finished:
                finished.append(request)
    assert urgent in finished[:2], "at most the request that ran already goes before it"
    simulation.assert_at_baseline()


def test_dead_decode_worker_lets_its_pages_on_the_prefill_side_go():
    """Its host may vanish and send nothing: the stream never ends by itself."""
    simulation = Simulation(2, page_size=4, pages=20, rows=4, chunk=8)
    request = simulation.submit(list(range(20)), 6)
    while not request.tokens:
        simulation.step()
    assert request.prefill.kv_cache.audit.page_counts()[0].cached_protected > 0
    simulation.pairs.clear()
    request.prefill.inbox.post(PeerDied(request.decode.name))
    request.prefill.turn()
    (counts,) = request.prefill.kv_cache.audit.page_counts()
    assert (counts.held, counts.cached_protected) == (0, 0)
    assert request.prefill.agent.serving == 0


@pytest.mark.parametrize("length", [6, 20])
def test_a_peer_is_served_from_the_first_announced_page_to_the_release(length):
    """A prompt that waits or computes its first chunk costs the transfer thread nothing."""
    simulation = Simulation(3, page_size=4, pages=20, rows=4, chunk=8)
    request = simulation.submit(list(range(length)), 6)
    agent, seen = request.prefill.agent, set()
    while simulation.step():
        for live in request.prefill.context.requests.values():
            is_readable = live.kv_written_len >= min(length, 8)  # after the first chunk
            assert agent.serving == is_readable
            seen.add(is_readable)
    assert seen == {False, True}
    simulation.assert_at_baseline()


def test_second_stream_for_a_request_is_turned_away():
    simulation = Simulation(4, page_size=4, pages=20, rows=4, chunk=8)
    request = simulation.submit(list(range(20)), 6)
    while not simulation.pairs:
        simulation.step()
    request.prefill.turn()
    intruder = HandOverStream(request.key, "somebody")
    request.prefill.inbox.post(StreamOpened(intruder))
    request.prefill.turn()
    (answer,) = intruder.take_all()
    assert answer is not None
    assert isinstance(answer.message, Ended)
    assert "open already" in answer.message.detail
    assert dropped(request.prefill, "stream") == 1
    request.prefill.inbox.post(StreamClosed(intruder))
    simulation.run()
    assert_complete(request)
    simulation.assert_at_baseline()


def test_duplicate_submission_is_dropped():
    simulation = Simulation(5, page_size=4, pages=20, rows=4, chunk=8)
    request = simulation.submit(list(range(20)), 6)
    for worker in (request.prefill, request.decode):
        worker.inbox.post(list(worker.inbox)[-1])
    simulation.run()
    assert_complete(request)
    for worker in (request.prefill, request.decode):
        assert dropped(worker, "submit") == 1
    simulation.assert_at_baseline()


def test_late_messages_of_a_hand_over_are_dropped_and_counted():
    simulation = Simulation(5, page_size=4, pages=20, rows=4, chunk=8)
    request = simulation.submit(list(range(20)), 6)
    while not simulation.pulls:
        simulation.step()
    ((_, mine, _, theirs),) = simulation.pairs
    simulation.run()
    assert_complete(request)
    before = dropped(request.decode, "hand_over"), dropped(request.prefill, "hand_over")
    request.decode.inbox.post(PeerMessage(mine, Sequenced(99, Ask())))
    request.decode.inbox.post(PeerMessage(mine, Sequenced(100, Released(valid=True))))
    request.prefill.inbox.post(StreamMessage(theirs, Sequenced(99, Grant())))
    request.prefill.inbox.post(Misdirected())
    simulation.cancel(request, request.decode)
    simulation.run()
    after = dropped(request.decode, "hand_over"), dropped(request.prefill, "hand_over")
    assert after == (before[0] + 2, before[1] + 1)
    assert dropped(request.decode, "cancel") == 1
    assert dropped(request.prefill, "incarnation") == 1
    simulation.assert_at_baseline()


@pytest.mark.parametrize("events", range(0, 60, 4))
def test_stop_gives_everything_back_wherever_it_comes(events):
    simulation = Simulation(events, page_size=4, pages=20, rows=4, chunk=8)
    for _ in range(3):
        simulation.submit(list(range(20)), 6)
    for _ in range(events):
        simulation.step()
    for worker in simulation.workers:
        worker.inbox.post(Stop())
    simulation.run()
    for worker in simulation.workers:
        assert worker.engine.stopped
    simulation.assert_at_baseline()


@pytest.mark.parametrize("length", [16, 18])
def test_scenario_36_a_prompt_that_both_indexes_have_is_not_computed_and_does_not_travel(length):
    """Scenario 36: the first token does."""
    simulation = Simulation(0, page_size=4, pages=40, rows=4, chunk=16)
    del simulation.prefills[1:], simulation.decodes[1:]
    prompt = BASES[0][:length]
    first = simulation.submit(prompt, 3)
    simulation.run()
    assert_complete(first)
    read = sum(pull.num_pages for pull in simulation.pulls)
    second = simulation.submit(prompt, 3)
    simulation.run()
    assert_complete(second)
    # The page that the prompt's last token is in is computed: it is sampled from.
    assert second.cached_tokens == (length - 1) // 4 * 4
    whole = length // 4
    assert sum(pull.num_pages for pull in simulation.pulls) - read == -(-length // 4) - whole
    simulation.assert_at_baseline()
