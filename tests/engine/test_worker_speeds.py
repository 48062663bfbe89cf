"""Workers measure the work of their steps, and report their speeds and what waits for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvrelay.engine.executor.step import LaunchedStep, PassingExecutor, StepEnded
from kvrelay.engine.scheduler.commands import Attach, Submit
from kvrelay.engine.scheduler.outbox import RouterLink
from kvrelay.wire.load import WorkerLoad
from kvrelay.wire.speeds import StepSpeeds, StepWork
from kvrelay.wire.submit import RequestKey, StopConditions
from tests.engine.simulation import Simulation, SimWorker
from tests.engine.submissions import submit

TRUTH = StepSpeeds(
    seconds_per_step=0.004,
    seconds_per_token=0.001,
    seconds_per_pair=1e-5,
    seconds_per_row=0.002,
    seconds_per_row_pair=2e-5,
    chunk_tokens=16,
)


class Timed(PassingExecutor):
    """An executor whose steps take what `TRUTH` says."""

    def __init__(self, worker: SimWorker) -> None:
        super().__init__(worker.executor)
        self.works: list[StepWork] = []

    def finish(self, launched: LaunchedStep[Any]) -> StepEnded[Any]:
        ended = super().finish(launched)
        self.works.append(ended.work)
        return replace(ended, seconds=TRUTH.seconds_of(ended.work))


def timed(simulation: Simulation) -> dict[str, Timed]:
    executors = {}
    for worker in simulation.workers:
        executor: Any = Timed(worker)
        executors[worker.name] = worker.executor = executor
    return executors


def total(works: list[StepWork]) -> StepWork:
    return StepWork(
        prompt_tokens=sum(work.prompt_tokens for work in works),
        prompt_pairs=sum(work.prompt_pairs for work in works),
        rows=sum(work.rows for work in works),
        row_pairs=sum(work.row_pairs for work in works),
    )


def watch(worker: SimWorker) -> RouterLink:
    """A router that only listens."""
    link = RouterLink("watcher")
    worker.inbox.post(Attach(link))
    return link


def latest_load(link: RouterLink) -> WorkerLoad:
    loads = [outputs.load for outputs in link.take_all() if outputs and outputs.load]
    return loads[-1]


@pytest.mark.parametrize("aggregated", [False, True])
def test_work_is_counted_whole_whatever_its_chunks(aggregated: bool):
    simulation = Simulation(0, page_size=4, pages=64, rows=4, chunk=16, aggregated=aggregated)
    executors = timed(simulation)
    simulation.submit(list(range(50)), 6)
    simulation.run()
    done = total([work for executor in executors.values() for work in executor.works])
    prompt = StepWork.of_prompt(50)
    assert (done.prompt_tokens, done.prompt_pairs) == (50, prompt.prompt_pairs)
    # The first of the six tokens comes from the prompt.
    assert (done.rows, done.row_pairs) == (5, 51 + 52 + 53 + 54 + 55)


def test_what_the_prefix_index_has_is_context_and_not_work():
    simulation = Simulation(0, page_size=4, pages=64, rows=4, chunk=16, workers=1)
    simulation.submit(list(range(48)), 1)
    simulation.run()
    executors, link = timed(simulation), watch(simulation.prefills[0])
    simulation.submit([*range(48), 7, 8], 1)
    simulation.run()
    assert executors["p0"].works == [StepWork.of_prompt(2, context=48)]
    assert latest_load(link).reused_share == 48 / 50


def test_each_worker_learns_and_reports_its_own_speeds():
    simulation = Simulation(1, page_size=4, pages=64, rows=8, chunk=16, workers=1, cached=False)
    timed(simulation)
    [prefill], [decode] = simulation.prefills, simulation.decodes
    links = watch(prefill), watch(decode)
    for length in (5, 9, 13, 20, 30, 45, 60) * 6:
        simulation.submit(list(range(length)), 6)
        simulation.run()
    of_prompts, of_rows = (latest_load(link).speeds for link in links)
    assert (of_prompts.prompts_known, of_prompts.rows_known) == (True, False)
    assert (of_rows.prompts_known, of_rows.rows_known) == (False, True)
    assert of_prompts.prompt_seconds(40) == pytest.approx(TRUTH.prompt_seconds(40), rel=0.05)
    assert of_rows.step_seconds(1, 40) == pytest.approx(TRUTH.step_seconds(1, 40), rel=0.05)
    labels = {"role": "prefill", "worker": "p0", "model": "sim", "tokens": "256"}
    name = "kvrelay_expected_prompt_seconds"
    shown = prefill.context.metrics.registry.get_sample_value(name, labels)
    assert shown == of_prompts.prompt_seconds(256)


@pytest.mark.parametrize("aggregated", [False, True])
def test_prompts_that_wait_are_reported_by_size(aggregated: bool):
    simulation = Simulation(
        0, page_size=4, pages=64, rows=8, chunk=16, workers=1, aggregated=aggregated
    )
    worker = simulation.prefills[0]
    link = watch(worker)
    for length in (50, 33, 5):
        simulation.submit(list(range(length)), 1)
    simulation.submit(list(range(9)), 1, priority=1)  # an ordinary prompt does not wait for it
    worker.turn()
    load = latest_load(link)
    if aggregated:  # two steps are launched
        assert sum(load.prompts_by_size) == 50 + 33 + 5 - 2 * 16
    else:
        assert load.prompts_by_size == (0, 0, 5, 0, 0, 83)
    assert load.waiting_tokens == sum(load.prompts_by_size) + 9
    simulation.run()
    assert latest_load(link).prompts_by_size == ()


@pytest.mark.parametrize("aggregated", [False, True])
def test_what_is_expected_to_be_cached_takes_room_and_no_work(aggregated: bool):
    """Of an aggregated worker, and of a decode worker that computes a prompt itself."""
    simulation = Simulation(0, page_size=4, pages=64, rows=8, chunk=16, aggregated=aggregated)
    worker, key = simulation.decodes[0], RequestKey("router", "a", 1, 0)
    stops = StopConditions(max_tokens=4)
    link = RouterLink("router")
    worker.scheduler.submit(submit(link, key, range(50), stops, cached_tokens=40))
    load = worker.scheduler.load()
    assert (load.waiting_tokens, load.prompts_by_size) == (50, (0, 0, 0, 10))


class Expecting(Simulation):
    """Its router expects so many tokens of each prompt in the prefix index."""

    expected_tokens = 40

    def send(self, worker: SimWorker, command: Submit) -> None:
        expecting = replace(command.submission, cached_tokens=self.expected_tokens)
        super().send(worker, replace(command, submission=expecting))


@pytest.mark.parametrize(
    ("more", "waiting"), [({}, 10), ({"prompt_logprobs": 1}, 50), ({"alone": True}, 50)]
)
def test_what_is_expected_in_the_prefix_index_is_load_if_all_is_computed(
    more: dict[str, Any], waiting: int
):
    simulation = Expecting(0, page_size=4, pages=64, rows=8, chunk=16, workers=1)
    [worker] = simulation.prefills
    link = watch(worker)
    simulation.submit_choices(1, list(range(50)), 1, **more)
    worker.turn()
    assert latest_load(link).waiting_tokens == waiting
    simulation.run()
