"""Memory scenarios that need the roles, by number; see `tests.mem_cache.test_scenarios`."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvrelay.decode_worker.request import DecodeRequest
from kvrelay.decode_worker.stream import FromPeer
from kvrelay.engine.commands import Stop
from kvrelay.engine.outputs import EndReason
from kvrelay.engine.step import StepEnded
from kvrelay.kv_transfer.hand_over import DecodeState, Released
from tests.engine.simulation import SimRequest, Simulation, reference

CHUNK = 16


def one_pair(seed: int) -> Simulation:
    simulation = Simulation(seed, page_size=4, pages=60, rows=4, chunk=CHUNK)
    del simulation.prefills[1:], simulation.decodes[1:]
    simulation.workers = [*simulation.prefills, *simulation.decodes]
    return simulation


def step_until(simulation: Simulation, reached: Callable[[], bool]) -> None:
    while not reached():
        assert simulation.step(), "it never comes to this"


@pytest.mark.parametrize("seed", range(4))
def test_scenario_9_aborted_chunk_emits_nothing_when_its_forward_ends(seed: int) -> None:
    simulation = one_pair(seed)
    request = simulation.submit(list(range(40)), 4)
    prefill = request.prefill
    step_until(simulation, lambda: bool(prefill.steps) and prefill.steps[0].number == 2)
    simulation.cancel(request, prefill)
    prefill.turn()
    (pages, rows) = prefill.ledger.counts()
    assert (pages.held, pages.promised, pages.quarantined) == (0, 0, 8)
    assert (rows.held, rows.quarantined) == (0, 1)
    prefill.end_step()
    prefill.turn()
    (pages, rows) = prefill.ledger.counts()
    assert (pages.free, rows.free) == (pages.total, rows.total)
    simulation.run()
    assert not request.tokens
    assert {end.reason for end in request.ends.values()} == {EndReason.ABORTED}
    simulation.assert_at_baseline()


def has_result(request: SimRequest) -> bool:
    """The prompt is computed; its engine has not heard of it."""
    messages = request.prefill.inbox._messages
    ended = [message for message in messages if isinstance(message, StepEnded)]
    return any(computed.tokens for message in ended for computed in message.computed)


def has_verdict(request: SimRequest) -> bool:
    """The decode side may activate the request; its engine has not heard of it."""
    messages = request.decode.inbox._messages
    return any(isinstance(m, FromPeer) and isinstance(m.message, Released) for m in messages)


def is_in(request: SimRequest, state: DecodeState) -> bool:
    mine = request.decode.core.requests.get(request.key)
    return isinstance(mine, DecodeRequest) and mine.hand_over.state is state


POINTS: dict[str, Callable[[SimRequest], bool]] = {
    "computed": has_result,
    "announced": lambda request: is_in(request, DecodeState.ANNOUNCED),
    "read": lambda request: is_in(request, DecodeState.READ),
    "to be activated": has_verdict,
}


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("seed", range(3))
def test_scenario_10_drain_releases_a_finished_prefill_that_is_not_merged_yet(
    seed: int, point: str
) -> None:
    simulation = one_pair(seed)
    request = simulation.submit(list(range(40)), 6)
    step_until(simulation, lambda: POINTS[point](request))
    assert request.decode.ledger.page_counts()[0].held == 10
    for worker in simulation.workers:
        worker.inbox.post(Stop())
    simulation.run()
    for worker in simulation.workers:
        assert worker.engine.stopped
    assert request.output == reference(request.prompt, 6)[: len(request.output)]
    assert request.ends[request.decode.name].reason is EndReason.ABORTED
    simulation.assert_at_baseline()


@pytest.mark.parametrize("length", [CHUNK, CHUNK + 1, 40, 3 * CHUNK])
def test_scenario_46_no_token_is_sampled_from_a_chunk_but_the_last(length: int) -> None:
    simulation = one_pair(length)
    rng = random.Random(length)
    prompts = [[rng.randrange(97) for _ in range(length)] for _ in range(4)]
    requests = [simulation.submit(prompt, 3) for prompt in prompts]
    (prefill,) = simulation.prefills
    chunks: dict[str, list[tuple[int, bool]]] = {r.key.request_id: [] for r in requests}
    launch = prefill.launch

    def watch(step) -> None:
        for item in step.scheduled:
            chunks[item.request.key.request_id].append((item.num_tokens, item.sample))
        launch(step)

    prefill.launch = watch
    simulation.run()
    for request in requests:
        counts, samples = zip(*chunks[request.key.request_id], strict=True)
        assert sum(counts) == length
        assert list(samples) == [False] * (len(counts) - 1) + [True]
        assert len(counts) >= -(-length // CHUNK)
        assert request.output == reference(request.prompt, 3)
    simulation.assert_at_baseline()
