"""Scenarios 32 to 41: what ends a hand-over early, by number; see `tests.engine.test_scenarios`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from kvrelay.decode_worker.request import HandedOverRequest
from kvrelay.engine.scheduler.commands import Wake
from kvrelay.kv_transfer.hand_over.states import DecodeState, PrefillState
from kvrelay.kv_transfer.pull import Pull, PullState
from kvrelay.prefill_worker.request import PrefillRequest
from kvrelay.wire.hand_over import (
    Announce,
    Ask,
    Begun,
    Done,
    Ended,
    Grant,
    Held,
    Released,
    Sequenced,
)
from kvrelay.wire.output import EndReason
from tests.engine.simulation import SimRequest, Simulation, reference
from tests.engine.test_scenarios import has_verdict, is_in, one_pair, random_prompts, step_until


def assert_right(*requests: SimRequest) -> None:
    for request in requests:
        assert request.output == reference(request.prompt, request.max_tokens)


def reads_of(request: SimRequest) -> list[tuple[Pull, Callable[[Pull], None]]]:
    """Those of a decode worker that serves nobody else."""
    return list(request.decode.agent.ordered)


def quarantined(request: SimRequest) -> dict[str, float]:
    """Pages in quarantine on its decode worker, by what metrics and load say they wait for."""
    metrics = {
        sample.labels["reason"]: sample.value
        for metric in request.decode.context.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "kvrelay_quarantined_pages" and sample.value
    }
    load = request.decode.scheduler.load()
    assert {one.reason: one.pages for one in load.quarantine} == metrics
    return metrics


def holds_on_to_reads(simulation: Simulation) -> None:
    """No read ends until `agent.ordered` is what the simulation sees again."""
    simulation.end_read = lambda worker: None  # type: ignore[method-assign]


AFTER_THE_PULL: dict[str, Callable[[SimRequest], bool]] = {
    "all is read": lambda request: is_in(request, DecodeState.READ),
    "to be activated": has_verdict,
}


@pytest.mark.parametrize("point", AFTER_THE_PULL)
@pytest.mark.parametrize("seed", range(4))
def test_scenario_32_abort_after_the_pull_before_it_runs(seed: int, point: str) -> None:
    simulation = one_pair(seed)
    prompt, other = random_prompts(seed, 2, 30)
    request = simulation.submit(prompt, 8)
    step_until(simulation, lambda: AFTER_THE_PULL[point](request))
    simulation.cancel(request, request.decode)
    request.decode.turn()
    (pages, rows) = request.decode.kv_cache.audit.counts()
    assert (pages.held, pages.promised, pages.quarantined, rows.held) == (0, 0, 0, 0)
    later = simulation.submit(other, 8)
    simulation.run()
    assert request.ends[request.decode.name].reason is EndReason.ABORTED
    assert_right(later)
    simulation.assert_at_baseline()


@pytest.mark.parametrize("seed", range(4))
def test_scenario_32_abort_while_retracted(seed: int) -> None:
    """It is on its way through the workers again, with what it has emitted."""
    simulation = one_pair(seed, pages=18, growth_min=0.0, growth_max=0.0, cached=False)
    first, second = (simulation.submit(prompt, 24) for prompt in random_prompts(seed, 2, 20))
    step_until(simulation, lambda: bool(first.retractions or second.retractions))
    retracted, other = (first, second) if first.retractions else (second, first)
    for worker in (retracted.prefill, retracted.decode):
        simulation.cancel(retracted, worker)
    simulation.run()
    assert retracted.output == reference(retracted.prompt, 24)[: len(retracted.output)]
    assert_right(other)
    simulation.assert_at_baseline()


def on_prefill(request: SimRequest) -> PrefillRequest | None:
    mine = request.prefill.context.requests.get(request.key)
    return mine if isinstance(mine, PrefillRequest) else None


def prefill_is(request: SimRequest, *states: PrefillState) -> bool:
    mine = on_prefill(request)
    return mine is not None and mine.hand_over.state in states


def between_chunks(request: SimRequest) -> bool:
    mine = on_prefill(request)
    return mine is not None and 0 < mine.kv_written_len < mine.input_len


ON_PREFILL: dict[str, Callable[[SimRequest], bool]] = {
    "waiting": lambda request: prefill_is(request, PrefillState.QUEUED, PrefillState.ASKED),
    "between chunks": between_chunks,
    "all is announced": lambda request: prefill_is(request, PrefillState.ANNOUNCED),
}


@pytest.mark.parametrize("point", ON_PREFILL)
@pytest.mark.parametrize("seed", range(4))
def test_scenario_33_abort_on_the_prefill_side_is_heard_on_the_other(seed: int, point: str) -> None:
    simulation = one_pair(seed)
    simulation.cancel_on_other_worker = lambda request, worker: None  # type: ignore[method-assign]
    prompt, other = random_prompts(seed, 2, 60)
    request = simulation.submit(prompt, 8)
    step_until(simulation, lambda: bool(simulation.pairs) and ON_PREFILL[point](request))
    simulation.cancel(request, request.prefill)
    request.prefill.turn()
    assert request.prefill.kv_cache.audit.page_counts()[0].held == 0
    later = simulation.submit(other, 8)
    simulation.run()
    assert request.ends[request.decode.name].reason is EndReason.ABORTED
    assert_right(later)
    simulation.assert_at_baseline()


@pytest.mark.parametrize("seed", range(6))
def test_scenario_34_abort_while_a_read_writes_its_pages(seed: int) -> None:
    """Others come at once; the read goes on for as long as it likes."""
    simulation = one_pair(seed, pages=30, rows=6, cached=False)
    read, prompts = simulation.end_read, random_prompts(seed, 4, 22)
    request = simulation.submit(prompts[0], 8)
    holds_on_to_reads(simulation)
    step_until(simulation, lambda: bool(reads_of(request)))
    late = reads_of(request)
    written = {int(page) for pull, _ in late for page in pull.local_pages[0]}
    for worker in (request.prefill, request.decode):
        simulation.cancel(request, worker)
    request.decode.turn()
    others = [simulation.submit(prompt, 8) for prompt in prompts[1:]]

    def read_others(worker: Any) -> None:
        """The late ones only when there is nothing else to do."""
        mine = [entry for entry in worker.agent.ordered if entry in late]
        worker.agent.ordered = [entry for entry in worker.agent.ordered if entry not in late]
        if worker.agent.ordered:
            read(worker)
        worker.agent.ordered += mine

    simulation.end_read = read_others  # type: ignore[method-assign]
    step_until(simulation, lambda: all(len(other.ends) == 2 for other in others))
    (counts,) = request.decode.kv_cache.audit.page_counts()
    assert counts.quarantined >= len(written) > 0
    assert_right(*others)
    simulation.end_read = read  # type: ignore[method-assign]
    simulation.run()
    simulation.assert_at_baseline()


def test_a_read_that_fails_after_its_request_connects_anew() -> None:
    """No request is left that would notice, and only a new connection brings its pages back."""
    simulation = one_pair(1, cached=False)
    (prompt,) = random_prompts(1, 1, 60)
    request = simulation.submit(prompt, 8)
    holds_on_to_reads(simulation)
    step_until(simulation, lambda: bool(reads_of(request)))
    late = reads_of(request)
    request.decode.agent.ordered = []
    for worker in (request.prefill, request.decode):
        simulation.cancel(request, worker)
    request.decode.turn()
    assert not request.decode.connected_anew
    for pull, on_end in late:
        pull.state, pull.error = PullState.FAILED, "injected"
        on_end(pull)
    request.decode.turn()
    assert set(request.decode.connected_anew) == {request.prefill.name}
    assert request.decode.kv_cache.audit.page_counts()[0].quarantined > 0
    for pull, _ in late:
        pull.settle()
    simulation.run()
    simulation.assert_at_baseline()


@pytest.mark.parametrize("seed", range(6))
def test_scenario_35_one_read_fails_while_another_runs(seed: int) -> None:
    simulation = one_pair(seed, cached=False)
    read = simulation.end_read
    (prompt,) = random_prompts(seed, 1, 60)
    request = simulation.submit(prompt, 8)
    holds_on_to_reads(simulation)
    step_until(simulation, lambda: len(reads_of(request)) >= 2)
    (failing, on_end), *running = reads_of(request)
    request.decode.agent.ordered = running
    failing.state, failing.error = PullState.FAILED, "injected"
    failing.settle()
    on_end(failing)
    request.decode.turn()
    (counts,) = request.decode.kv_cache.audit.page_counts()
    # The pages of every read but the one that has ended for good wait.
    assert counts.quarantined >= sum(pull.num_pages for pull, _ in running) > 0
    simulation.collect_outputs()
    end = request.ends[request.decode.name]
    assert (end.reason, end.cause is not None) == (EndReason.FAILED, True)
    assert "injected" in end.error
    simulation.end_read = read  # type: ignore[method-assign]
    simulation.run()
    simulation.assert_at_baseline()


def test_scenario_38_a_prompt_that_fits_the_prefill_side_alone_ends_with_a_clear_error() -> None:
    simulation = one_pair(38, pages=20)
    prompt, other = random_prompts(38, 2, 60)
    big, small = simulation.submit(prompt, 40), simulation.submit(other, 8)
    simulation.run()
    end = big.ends[big.decode.name]
    assert (end.reason, end.cause is not None) == (EndReason.FAILED, False)
    assert end.error == "99 tokens: one request can hold 80 here"
    assert_right(small)
    simulation.assert_at_baseline()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("length", [250, 256, 257])
def test_scenario_39_chunks_that_end_inside_pages_let_every_page_travel_once(
    seed: int, length: int
) -> None:
    """p=16, chunks of 100 tokens."""
    simulation = one_pair(seed, page_size=16, chunk=100, pages=40)
    (prompt,) = random_prompts(seed, 1, length)
    request = simulation.submit(prompt, 4)
    simulation.run()
    assert_right(request)
    for side in ("local_pages", "remote_pages"):
        moved = [int(page) for pull in simulation.pulls for page in getattr(pull, side)[0]]
        assert len(moved) == len(set(moved)) == -(-length // 16)
    simulation.assert_at_baseline()


LOST = [Ask, Grant, Announce, Done, Released, Ended]


@pytest.mark.parametrize("kind", LOST, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("seed", range(4))
def test_scenario_41_a_lost_message_leaves_nobody_waiting(seed: int, kind: type) -> None:
    simulation = one_pair(seed, worker_timeout=15.0)
    carry = simulation.carry_messages
    lost: list[Any] = []

    def lose(pair: Any) -> None:
        for stream in (pair[1], pair[3]):
            kept: list[Any] = []
            for said in stream.take_all():
                is_it = isinstance(said, Sequenced) and isinstance(said.message, kind)
                if kind is Announce and is_it:
                    is_it = bool(said.message.first_tokens)  # the last
                (lost if is_it and not lost else kept).append(said)
            for said in kept:
                stream.deliver(said) if said is not None else stream.close()
        carry(pair)

    simulation.carry_messages = lose  # type: ignore[method-assign]
    if kind is Ended:
        simulation.cancel_on_other_worker = lambda request, worker: None  # type: ignore[method-assign]
    (prompt,) = random_prompts(seed, 1, 40)
    request = simulation.submit(prompt, 8)
    if kind is Ended:
        step_until(simulation, lambda: between_chunks(request))
        simulation.cancel(request, request.prefill)
    simulation.run()
    assert lost
    assert request.decode.name not in request.ends, (
        "nobody has noticed: that is what heartbeats are for"
    )
    for silent in (False, True):
        _time_passes(request, silent=silent)
        simulation.run()
    assert request.ends[request.decode.name].reason in (EndReason.FAILED, EndReason.ABORTED)
    assert request.ends.keys() == {request.prefill.name, request.decode.name}
    simulation.assert_at_baseline()
    again = simulation.submit(prompt, 8)
    simulation.run()
    assert_right(again)


@pytest.mark.parametrize("kind", [Held, Begun], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("seed", range(3))
def test_scenario_41_the_message_after_a_lost_one_tells(seed: int, kind: type) -> None:
    """Nobody waits for these two, and the attempt ends all the same."""
    simulation = one_pair(seed, pages=120, worker_timeout=15.0)
    carry = simulation.carry_messages
    lost: list[Any] = []

    def lose(pair: Any) -> None:
        for stream in (pair[1], pair[3]):
            for said in stream.take_all():
                if not lost and isinstance(said, Sequenced) and isinstance(said.message, kind):
                    lost.append(stream.key.of_choice(0))
                elif said is None:
                    stream.close()
                else:
                    stream.deliver(said)
        carry(pair)

    simulation.carry_messages = lose  # type: ignore[method-assign]
    (prompt,) = random_prompts(seed, 1, 60)
    requests = [simulation.submit([*prompt, number], 8) for number in range(3)]
    simulation.run()
    (loser,) = [request for request in requests if request.key.of_choice(0) in lost]
    ends = loser.ends.values()
    assert any("1 messages were lost" in end.error for end in ends if end.error)
    assert_right(*(request for request in requests if request is not loser))
    simulation.assert_at_baseline()


def _time_passes(request: SimRequest, *, silent: bool) -> None:
    """A heartbeat is due; who has not answered one by then is silent."""
    request.decode.scheduler.heartbeats.check.next_at = -math.inf
    for one in request.decode.context.requests.values():
        if silent:
            assert isinstance(one, HandedOverRequest)
            one.stream.sequencer.heard_at = -math.inf
    request.decode.inbox.post(Wake())


def test_a_peers_silence_counts_from_the_opening_of_the_stream() -> None:
    """The handshake before it may take longer than a peer may be silent."""
    simulation = one_pair(1, worker_timeout=15.0)
    request = simulation.submit(list(range(40)), 8)
    step_until(simulation, lambda: bool(request.decode.opened))
    _time_passes(request, silent=True)
    request.decode.turn()
    assert not request.ends
    simulation.run()
    assert_right(request)
    simulation.assert_at_baseline()


def test_a_decode_worker_that_is_silent_holds_no_page_of_the_other() -> None:
    simulation = one_pair(1, worker_timeout=15.0)
    request = simulation.submit(list(range(40)), 8)
    step_until(simulation, lambda: prefill_is(request, PrefillState.ANNOUNCED))
    hand_overs = request.prefill.scheduler.hand_overs
    hand_overs.check.next_at = -math.inf
    (stream,) = hand_overs.streams
    stream.sequencer.heard_at = -math.inf
    request.prefill.inbox.post(Wake())
    request.prefill.turn()
    assert request.prefill.kv_cache.audit.page_counts()[0].held == 0
    simulation.run()
    end = request.ends[request.decode.name]
    assert (end.reason, end.cause is not None) == (EndReason.FAILED, True)
    simulation.assert_at_baseline()


def test_a_read_that_does_not_end_costs_its_attempt_and_its_pages_stay_fenced() -> None:
    simulation = one_pair(1, worker_timeout=15.0)
    read = simulation.end_read
    request = simulation.submit(list(range(40)), 8)
    holds_on_to_reads(simulation)
    step_until(simulation, lambda: is_in(request, DecodeState.ANNOUNCED))
    (mine,) = request.decode.context.requests.values()
    assert isinstance(mine, HandedOverRequest)
    mine.read_at = -math.inf
    _time_passes(request, silent=False)
    request.decode.turn()
    assert request.decode.kv_cache.audit.page_counts()[0].quarantined == 10
    assert quarantined(request) == {"read": 10}
    simulation.end_read = read  # type: ignore[method-assign]
    simulation.run()
    end = request.ends[request.decode.name]
    assert (end.reason, end.error) == (EndReason.FAILED, "a read has not ended for 60 s")
    simulation.assert_at_baseline()


def test_pages_of_a_failed_read_come_back_when_its_fence_passes_and_nothing_else_happens() -> None:
    simulation = one_pair(1)
    request = simulation.submit(list(range(40)), 8)
    step_until(simulation, lambda: bool(reads_of(request)))
    simulation.fail_read()
    agent = request.decode.agent
    failed = [pull for pull, _ in agent.ordered if pull.state is PullState.FAILED]
    agent.ordered = [entry for entry in agent.ordered if entry[0] not in failed]
    simulation.run()
    assert request.decode.kv_cache.audit.page_counts()[0].quarantined == 10
    assert quarantined(request) == {"failed_read": 10}
    for pull in failed:
        pull.settle()
    agent.on_fences_passed()
    simulation.run()
    simulation.assert_at_baseline()
