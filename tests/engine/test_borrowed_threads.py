"""Which steps have the cores of idle workers, and what is learnt of them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.cpu_kernels.kernel_threads import KernelThreads
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.executor.borrowed_threads import FEWEST_ROWS, FEWEST_TOKENS, BorrowedThreads
from kvrelay.engine.scheduler.speed_learner import SpeedLearner
from kvrelay.engine.worker.assembly import make_borrowed_threads
from kvrelay.engine.worker.machine_cores import MachineCores
from kvrelay.model_runner.layers.linear import PanelLinear
from kvrelay.model_runner.runner import ModelRunner
from kvrelay.wire.speeds import StepSpeeds, StepWork
from kvrelay.wire.worker_info import WorkerRole
from tests.checkpoints import make_checkpoint
from tests.engine.simulation import Simulation

CHUNK = StepWork.of_prompt(FEWEST_TOKENS)
SPEEDS = StepSpeeds(0.004, 0.0006, 0.3e-6, 0.0012, 0.5e-6, 512)


class Machine:
    """Other workers of a machine, as they are told to be."""

    def __init__(self, num_cores: int, busy: int = 0, idle: int = 0) -> None:
        self.num_cores = num_cores
        self.busy, self.idle = busy, idle
        self.asked = 0

    def find(self) -> None:
        self.asked += 1

    def count_threads(self) -> tuple[int, int]:
        return self.busy, self.idle


def rows_of(rows: int) -> StepWork:
    """Of requests with 300 tokens each."""
    return StepWork(rows=rows, row_pairs=300 * rows)


def threads_of(work: StepWork, machine: Machine, own: int = 1, most: int = 64) -> int:
    """Those that a step's second layer has."""
    threads = KernelThreads(own)
    chooser = BorrowedThreads(threads, most, machine)
    with chooser.chosen(work):
        threads.renew()
        assert threads.count == own
        threads.renew()
        found = threads.count
    assert threads.count == own
    assert chooser.widening == found / own
    return found


@pytest.mark.parametrize(
    ("machine", "own", "most", "expected"),
    [
        (Machine(2, idle=1), 1, 2, 2),
        (Machine(2, busy=1), 1, 2, 1),
        (Machine(8, idle=1), 1, 8, 2),  # cores that are no worker's are not touched
        (Machine(8, idle=6, busy=1), 1, 8, 4),  # the busy one may borrow as many
        (Machine(8, idle=7), 1, 4, 4),
        (Machine(2, idle=2), 2, 2, 2),  # more threads than cores
        (Machine(4, idle=2, busy=2), 2, 4, 2),
        (Machine(4, idle=4, busy=4), 4, 4, 4),
        (Machine(16, idle=4, busy=4), 4, 16, 6),
        (Machine(2), 1, 2, 1),
    ],
)
def test_a_prompt_has_the_threads_of_idle_workers(
    machine: Machine, own: int, most: int, expected: int
) -> None:
    assert threads_of(CHUNK, machine, own, most) == expected


def test_only_chunks_and_rows_that_are_worth_it_have_them() -> None:
    machine = Machine(2, idle=1)
    assert threads_of(StepWork.of_prompt(FEWEST_TOKENS - 1), machine) == 1
    assert threads_of(rows_of(FEWEST_ROWS - 1), machine) == 1
    assert machine.asked == 0, "a small step does not even look"
    assert threads_of(rows_of(FEWEST_ROWS), machine) == 2
    beside_rows = StepWork(FEWEST_TOKENS, 10_000, rows=8, row_pairs=2000)
    assert threads_of(beside_rows, machine) == 2


class Layers:
    """Steps of layers that take as long as they are told to, on two cores, one of them idle."""

    def __init__(self) -> None:
        self.now = 100.0
        self.threads, self.machine = KernelThreads(1), Machine(2, idle=1)
        self.chooser = BorrowedThreads(self.threads, 2, self.machine, lambda: self.now)

    def step(self, *seconds: float, work: StepWork = CHUNK) -> list[int]:
        """The threads of each layer, which takes so many seconds."""
        counts = []
        with self.chooser.chosen(work):
            for one in seconds:
                self.threads.renew()
                counts.append(self.threads.count)
                self.now += one
        assert self.chooser.widening == max(counts)
        return counts


