"""How much memory a decode worker gives away before anybody computes for it, and to whom."""

from __future__ import annotations

import pytest

from kvrelay.decode_worker.request import HandedOverRequest
from kvrelay.engine.scheduler.commands import Wake
from kvrelay.kv_transfer.hand_over.states import DecodeState
from kvrelay.prefill_worker.prompt_queue import ASK_AHEAD
from tests.engine.simulation import SimRequest, Simulation, SimWorker, reference
from tests.engine.test_scenarios import random_prompts, step_until


class Watched:
    """Four prefill workers and one decode worker, and what the latter has granted."""

    def __init__(self, seed: int, grants_ahead: int) -> None:
        self.simulation = Simulation(seed, 4, 400, 64, 16, workers=4, grants_ahead=grants_ahead)
        del self.simulation.decodes[1:]
        del self.simulation.workers[5:]
        self.most_ahead = 0
        self.granted: list[SimRequest] = []
        """In the order of their grants."""

    def submit(self, prompt: list[int], prefill: int) -> SimRequest:
        """A request for this prefill worker."""
        workers, self.simulation.prefills = self.simulation.prefills, []
        self.simulation.prefills = [workers[prefill]]
        request = self.simulation.submit(prompt, 4)
        self.simulation.prefills = workers
        return request

    def run(self) -> None:
        while self.simulation.step():
            self._look()

    def _look(self) -> None:
        requests = self.simulation.decodes[0].context.requests.values()
        granted = [r for r in requests if has_grant(r)]
        self.most_ahead = max(self.most_ahead, sum(not r.hand_over.begun for r in granted))
        for one in granted:
            request = self.simulation.requests[one.key]
            if request not in self.granted:
                self.granted.append(request)


def has_grant(request: HandedOverRequest) -> bool:
    return request.hand_over.state not in (DecodeState.OPEN, DecodeState.ASKED)


@pytest.mark.parametrize("seed", range(4))
def test_grants_ahead_are_bounded_whoever_asks(seed: int) -> None:
    watched = Watched(seed, grants_ahead=3)
    requests = [watched.submit(p, n % 4) for n, p in enumerate(random_prompts(seed, 24, 20))]
    watched.run()
    assert watched.most_ahead == 3
    assert len(watched.granted) == 24
    for request in requests:
        assert request.output == reference(request.prompt, 4)
    watched.simulation.assert_at_baseline()


@pytest.mark.parametrize("seed", range(4))
def test_prefill_workers_take_turns(seed: int) -> None:
    """One that has many older requests leaves the others their part."""
    watched = Watched(seed, grants_ahead=2)
    prompts = random_prompts(seed, 20, 20)
    flood = [watched.submit(prompt, 0) for prompt in prompts[:16]]
    others = [watched.submit(prompt, 1 + n) for n, prompt in enumerate(prompts[16:19])]
    watched.run()
    # Each of the others waits for its ask to arrive, and for grants of the flood meanwhile.
    last = max(watched.granted.index(request) for request in others)
    assert last < len(flood), [watched.granted.index(request) for request in others]
    assert watched.most_ahead <= 2
    watched.simulation.assert_at_baseline()


def test_a_prompt_of_one_chunk_is_no_grant_ahead_while_it_is_computed() -> None:
    watched = Watched(0, grants_ahead=2)
    simulation = watched.simulation
    requests = [watched.submit(prompt, 0) for prompt in random_prompts(0, 9, 5)]
    simulation.can_end_step = lambda worker: False  # type: ignore[method-assign]
    watched.run()
    computed = [item for step in simulation.prefills[0].steps for item in step.scheduled]
    assert computed
    assert len(watched.granted) == 2 + len(computed)
    simulation.can_end_step = lambda worker: True  # type: ignore[method-assign]
    watched.run()
    assert watched.most_ahead == 2
    for request in requests:
        assert request.output == reference(request.prompt, 4)
    simulation.assert_at_baseline()


class Held:
    """A prefill worker has a prefix that the decode worker waits to read from a slow other one."""

    def __init__(self) -> None:
        self.simulation = Simulation(0, 4, 400, 64, 16, workers=2)
        [self.other, self.slow], [_, elsewhere] = self.simulation.prefills, self.simulation.decodes
        self.prefix = random_prompts(1, 1, 60)[0]
        self.submit(self.prefix, self.other, elsewhere)
        self.simulation.run()  # the other one has the prefix from now on
        self.simulation.can_end_step = lambda worker: worker is not self.slow  # type: ignore[method-assign]
        self.first = self.submit([*self.prefix, 1], self.slow)
        self.simulation.run()

    def submit(
        self, prompt: list[int], prefill: SimWorker, decode: SimWorker | None = None
    ) -> SimRequest:
        simulation = self.simulation
        prefills, decodes = simulation.prefills, simulation.decodes
        simulation.prefills, simulation.decodes = [prefill], [decode or decodes[0]]
        request = simulation.submit(prompt, 4)
        simulation.prefills, simulation.decodes = prefills, decodes
        return request

    def submit_like_it(self, number: int) -> list[SimRequest]:
        return [self.submit([*self.prefix, 2, n], self.other) for n in range(number)]

    def end(self, *requests: SimRequest) -> None:
        """All go on, and are right."""
        self.simulation.can_end_step = lambda worker: True  # type: ignore[method-assign]
        self.slow.inbox.post(Wake())
        self.simulation.run()
        for request in (self.first, *requests):
            assert request.output == reference(request.prompt, 4)
        self.simulation.assert_at_baseline()


def test_those_that_wait_for_a_prefix_keep_no_other_request_waiting() -> None:
    """More of them than one prefill worker asks for at once."""
    held = Held()
    waiting = held.submit_like_it(ASK_AHEAD + 2)
    held.simulation.run()
    unlike = held.submit(random_prompts(2, 1, 30)[0], held.other)
    held.simulation.run()
    assert unlike.output == reference(unlike.prompt, 4)
    assert not any(request.output for request in [held.first, *waiting])
    held.end(*waiting, unlike)


def test_those_that_wait_for_a_prefix_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more than the bound waits for nobody, and then those find what it has published."""
    monkeypatch.setattr("kvrelay.decode_worker.grants.MOST_HELD", 3)
    held, most = Held(), 0
    requests = held.submit_like_it(ASK_AHEAD + 4)
    while held.simulation.step():
        live = held.simulation.decodes[0].context.requests.values()
        most = max(most, sum(request.hand_over.is_held for request in live))
    assert most == 3
    assert all(request.output for request in requests)
    assert not held.first.output
    held.end(*requests)


@pytest.mark.parametrize("seed", range(4))
def test_asks_are_granted_under_a_steady_stream_of_local_prompts(seed: int) -> None:
    """Two of these always wait for memory, of which there is too little."""
    simulation = Simulation(seed, 4, 40, 8, 16, workers=1)
    asked = [simulation.submit(prompt, 4) for prompt in random_prompts(seed, 6, 60)]
    simulation.local = 1.0
    stream: list[SimRequest] = []
    for prompt in random_prompts(seed + 9, 60, 60):
        stream.append(simulation.submit(prompt, 4))
        step_until(simulation, lambda: sum(not one.output for one in stream) < 3)
        if all(request.output for request in asked):
            break
    assert all(request.output for request in asked), len(stream)
    simulation.run()
    for request in [*asked, *stream]:
        assert request.output == reference(request.prompt, 4)
    simulation.assert_at_baseline()
