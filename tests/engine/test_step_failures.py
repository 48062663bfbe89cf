"""What a forward that fails, or fails for one of its requests, does to which requests."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from kvrelay.engine.config import Speculation
from kvrelay.engine.executor.failures import ForwardFailedError, WorkerBrokenError
from kvrelay.engine.executor.forward_thread import ForwardThread
from kvrelay.engine.executor.step import Executor, Step, StepEnded
from kvrelay.engine.scheduler.commands import GiveUp
from kvrelay.mem_cache.leases.publishing import PageCopy
from kvrelay.wire.output import EndReason, FailureReason
from kvrelay.wire.submit import RequestKey
from tests.engine.simulation import SimRequest, Simulation, SimWorker, count, reference


def together(seed: int, **options: Any) -> tuple[Simulation, list[SimRequest]]:
    """Enough requests at once that steps hold several."""
    simulation = Simulation(seed, page_size=4, pages=80, rows=8, chunk=32, **options)
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


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("seed", range(4))
def test_requests_of_a_forward_that_fails_go_on_alone(seed: int, side: str, overlap: bool) -> None:
    simulation, requests = together(seed, overlap=overlap)
    worker = until_several(simulation, side)
    lost = {item.request.key.request_id for item in worker.steps[0].scheduled}
    worker.fail_step()
    apart = 0
    while simulation.step():
        for step in [step for each in simulation.workers for step in each.steps]:
            suspects = [item.request for item in step.scheduled if item.request.alone]
            assert {suspect.key.request_id for suspect in suspects} <= lost
            assert not suspects or len(step.scheduled) == 1
            apart += bool(suspects)
    assert apart
    for request in requests:
        assert request.output == reference(request.prompt, request.max_tokens)
        assert request.alone == (request.key.request_id in lost)
    simulation.assert_at_baseline()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_broken_device_ends_the_worker_at_once(side: str) -> None:
    simulation, _ = together(1)
    worker = until_several(simulation, side)
    lost = {item.request.key for item in worker.steps[0].scheduled}
    worker.fail_step("CUDA error: an illegal memory access was encountered")
    with pytest.raises(WorkerBrokenError, match="the device is broken: RuntimeError: CUDA error"):
        worker.turn()
    assert said_why_it_ends(worker) == lost


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_forwards_that_fail_in_a_row_end_the_worker(side: str) -> None:
    simulation, _ = together(2, overlap=False, failed_forwards_limit=3)
    worker = until_several(simulation, side)
    for failures in (1, 2, 0, 1, 2, 3):
        while not worker.steps:
            if not simulation.step():
                simulation.submit([1, 2, 3], 8)
        if failures:
            worker.fail_step()
        else:
            worker.end_step()
        if failures == 3:
            with pytest.raises(WorkerBrokenError, match="3 forwards in a row have failed: "):
                worker.turn()
        else:
            worker.turn()


def test_a_forward_that_hangs_is_the_cause_of_its_requests_ends() -> None:
    simulation, _ = together(3)
    worker = until_several(simulation, "decode")
    hanging = {item.request.key for item in worker.steps[0].scheduled}
    worker.inbox.post(GiveUp("it hangs", hanging_step=worker.steps[0].number))
    with pytest.raises(WorkerBrokenError, match="it hangs"):
        worker.turn()
    assert said_why_it_ends(worker) == hanging


def test_a_forward_that_ends_while_it_is_given_up_is_no_fault_of_the_next_ones_requests() -> None:
    simulation, _ = together(3)
    worker = until_several(simulation, "decode")
    while len(worker.steps) < 2:
        assert simulation.step()
    hanging = worker.steps[0].number
    worker.end_step()
    worker.inbox.post(GiveUp("it hangs", hanging_step=hanging))
    with pytest.raises(WorkerBrokenError, match="it hangs"):
        worker.turn()
    assert worker.steps[0].number == hanging + 1
    assert not said_why_it_ends(worker)


def test_hashing_that_hangs_is_no_fault_of_any_request() -> None:
    simulation, _ = together(3)
    worker = until_several(simulation, "decode")
    worker.inbox.post(GiveUp("it hangs", hanging_step=None))
    with pytest.raises(WorkerBrokenError, match="it hangs"):
        worker.turn()
    assert not said_why_it_ends(worker)


def test_suspects_and_all_others_take_turns() -> None:
    simulation = Simulation(
        0, page_size=4, pages=80, rows=8, chunk=64, aggregated=True, workers=1, overlap=False
    )
    [worker] = simulation.workers
    suspects = [simulation.submit([n, 2, 3], 20, alone=True) for n in range(2)]
    others = [simulation.submit([n, 2, 3], 20) for n in range(2, 6)]
    steps: list[list[str]] = []
    while simulation.step():
        if worker.steps and (not steps or worker.steps[0].number > len(steps)):
            steps.append([item.request.key.request_id for item in worker.steps[0].scheduled])
    for request in suspects + others:
        assert request.output == reference(request.prompt, request.max_tokens)
    sizes = [len(step) for step in steps]
    # A prompt and a token in flight, of two suspects: after that all generate together.
    trial = 2 * (1 + worker.config.tokens_in_flight)
    assert sizes[: 2 * trial : 2] == [1] * trial
    assert max(sizes[2 * trial :]) == 6
    simulation.assert_at_baseline()


def until_several(simulation: Simulation, side: str) -> SimWorker:
    """A worker whose next forward computes several requests."""
    workers = simulation.prefills if side == "prefill" else simulation.decodes
    while not any(len(worker.steps[0].scheduled) > 1 for worker in workers if worker.steps):
        assert simulation.step()
    return next(w for w in workers if w.steps and len(w.steps[0].scheduled) > 1)


def said_why_it_ends(worker: SimWorker) -> set[RequestKey]:
    """The requests of which the worker said that a forward failed with them and others.

    To its router it drains besides, which costs no other request an attempt.
    """
    said = [step for step in worker.link.take_all() if step is not None]
    loads = [step.load for step in said if step.load is not None]
    assert loads[-1].draining
    ends = [(one.key, one.end) for step in said for one in step.outputs if one.end]
    return {key for key, end in ends if end.cause is FailureReason.FORWARD_FAILED}


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


def test_copies_that_fail_break_the_device() -> None:
    """Who needs them may be in no step yet: it would go on with what is in its page."""

    class Broken:
        def copy(self, copies) -> None:
            raise RuntimeError("injected")

        def wait(self) -> None:
            """Nothing runs."""

    ended: list[StepEnded[Any]] = []
    failures: list[str] = []
    thread: ForwardThread[Any] = ForwardThread(
        cast("Executor", Broken()), ended.append, failures.append
    )
    thread.launch(Step(1, (), (), (PageCopy(0, 1, 2),)))
    thread.close()
    [end] = ended
    assert isinstance(end.failure, ForwardFailedError)
    assert end.failure.breaks_device
    assert not failures