def test_a_worker_that_begins_has_its_cores_back_at_the_next_layer() -> None:
    layers, counts = Layers(), []
    with layers.chooser.chosen(CHUNK):
        for busy in (0, 0, 1, 1, 0):
            layers.machine.busy, layers.machine.idle = busy, 1 - busy
            layers.threads.renew()
            counts.append(layers.threads.count)
            layers.now += 1 / layers.threads.count
    assert counts == [1, 2, 1, 1, 2]
    assert layers.chooser.widening == 2
    layers.machine.busy, layers.machine.idle = 1, 0
    assert layers.step(1, 1, 1) == [1, 1, 1]


def test_cores_that_make_layers_no_faster_are_given_back() -> None:
    """Something that is no worker computes there. One such layer is a chance."""
    layers = Layers()
    assert layers.step(1.0, 0.6, 5.0, 0.6, 0.6) == [1, 2, 2, 2, 2]
    assert layers.step(1.0, 0.6, 1.0, 2.0, 1.0, 1.0) == [1, 2, 2, 2, 1, 1]


def test_what_comes_soon_after_does_not_try_again() -> None:
    layers, slow, quick = Layers(), (1.0, 2.0, 2.0, 0.0), (1.0, 0.5, 0.5)
    for pause in (1, 2, 4, 8, 16, 32, 60, 60):
        assert layers.step(*slow) == [1, 2, 2, 1]
        asked = layers.machine.asked
        layers.now += pause - 0.5
        assert layers.step(0.1, 0.1, 0.1) == [1, 1, 1]
        assert layers.machine.asked == asked
        layers.now += 0.5
    assert layers.step(*quick) == [1, 2, 2]
    assert layers.step(*slow) == [1, 2, 2, 1]
    layers.now += 1.0
    assert layers.step(*quick) == [1, 2, 2], "the pauses begin anew"


def test_rows_that_gain_nothing_leave_prompts_their_cores() -> None:
    layers, slow, rows = Layers(), (1.0, 2.0, 2.0, 0.0), rows_of(FEWEST_ROWS)
    assert layers.step(*slow, work=rows) == [1, 2, 2, 1]
    assert layers.step(0.1, 0.1, work=rows) == [1, 1]
    assert layers.step(0.1, 0.05, 0.05) == [1, 2, 2]
    assert layers.step(*slow) == [1, 2, 2, 1]
    layers.now += 1.0
    assert layers.step(0.1, 0.05, 0.05, work=rows) == [1, 2, 2]


def test_a_forward_that_fails_gives_all_back() -> None:
    threads, machine = KernelThreads(1), Machine(2, idle=1)
    chooser = BorrowedThreads(threads, 2, machine)
    with pytest.raises(MemoryError), chooser.chosen(CHUNK):
        raise MemoryError
    threads.renew()
    assert threads.count == 1


def seconds_of(tokens: int, learner: SpeedLearner) -> float:
    return learner.speeds.prompt_seconds(tokens)


def test_a_step_on_others_cores_stands_for_a_slower_one_until_there_is_another() -> None:
    learner = SpeedLearner(512)
    for tokens in (100, 200, 400) * 4:
        work = StepWork.of_prompt(tokens)
        learner.observe(work, SPEEDS.seconds_of(work) / 1.6, widening=2.0)
    assert learner.speeds.prompts_known
    for tokens in (100, 400):
        expected = SPEEDS.prompt_seconds(tokens) * 2 / 1.6
        assert seconds_of(tokens, learner) == pytest.approx(expected, rel=0.1)
    assert learner.last_seconds == SPEEDS.prompt_seconds(400) / 1.6
    for tokens in (100, 200, 400) * 4:
        learner.observe(StepWork.of_prompt(tokens), SPEEDS.prompt_seconds(tokens))
    known = learner.speeds
    for tokens in (100, 400):
        assert seconds_of(tokens, learner) == pytest.approx(SPEEDS.prompt_seconds(tokens), rel=0.02)
    for tokens in (100, 200, 400) * 20:
        learner.observe(StepWork.of_prompt(tokens), 0.001, widening=2.0)
    assert learner.speeds == known
    assert learner.last_seconds == 0.001


