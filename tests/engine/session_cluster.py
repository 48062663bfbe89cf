"""Simulated clusters that have sessions, and what tests ask of their workers."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.engine.conversations import Conversation
from tests.engine.simulation import SimRequest, Simulation, SimWorker
from tests.engine.test_scenarios import one_pair

FIRST = random.Random(1).choices(range(97), k=26)
SECOND = random.Random(2).choices(range(97), k=11)
KINDS = {
    "aggregated": {"aggregated": True},
    "local": {},
    "pair": {},
}
MODES = pytest.mark.parametrize("kind", KINDS)
OVERLAP = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "sync"])


def cluster(kind: str, seed: int = 0, **options: Any) -> Simulation:
    return one_pair(seed, **{**KINDS[kind], **options})


def place(simulation: Simulation, kind: str) -> tuple[SimWorker, SimWorker]:
    decode = simulation.decodes[0]
    return (simulation.prefills[0], decode) if kind == "pair" else (decode, decode)


def pools(worker: SimWorker) -> Any:
    return worker.kv_cache.audit.counts()[0]


def rows(worker: SimWorker) -> Any:
    return worker.kv_cache.audit.counts()[-1]


def turns(worker: SimWorker, start: str) -> int:
    return sample(worker, "session_turns", start=start)


def ends(worker: SimWorker, reason: str) -> int:
    return sample(worker, "session_ends", reason=reason)


def sample(worker: SimWorker, name: str, **labels: str) -> int:
    labels |= {"role": worker.role_name, "worker": worker.name, "model": "sim"}
    registry = worker.context.metrics.registry
    return int(registry.get_sample_value(f"kvrelay_{name}_total", labels) or 0)


def read_from(simulation: Simulation, worker: SimWorker) -> int:
    """Pages that were read from a worker."""
    return sum(pull.num_pages for pull in simulation.pulls if pull.peer == worker.name)


def generating(request: SimRequest) -> bool:
    mine = request.decode.context.requests.get(request.key)
    return mine is not None and mine.every_step is not None


def finish(simulation: Simulation, *conversations: Conversation) -> None:
    for one in conversations:
        one.take()
        one.close()
    simulation.run()
    simulation.assert_at_baseline()
