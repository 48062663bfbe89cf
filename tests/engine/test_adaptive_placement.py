"""What adaptive placement does for a pair of workers, in virtual time: whole engines, one clock."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvrelay.engine.scheduler.commands import Submit
from kvrelay.router.placement.estimate import ExpectedPrompts
from kvrelay.router.placement.local_prompts import Side, decide
from kvrelay.wire.submit import SubmitRequest
from tests.engine.simulation import SimRequest, SimWorker, reference
from tests.engine.simulation.clockwork import Clockwork
from tests.engine.test_itl_target import CHUNK, ROW_SECONDS, STEP_SECONDS, OneWorker, prompt_of


class Pair(OneWorker):
    """One worker of each kind, or aggregated ones, and clients that each ask again at once.

    Args:
        kind: ``strict`` or ``adaptive``: who of a pair computes prompts; or ``aggregated``.
        shape: tokens of each prompt, and of each output.
    """

    def __init__(self, kind: str, shape: tuple[int, int], workers: int = 1, **options: Any) -> None:
        Clockwork.__init__(
            self,
            *(1, 16, 4000, 64, CHUNK),
            aggregated=kind == "aggregated",
            workers=workers,
            audit_pages=False,
            **options,
        )
        self.kind, self.shape = kind, shape
        self.rng = random.Random(0)
        self.left = 0
        self.by_decode = 0

    def ask(self) -> SimRequest:
        self.left -= 1
        return self.submit(prompt_of(self.rng, self.shape[0]), self.shape[1])

    def ended(self, request: SimRequest) -> None:
        super().ended(request)
        if self.left > 0:
            self.ask()

    def _place(self, input_ids: list[int], max_tokens: int) -> tuple[SimWorker, SimWorker]:
        if self.kind == "aggregated":
            best = min(self.decodes, key=lambda worker: side(worker).num_requests)
            return best, best
        (prefill,), (decode,) = self.prefills, self.decodes
        if self.kind == "strict":
            return prefill, decode
        decision = decide(len(input_ids), side(prefill), side(decode))
        self.by_decode += decision.by_decode
        return (decode if decision.by_decode else prefill), decode


def side(worker: SimWorker) -> Side:
    """What a router would know of it that has just heard of its load."""
    load, sent = worker.scheduler.load(), submissions(worker)
    prompts = [len(one.input_ids) for one in sent if one.prefill is None]
    num_requests = load.waiting_requests + load.running_requests + len(sent)
    return Side(ExpectedPrompts(worker.role_name, load, prompts), 0, num_requests)


def submissions(worker: SimWorker) -> list[SubmitRequest]:
    """Those that were sent to a worker and did not arrive yet."""
    return [message.submission for message in worker.inbox if isinstance(message, Submit)]


@dataclass(frozen=True)
class Served:
    tokens_per_second: float
    ttft: float
    """Seconds, the median."""
    itl: float
    """Seconds, the 99th percentile."""
    by_decode: float
    """The part of the prompts that the decode worker computed."""


def serve(
    kind: str, shape: tuple[int, int], clients: int, *, rounds: int = 4, **options: Any
) -> Served:
    """Closed loop of so many clients, each of which asks so many times."""
    simulation = Pair(kind, shape, **options)
    for _ in range(4):  # what the workers learn from
        simulation.ask()
        simulation.run_until(simulation.clock + 5)
    simulation.by_decode = 0
    begun, simulation.left = simulation.clock, clients * rounds
    first = len(simulation.submitted)
    for _ in range(clients):
        simulation.ask()
    simulation.run_until(simulation.clock + 600)
    asked = simulation.submitted[first:]
    for request in asked[:4]:
        assert request.output == reference(request.prompt, request.max_tokens)
    simulation.assert_at_baseline()
    end = max(simulation.ended_at[one] for one in asked)
    moments = [simulation.emitted_at[one] for one in asked]
    return Served(
        len(asked) * shape[1] / (end - begun),
        float(np.median([m[0] - one.arrived for m, one in zip(moments, asked, strict=True)])),
        float(np.percentile(np.concatenate([np.diff(m) for m in moments]), 99)),
        simulation.by_decode / len(asked),
    )


def test_long_prompts_are_computed_by_both_workers() -> None:
    shape, clients = (1024, 64), 8
    strict, adaptive = (serve(kind, shape, clients, rounds=2) for kind in ("strict", "adaptive"))
    assert 0.2 < adaptive.by_decode < 0.6
    assert adaptive.tokens_per_second > 1.25 * strict.tokens_per_second
    assert adaptive.ttft < 0.6 * strict.ttft
    # 11 steps of one request, as many prompts wait.
    assert adaptive.itl < 1.15 * 11 * (STEP_SECONDS + ROW_SECONDS)


@pytest.mark.parametrize("clients", [8, pytest.param(32, marks=pytest.mark.slow)])
def test_a_decode_worker_with_enough_to_do_is_left_alone(clients: int) -> None:
    shape = (256, 128)
    strict, adaptive = serve("strict", shape, clients), serve("adaptive", shape, clients)
    assert adaptive.by_decode < 0.1
    assert adaptive.tokens_per_second > 0.97 * strict.tokens_per_second
    assert adaptive.itl < 1.1 * strict.itl


def test_one_client_finds_the_decode_worker_idle() -> None:
    adaptive = serve("adaptive", (256, 128), 1)
    assert adaptive.by_decode == 1
    assert adaptive.ttft < 1.1 * serve("strict", (256, 128), 1).ttft


@pytest.mark.slow
def test_long_chunks_serve_many_long_prompts_sooner() -> None:
    """The default bound while long prompts wait, and half of that."""
    shape, clients, half = (1024, 64), 32, 8e3 * (STEP_SECONDS + ROW_SECONDS)
    halved = serve("aggregated", shape, clients, rounds=3, itl_target=half)
    served = serve("aggregated", shape, clients, rounds=3)
    assert served.tokens_per_second > 1.04 * halved.tokens_per_second
    assert served.ttft < 0.7 * halved.ttft