def test_small_chunks_do_not_tell_what_large_ones_cost() -> None:
    """Alone they never have others' cores: to know them is not to know those that have."""
    learner = SpeedLearner(512)
    for _ in range(5):
        learner.observe(StepWork.of_prompt(20), 0.1)
        learner.observe(StepWork.of_prompt(400), SPEEDS.prompt_seconds(400) / 2, widening=2.0)
    assert seconds_of(400, learner) == pytest.approx(SPEEDS.prompt_seconds(400), rel=0.1)


def test_rows_and_prompts_are_known_each_by_itself() -> None:
    learner = SpeedLearner(512)
    prompt, rows = StepWork.of_prompt(400), rows_of(FEWEST_ROWS)
    both = StepWork(prompt.prompt_tokens, prompt.prompt_pairs, rows.rows, rows.row_pairs)

    def observe(work: StepWork, factor: float, widening: float) -> None:
        for _ in range(20):
            learner.observe(work, SPEEDS.seconds_of(work) * factor, widening)

    def expects(work: StepWork, factor: float) -> None:
        expected = SPEEDS.seconds_of(work) * factor
        assert learner.speeds.seconds_of(work) == pytest.approx(expected, rel=0.05)

    observe(prompt, 1.0, 1.0)
    observe(rows, 0.75, 2.0)
    expects(rows, 1.5)
    expects(prompt, 1.0)
    observe(rows, 1.0, 1.0)
    expects(rows, 1.0)
    expects(prompt, 1.0)
    observe(both, 0.1, 2.0)
    observe(rows, 0.1, 2.0)
    expects(rows, 1.0)
    expects(prompt, 1.0)


def test_the_first_chunks_count_however_small_and_widened_for_rows() -> None:
    """Else a worker that never computed another would say that prompts cost nothing."""
    learner, rows = SpeedLearner(512), rows_of(FEWEST_ROWS)
    for _ in range(20):
        learner.observe(rows, SPEEDS.seconds_of(rows))
    beside = StepWork(20, 20 * 300, rows.rows, rows.row_pairs)
    for _ in range(20):
        learner.observe(beside, SPEEDS.seconds_of(beside) / 1.5, widening=2.0)
    assert learner.speeds.prompts_known
    assert seconds_of(20, learner) > SPEEDS.prompt_seconds(20)


class Said:
    """What a worker says of itself."""

    def __init__(self) -> None:
        self.all = [False]

    @property
    def busy(self) -> bool:
        return self.all[-1]

    @busy.setter
    def busy(self, busy: bool) -> None:
        if busy != self.all[-1]:
            self.all.append(busy)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_worker_is_busy_while_it_computes_and_not_while_it_waits_for_kv(overlap: bool) -> None:
    """And between two of its steps."""
    simulation = Simulation(0, page_size=4, pages=64, rows=4, chunk=16, workers=1, overlap=overlap)
    [prefill], [decode] = simulation.prefills, simulation.decodes
    of_prefill, of_decode = Said(), Said()
    prefill.engine._cores, decode.engine._cores = of_prefill, of_decode
    simulation.submit(list(range(50)), 6)
    while not of_decode.busy:
        assert of_decode.all == [False]
        simulation.step()
    assert of_prefill.all == [False, True, False]
    simulation.run()
    assert of_prefill.all == of_decode.all == [False, True, False]


@pytest.mark.parametrize(
    ("options", "chooses"),
    [
        ({}, True),
        ({"prompt_threads": 2}, True),
        ({"prompt_threads": 100}, True),
        ({"prompt_threads": 1}, False),
        ({"threads": 2}, False),
        ({"threads": 2, "prompt_threads": 100}, False),
        ({"dtype": "float32", "prompt_threads": 2}, False),
        ({"dtype": "float16", "prompt_threads": 2}, False),
    ],
)
def test_who_may_have_others_cores(
    options: dict[str, Any],
    chooses: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On two cores."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    path = make_checkpoint(tmp_path / "llama")
    config = WorkerConfig("a0", WorkerRole.AGGREGATED, path, "tiny", kv_memory=1 << 20, **options)
    runner = ModelRunner(path, config.dtype, "cpu", config.threads)
    with closing(MachineCores(config.threads, tmp_path / "cores")) as cores:
        found = make_borrowed_threads(config, runner, cores)
    assert (found is not None) == (chooses and runner.shares_prompts)
    assert runner.shares_prompts == PanelLinear.supports(torch.empty(16, 16, dtype=runner.dtype))
    assert make_borrowed_threads(config, runner, None) is None
