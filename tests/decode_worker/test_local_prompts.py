"""Prompts that a decode worker computes itself, beside those that are handed over to it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvrelay.decode_worker.request import DecodeRequest, HandedOverRequest
from kvrelay.engine.config import Speculation
from kvrelay.engine.scheduler.commands import RetractForDrain, Submit
from kvrelay.wire.output import EndReason
from tests.engine.simulation import SimRequest, Simulation, SimWorker, count, reference
from tests.engine.test_modes import expected, in_little_memory, run_load
from tests.engine.test_scenarios import CHUNK, one_pair, random_prompts, step_until
from tests.pairwise import few


def submit(simulation: Simulation, prompt: list[int], most: int, *, local: bool) -> SimRequest:
    simulation.local = float(local)
    return simulation.submit(prompt, most)


def test_a_worker_that_computes_no_prompts_refuses_them() -> None:
    """Its windows have no room for chunks; it takes over what others have computed."""
    simulation = Simulation(
        0, 4, pages=60, rows=6, chunk=64, windows=(None, 7), workers=1, computes_prompts=False
    )
    decode = simulation.decodes[0]
    prompt = random_prompts(0, 1, 60)[0]
    refused = submit(simulation, prompt, 6, local=True)
    simulation.run()
    end = refused.ends[decode.name]
    assert end.reason is EndReason.FAILED
    assert "--placement disaggregated" in end.error
    taken = submit(simulation, prompt, 6, local=False)
    simulation.run()
    assert taken.output == reference(prompt, 6, (None, 7))
    simulation.assert_at_baseline()


def test_a_prompt_that_was_submitted_before_is_dropped_and_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = Simulation(0, 4, pages=60, rows=6, chunk=64, workers=1, computes_prompts=False)
    decode, prompt = simulation.decodes[0], random_prompts(0, 1, 60)[0]
    send = simulation.send

    def send_again_as_local(worker: SimWorker, command: Submit) -> None:
        send(worker, command)
        if worker is decode:
            local = replace(command.submission, prefill=None)
            send(worker, replace(command, submission=local))

    monkeypatch.setattr(simulation, "send", send_again_as_local)
    taken = submit(simulation, prompt, 6, local=False)
    simulation.run()
    assert taken.output == reference(prompt, 6, (None,))
    assert EndReason.FAILED not in {end.reason for end in taken.ends.values()}
    simulation.assert_at_baseline()


@few(3)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("speculation", [Speculation.NONE, Speculation.NGRAM])
@pytest.mark.parametrize("retract_every", [0, 3])
@pytest.mark.parametrize("windows", [(None,), (None, 7), (20,)])
@pytest.mark.parametrize("cached", [True, False])
def test_tokens_do_not_depend_on_who_computes_the_prompt(
    overlap, speculation, retract_every, windows, cached
) -> None:
    for page_size, local in ((1, 0.5), (4, 0.5), (4, 1.0)):
        simulation = in_little_memory(
            page_size,
            cached=cached,
            windows=windows,
            local=local,
            overlap=overlap,
            speculation=speculation,
            debug_retract_every=retract_every,
        )
        run_load(simulation, page_size, count=16, choices=3)
        computed = [count(worker, "computed_tokens") for worker in simulation.prefills]
        assert any(computed) == (local < 1)


@pytest.mark.parametrize("windows", [(None,), (None, 7)], ids=["full", "hybrid"])
@pytest.mark.parametrize("seed", range(6))
def test_disturbed_requests_leave_nothing_and_harm_nobody(seed: int, windows) -> None:
    """Cancelled prompts, lost hand-overs, lost routers, failed forwards, in too little memory."""
    simulation = Simulation(
        seed, 3, pages=54, rows=6, chunk=16, windows=windows, local=0.5, failed_forwards_limit=99
    )
    rng = random.Random(seed)
    requests = []
    for _ in range(60):
        prompt = [rng.randrange(97) for _ in range(rng.randint(1, 60))]
        requests.append(simulation.submit(prompt, rng.randint(1, 12), rng.randint(0, 1)))
        for _ in range(rng.randint(0, 30)):
            simulation.step()
        if rng.random() < 0.2:
            victim = rng.choice(requests)
            simulation.cancel(victim, rng.choice([victim.prefill, victim.decode]))
        if rng.random() < 0.1:
            simulation.break_stream()
        if rng.random() < 0.03:
            simulation.detach(rng.choice(simulation.workers))
        if rng.random() < 0.1 and (busy := [one for one in simulation.decodes if one.steps]):
            rng.choice(busy).fail_step()
    simulation.run()
    undisturbed = [request for request in requests if not request.disturbed]
    assert len(undisturbed) >= 5
    for request in undisturbed:
        failed = [end for end in request.ends.values() if end.reason is EndReason.FAILED]
        # A forward of one request alone has failed: a router would let it try again.
        assert request.output == expected(request) or failed, request
    assert sum(request.output == expected(request) for request in undisturbed) >= 5
    simulation.assert_at_baseline()


def test_a_prompt_is_computed_behind_its_own_prefix_hit() -> None:
    simulation = one_pair(1)
    prompt = random_prompts(1, 1, 48)[0]
    first = submit(simulation, prompt, 4, local=True)
    simulation.run()
    again = submit(simulation, [*prompt, 1, 2], 4, local=True)
    simulation.run()
    # Written are the prompt and all but the last token of the output, which differs at once.
    assert (first.cached_tokens, again.cached_tokens) == (0, 48)
    handed_over = submit(simulation, random_prompts(2, 1, 40)[0], 4, local=False)
    simulation.run()
    after = submit(simulation, [*handed_over.prompt, 1, 2], 4, local=True)
    simulation.run()
    assert after.cached_tokens == 40
    for request in simulation.submitted:
        assert request.output == expected(request)
    simulation.assert_at_baseline()


def test_a_hand_over_reads_only_what_no_local_prompt_has_left() -> None:
    simulation = one_pair(1)
    prompt = random_prompts(1, 1, 48)[0]
    submit(simulation, prompt, 4, local=True)
    simulation.run()
    submit(simulation, prompt, 4, local=False)
    simulation.run()
    assert not simulation.pulls
    simulation.assert_at_baseline()


def test_settled_chunks_are_found_while_the_prompt_is_computed() -> None:
    simulation = one_pair(2, pages=100)
    prompt = random_prompts(2, 1, 8 * CHUNK)[0]
    leader = submit(simulation, prompt, 4, local=True)
    step_until(simulation, lambda: count(leader.decode, "computed_tokens") > 3 * CHUNK)
    follower = submit(simulation, [*prompt[: 3 * CHUNK], 1, 2, 3], 4, local=True)
    simulation.run()
    assert follower.cached_tokens == 3 * CHUNK
    assert [one.output for one in (leader, follower)] == [expected(leader), expected(follower)]
    simulation.assert_at_baseline()


@pytest.mark.parametrize("leader_is_local", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_a_local_prompt_waits_for_one_that_brings_its_prefix(
    seed: int, leader_is_local: bool
) -> None:
    simulation = one_pair(seed, pages=100)
    prompt = random_prompts(seed, 1, 80)[0]
    leader = submit(simulation, prompt, 4, local=leader_is_local)
    step_until(simulation, lambda: has_memory(leader))
    follower = submit(simulation, [*prompt, 1, 2], 4, local=True)
    simulation.run()
    assert follower.cached_tokens == 80
    assert count(follower.decode, "prefix_waits") == 1
    assert follower.output == expected(follower)
    simulation.assert_at_baseline()


def of(request: SimRequest) -> DecodeRequest | None:
    return request.decode.context.requests.get(request.key)


def has_memory(request: SimRequest) -> bool:
    mine = of(request)
    return mine is not None and mine.lease is not None


@pytest.mark.parametrize("large_is_local", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_local_prompts_and_grants_share_one_bypass_bound(seed: int, large_is_local: bool) -> None:
    """A long prompt that does not fit lets so many others pass, of both kinds together."""
    simulation = one_pair(seed, rows=12, bypass_limit=4, grants_ahead=99)
    holder = submit(simulation, random_prompts(seed, 1, 120)[0], 60, local=True)
    step_until(simulation, lambda: has_memory(holder))
    # Neither fits beside it before it has ended; the long one is older.
    large = submit(simulation, random_prompts(seed + 9, 1, 160)[0], 4, local=large_is_local)
    step_until(simulation, lambda: asked_or_waits(large))
    prompts = random_prompts(seed + 20, 8, 4)
    local = [submit(simulation, prompt, 2, local=True) for prompt in prompts[:2]]
    step_until(simulation, lambda: all(one.tokens for one in local))
    handed_over = [submit(simulation, prompt, 2, local=False) for prompt in prompts[2:]]
    passed: set[SimRequest] = set()

    def large_has_memory() -> bool:
        if not has_memory(large):
            passed.update(one for one in handed_over if has_memory(one))
        return has_memory(large)

    step_until(simulation, large_has_memory)
    assert len(passed) == 4 - len(local)
    simulation.run()
    for request in simulation.submitted:
        assert request.output == expected(request)
    simulation.assert_at_baseline()


def asked_or_waits(request: SimRequest) -> bool:
    mine = of(request)
    return mine is not None and mine.wants_memory


def test_a_prompt_that_could_never_fit_fails_at_once() -> None:
    simulation = one_pair(1, local=1.0)
    request = simulation.submit(random_prompts(1, 1, 300)[0], 4)
    simulation.run()
    (end,) = request.ends.values()
    assert (end.reason, "one request can hold 240 here" in end.error) == (EndReason.FAILED, True)
    simulation.assert_at_baseline()


@pytest.mark.parametrize("events", range(0, 60, 3))
@pytest.mark.parametrize("grace", [0, 5, None])
def test_drain_at_every_point_of_a_local_prompt(events: int, grace: int | None) -> None:
    simulation = Simulation(events, 4, pages=48, rows=6, chunk=8, local=1.0)
    request = simulation.submit(list(range(30)), 6)
    for _ in range(events):
        simulation.step()
    worker = request.decode
    worker.drain()
    for _ in range(grace or 0):
        simulation.step()
    if grace is not None:
        worker.inbox.post(RetractForDrain())
    simulation.run()
    assert worker.drained
    assert request.output == reference(request.prompt, 6)
    simulation.assert_at_baseline()


@pytest.mark.parametrize("events", range(2, 40, 3))
def test_cancel_at_every_point_of_a_local_prompt(events: int) -> None:
    simulation = one_pair(events, local=1.0)
    choices = simulation.submit_choices(3, list(range(40)), 6)
    other = submit(simulation, list(range(50, 90)), 6, local=False)
    for _ in range(events):
        simulation.step()
    simulation.cancel(choices[0], choices[0].decode)
    simulation.run()
    assert other.output == expected(other)
    simulation.assert_at_baseline()


def test_it_holds_memory_for_its_whole_prompt_or_none() -> None:
    """So nobody waits for memory that a half of another prompt holds."""
    simulation = one_pair(3, local=0.5, pages=40, rows=8, growth_min=0.0, growth_max=0.1)
    for prompt in random_prompts(3, 20, 60):
        simulation.submit(prompt, 8)
    seen = set()
    while simulation.step():
        for worker in simulation.decodes:
            seen |= {check_reservation(worker, one) for one in worker.context.requests.values()}
    assert seen == {"local", "handed over", "waits"}
    for request in simulation.submitted:
        assert request.output == expected(request)
    simulation.assert_at_baseline()


def check_reservation(worker: SimWorker, request: DecodeRequest) -> str:
    if request.lease is None:
        return "waits"
    held = request.lease
    pages = worker.kv_cache.shape.pages_for(request.input_len)
    assert len(held.pages(0)) + held.promised_pages[0] >= pages
    return "handed over" if isinstance(request, HandedOverRequest) else "local"
