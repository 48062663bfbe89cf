"""Thousands of requests under a virtual clock, with memory too small for what comes at once."""

from __future__ import annotations

import random

import pytest

from kvrelay.engine.config import Speculation
from kvrelay.wire.output import EndReason
from kvrelay.wire.submit import SamplingParams
from tests.engine.simulation import SimRequest, count, reference
from tests.engine.simulation.clockwork import Clockwork
from tests.pairwise import few

SYSTEM_PROMPTS = [random.Random(i).choices(range(97), k=48) for i in range(6)]


def one_request(simulation: Clockwork, rng: random.Random) -> SimRequest:
    prompt = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.5 else []
    length = rng.choice((4, 12, 40, 120))
    prompt = prompt + [rng.randrange(97) for _ in range(length)]
    # One in fifty can never fit.
    most = rng.randint(1, 60) if rng.random() < 0.98 else 500
    sampling = SamplingParams(temperature=rng.choice((0, 1)), seed=rng.randrange(1000))
    return simulation.submit(prompt, most, rng.choice((0, 0, 0, 1)), sampling)


LONG = [pytest.mark.slow, pytest.mark.timeout(1200)]
"""Most of a minute of one core: on a busy machine that takes many."""


@few(1)
@pytest.mark.parametrize(
    ("seed", "number", "aggregated", "speculation", "windows"),
    [
        pytest.param(1, 100, False, Speculation.NONE, (None,), id="pair"),
        pytest.param(2, 250, True, Speculation.NGRAM, (None, 24), id="aggregated-hybrid"),
        *(
            pytest.param(3, number, aggregated, speculation, windows, marks=LONG)
            for number, aggregated, speculation, windows in (
                (1000, False, Speculation.NONE, (None,)),
                (2000, False, Speculation.NGRAM, (None, 24)),
                (1000, False, Speculation.NONE, (24,)),
                (1000, True, Speculation.NGRAM, (None,)),
                (1000, True, Speculation.NONE, (None, 24)),
                (1000, True, Speculation.NGRAM, (24,)),
            )
        ),
    ],
)
def test_thousands_of_requests_all_end_in_time(
    seed, number, aggregated, speculation, windows
) -> None:
    simulation = Clockwork(
        seed,
        page_size=4,
        pages=110,
        most_tokens=512,
        audit_pages=False,
        rows=12,
        # A window's pool is made for two requests with their chunks: with large chunks all that
        # come at once fit there, and nobody would have to make room.
        chunk=16 if aggregated and windows == (24,) else 64,
        windows=windows,
        aggregated=aggregated,
        speculation=speculation,
        growth_min=0.0,
        growth_max=0.2,
    )
    rng = random.Random(seed)
    while len(simulation.submitted) < number:
        request = one_request(simulation, rng)
        if rng.random() < 0.03:
            simulation.run_until(simulation.clock + rng.random())
            simulation.cancel(request, request.decode)
        # Bursts, with pauses that let the queues get shorter.
        simulation.run_until(simulation.clock + rng.expovariate(2.0 if rng.random() < 0.2 else 60))
    simulation.run_until(simulation.clock + 600)
    waits, refused = [], 0
    for request in simulation.submitted:
        if request.disturbed:
            continue
        ends = {end.reason: end for end in request.ends.values()}
        if EndReason.FAILED in ends:
            assert "one request can hold" in ends[EndReason.FAILED].error
            refused += 1
            continue
        sampling, worker = request.sampling, request.decode
        expected = reference(request.prompt, request.max_tokens, worker.windows, sampling)
        assert request.output == expected
        waits.append(simulation.ended_at[request] - request.arrived)
    evicted = sum(worker.kv_cache.cache_counts.evicted_pages for worker in simulation.workers)
    retracted = sum(count(worker, "retractions") for worker in simulation.workers)
    assert refused
    assert evicted
    assert retracted
    assert max(waits) < 60
    simulation.assert_at_baseline()
