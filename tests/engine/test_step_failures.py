"""What a forward that fails, or fails for one of its requests, does to which requests."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from kvrelay.engine.config import Speculation
from kvrelay.engine.executor.step import Executor, ForwardThread, Step
from kvrelay.mem_cache.sharing import PageCopy
from kvrelay.wire.output import EndReason
from tests.engine.simulation import SimRequest, Simulation, SimWorker, count, reference


def together(seed: int) -> tuple[Simulation, list[SimRequest]]:
    """Enough requests at once that steps hold several."""
    simulation = Simulation(seed, page_size=4, pages=80, rows=8, chunk=32)
    rng = random.Random(seed)
    prompts = [[rng.randrange(97) for _ in range(rng.randint(1, 20))] for _ in range(12)]
    return simulation, [simulation.submit(prompt, 8) for prompt in prompts]


def worker_of(request: SimRequest, side: str) -> SimWorker:
    return request.prefill if side == "prefill" else request.decode


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("seed", range(4))
def test_a_row_without_a_token_fails_its_request_alone(seed: int, side: str) -> None:
    simulation, requests = together(seed)
    victim = requests[5]
    worker_of(victim, side).broken.add(victim.key)
    simulation.run()
    end = victim.ends[worker_of(victim, side).name]
    assert end.reason is EndReason.FAILED
    assert end.error == "the forward failed: the model's logits are not finite: nan"
    # The prefill worker gives the first token.
    assert victim.output == reference(victim.prompt, 1)[: 0 if side == "prefill" else 1]
    for request in requests:
        if request is not victim:
            assert request.output == reference(request.prompt, request.max_tokens)
    simulation.assert_at_baseline()


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("seed", range(4))
def test_a_forward_that_fails_takes_its_own_requests_along(seed: int, side: str) -> None:
    simulation, requests = together(seed)
    workers = simulation.prefills if side == "prefill" else simulation.decodes
    while not any(len(worker.steps[0].scheduled) > 1 for worker in workers if worker.steps):
        assert simulation.step()
    worker = next(w for w in workers if w.steps and len(w.steps[0].scheduled) > 1)
    lost = {item.request.key for item in worker.steps[0].scheduled}
    worker.fail_step()
    simulation.run()
    for request in requests:
        if request.key in lost:
            assert request.ends[worker.name].reason is EndReason.FAILED
        else:
            assert request.output == reference(request.prompt, request.max_tokens)
    simulation.assert_at_baseline()


def test_drafts_without_any_token_fail_their_request_alone() -> None:
    simulation = Simulation(
        0, page_size=4, pages=80, rows=8, chunk=32, speculation=Speculation.NGRAM
    )
    victim = simulation.submit([1, 2, 3], 8)
    victim.decode.broken.add(victim.key)
    simulation.run()
    assert victim.ends[victim.decode.name].reason is EndReason.FAILED
    assert count(victim.decode, "draft_tokens") > 0
    assert count(victim.decode, "accepted_draft_tokens") == 0
    simulation.assert_at_baseline()


def test_copies_that_fail_end_the_forward_thread() -> None:
    """Who needs them may be in no step yet: it would go on with what is in its page."""

    class Broken:
        def copy(self, copies) -> None:
            raise RuntimeError("injected")

    ended: list[object] = []
    failures: list[str] = []
    thread: ForwardThread[Any] = ForwardThread(
        cast("Executor", Broken()), ended.append, failures.append
    )
    thread.launch(Step(1, (), (), (PageCopy(0, 1, 2),)))
    thread.close()
    assert failures == ["RuntimeError: injected"]
    assert not ended
