"""Every mode of the one loop gives the tokens of a plain run, and gives back all memory."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

from kvrelay.engine.config import Speculation
from kvrelay.model_runner.batch import ForwardBatch
from kvrelay.wire.output import RequestOutput
from kvrelay.wire.sampling_limits import MAX_CHOICES
from kvrelay.wire.submit import SamplingParams
from tests.engine.simulation import SimRequest, Simulation, SimWorker, count, reference
from tests.engine.simulation.model import CountingModel
from tests.pairwise import few

SAMPLINGS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=1, seed=7),
    SamplingParams(temperature=0.8, seed=11, repetition_penalty=1.3, presence_penalty=0.5),
)


def expected(request: SimRequest) -> list[int]:
    worker = request.decode
    return reference(
        request.prompt,
        request.max_tokens,
        worker.windows,
        request.sampling,
        request.key.choice,
    )


def run_load(simulation: Simulation, seed: int, *, count: int, choices: int = 1) -> None:
    """Requests at random times, some of them cancelled; all others must be right."""
    rng = random.Random(seed)
    for _ in range(count):
        prompt = [rng.randrange(97) for _ in range(rng.randint(1, 40))]
        sampling = rng.choice(SAMPLINGS)
        several = rng.randint(1, choices)
        requests = simulation.submit_choices(
            several, prompt, rng.randint(1, 16), rng.randint(0, 1), sampling
        )
        for _ in range(rng.randint(0, 40)):
            simulation.step()
        if rng.random() < 0.15:
            simulation.cancel(requests[0], rng.choice([requests[0].prefill, requests[0].decode]))
    simulation.run()
    for request in simulation.submitted:
        if not request.disturbed:
            assert request.output == expected(request), (seed, request)
    assert sum(not request.disturbed for request in simulation.submitted) > count // 2
    simulation.assert_at_baseline()


def in_little_memory(page_size: int, **mode: Any) -> Simulation:
    """For a few short requests at a time, of the many that come."""
    return Simulation(
        page_size,
        page_size,
        pages=120 // page_size,
        rows=6,
        chunk=16,
        growth_min=0.0,
        growth_max=0.3,
        **mode,
    )


@few(4)
def test_a_step_has_few_rows_where_many_prompts_have_many_choices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_rows: list[int] = []
    launch = CountingModel.launch

    def count_rows(model: CountingModel, batch: ForwardBatch) -> torch.Tensor:
        num_rows.append(len(batch.logit_rows))
        return launch(model, batch)

    monkeypatch.setattr(CountingModel, "launch", count_rows)
    simulation = Simulation(3, page_size=4, pages=60, rows=10, chunk=64, workers=1, aggregated=True)
    served = [
        simulation.submit_choices(MAX_CHOICES, [number] * length, 1, sampling=SAMPLINGS[1])
        for number, length in enumerate((1, 5, 1, 7, 2))
    ]
    simulation.run()
    assert [one.output for choices in served for one in choices] == [
        expected(one) for choices in served for one in choices
    ]
    assert max(num_rows) == MAX_CHOICES
    simulation.assert_at_baseline()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("speculation", [Speculation.NONE, Speculation.NGRAM])
@pytest.mark.parametrize("retract_every", [0, 3])
@pytest.mark.parametrize("windows", [(None,), (None, 7), (20,)])
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("aggregated", [True, False])
def test_tokens_do_not_depend_on_the_mode(
    overlap, speculation, retract_every, windows, cached, aggregated
) -> None:
    for page_size in (1, 4):
        simulation = in_little_memory(
            page_size,
            cached=cached,
            windows=windows,
            aggregated=aggregated,
            overlap=overlap,
            speculation=speculation,
            debug_retract_every=retract_every,
        )
        run_load(simulation, page_size, count=16, choices=3)
        if retract_every:
            assert any(request.retractions for request in simulation.submitted) or aggregated


@pytest.mark.parametrize("aggregated", [False, True], ids=["pair", "aggregated"])
def test_choices_that_do_not_fit_together_are_let_in_and_take_turns(aggregated) -> None:
    """By the growth reserve alone they would wait for ever: eight outputs of 40 in 80 tokens."""
    simulation = Simulation(
        1, page_size=4, pages=20, rows=8, chunk=16, workers=1, aggregated=aggregated
    )
    requests = simulation.submit_choices(8, list(range(9)), 40, sampling=SAMPLINGS[1])
    simulation.run()
    for request in requests:
        assert request.output == expected(request)
    simulation.assert_at_baseline()


def test_the_most_choices_take_turns_where_few_have_rows() -> None:
    simulation = Simulation(3, page_size=4, pages=60, rows=10, chunk=16, workers=1, aggregated=True)
    requests = simulation.submit_choices(MAX_CHOICES, list(range(9)), 5, sampling=SAMPLINGS[1])
    simulation.run()
    for request in requests:
        assert request.output == expected(request)
    simulation.assert_at_baseline()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("speculation", [Speculation.NONE, Speculation.NGRAM])
def test_a_window_pool_holds_what_it_was_promised_to_hold(overlap, speculation) -> None:
    """Two requests fit (see `SimWorker`): neither has to make room."""
    options = {"overlap": overlap, "speculation": speculation}
    simulation = Simulation(
        1, 1, pages=0, rows=2, chunk=16, cached=False, windows=(7,), workers=1, **options
    )
    requests = [simulation.submit([number] * 12, 40) for number in range(2)]
    simulation.run()
    for request in requests:
        assert request.output == expected(request)
        assert not request.retractions
    simulation.assert_at_baseline()


@pytest.mark.parametrize("aggregated", [False, True], ids=["pair", "aggregated"])
def test_what_begins_again_counts_neither_its_own_pages_nor_its_own_past(aggregated) -> None:
    simulation = Simulation(
        1, 4, pages=40, rows=8, chunk=16, workers=1, aggregated=aggregated, debug_retract_every=3
    )
    simulation.now = lambda: time.monotonic() - 1000  # type: ignore[method-assign]
    waits, take = [], simulation.take_output

    def watch(worker: SimWorker, output: RequestOutput) -> None:
        waits.append(output.timings.queue_seconds)
        take(worker, output)

    simulation.take_output = watch  # type: ignore[method-assign]
    request = simulation.submit(list(range(20)), 12)
    simulation.run()
    assert request.output == expected(request)
    assert count(request.decode, "retractions") > 1
    assert max(waits) < 1000, "earlier attempts have told of that time"
    if aggregated:  # of a pair, a router does not count what a later attempt has found
        assert request.cached_tokens == 0
