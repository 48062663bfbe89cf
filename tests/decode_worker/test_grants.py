"""How much memory a decode worker gives away before anybody computes for it, and to whom."""

from __future__ import annotations

import pytest

from kvrelay.decode_worker.request import HandedOverRequest
from kvrelay.kv_transfer.hand_over.states import DecodeState
from tests.engine.simulation import SimRequest, Simulation, reference
from tests.engine.test_scenarios import random_prompts


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
