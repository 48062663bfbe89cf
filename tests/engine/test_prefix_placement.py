"""Requests that share prefixes, placed by the router's placement on real schedulers."""

from __future__ import annotations

import random
import statistics
from collections import Counter

import pytest

from kvrelay.wire.worker_info import WorkerRole
from tests.engine.simulation import reference
from tests.engine.simulation.placed import PlacedClockwork, ttfts
from tests.pairwise import few

PAGE_SIZE = 64


def cluster(prefix_entries: int, **options) -> PlacedClockwork:
    return PlacedClockwork(
        0,
        PAGE_SIZE,
        pages=120,
        rows=16,
        chunk=256,
        workers=4,
        audit_pages=False,
        prefix_entries=prefix_entries,
        **options,
    )


def hit_share(simulation: PlacedClockwork) -> float:
    cached = sum(request.cached_tokens for request in simulation.submitted)
    return cached / sum(len(request.prompt) for request in simulation.submitted)


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(97) for _ in range(length)]


def converse(simulation: PlacedClockwork, number: int, turns: int) -> None:
    """Conversations side by side, each turn of which has all before it in its prompt."""
    rng = random.Random(1)
    histories = [prompt(rng, 320) for _ in range(number)]
    for _ in range(turns):
        rng.shuffle(histories)
        for history in histories:
            simulation.submit(list(history), 4)
            simulation.run_until(simulation.clock + rng.expovariate(15))
            history += prompt(rng, 90)
    simulation.run_until(simulation.clock + 600)


def test_conversations_find_their_prefixes_and_their_first_tokens_earlier() -> None:
    by_load, by_prefix = cluster(0), cluster(10_000)
    for simulation in (by_load, by_prefix):
        converse(simulation, number=10, turns=4)
    assert hit_share(by_prefix) > 1.5 * hit_share(by_load)
    assert hit_share(by_prefix) > 0.6
    assert statistics.mean(ttfts(by_prefix)) < 0.8 * statistics.mean(ttfts(by_load))
    expected = by_prefix.expected_hits[WorkerRole.PREFILL]
    found = sum(request.cached_tokens for request in by_prefix.submitted)
    assert abs(expected - found) < 0.1 * found
    for request in by_prefix.submitted:
        assert request.output == reference(request.prompt, request.max_tokens)
    for simulation in (by_load, by_prefix):
        simulation.assert_at_baseline()


@few(1)
@pytest.mark.parametrize("aggregated", [False, True])
def test_one_hot_prefix_does_not_pile_all_requests_on_one_worker(aggregated) -> None:
    """Requests come as fast as four workers compute what is not cached."""
    simulation, rng = cluster(10_000, aggregated=aggregated), random.Random(2)
    hot = prompt(rng, 640)
    for _ in range(100):
        simulation.submit([*hot, *prompt(rng, 130)], 8)
        simulation.run_until(simulation.clock + rng.expovariate(110))
    simulation.run_until(simulation.clock + 600)
    for side in ("prefill", "decode"):
        took = Counter(getattr(request, side).name for request in simulation.submitted)
        assert len(took) == 4, took
        assert max(took.values()) < 50, took
    # Each side computes the prefix once, or reads it: the rest is found.
    assert hit_share(simulation) > 0.7
    simulation.assert_at_baseline()
