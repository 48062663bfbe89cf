"""The engine over a device that works late, in any order that streams and events allow.

Steps are launched before the tokens of the one before are on the host. A page, or staging, that is
used too early gives another token than a plain run.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from llguidance import LLTokenizer, TokenizerWrapper

from kvrelay.engine.config import Speculation
from kvrelay.engine.executor.forward_thread import ForwardThread
from kvrelay.engine.executor.grammar_masks import GrammarMasks
from kvrelay.engine.executor.pipeline import StepPipeline
from kvrelay.engine.executor.step import (
    Executor,
    LaunchedStep,
    PassingExecutor,
    Scheduled,
    Step,
    StepEnded,
)
from kvrelay.engine.executor.token_state import TokenState
from kvrelay.mem_cache.leases.publishing import PageCopy
from kvrelay.mem_cache.shape import PoolShape
from kvrelay.text.grammar import Grammars
from kvrelay.wire.submit import GenerationParams, SamplingParams, StopConditions, StructuredOutput
from tests.checkpoints import make_checkpoint
from tests.engine.simulation import Simulation, reference
from tests.engine.simulation.clockwork import Clockwork
from tests.engine.simulation.model import (
    FULL,
    GREEDY,
    LOGITS,
    VOCAB,
    CountingModel,
    GuessDrafter,
    next_value,
)
from tests.engine.simulation.storage import SharedPages
from tests.engine.test_host_tier import ask, tier_counts
from tests.engine.test_host_tier import in_little_memory as with_host_tier
from tests.engine.test_kv_storage import some_prompts, storage_counts, with_storage
from tests.engine.test_modes import SAMPLINGS, expected, in_little_memory, run_load
from tests.engine.test_sessions import walk as walk_sessions
from tests.engine.test_token_equality import (
    SPREAD,
    Mode,
    assert_same,
    plain_run,
    requests_of,
    serve,
)
from tests.engine.test_virtual_time import one_request
from tests.known import known
from tests.late_device import DeviceError, LateStreams
from tests.pairwise import few

WAIT_S = 60.0


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Simulation, "late", True)


# The whole engine


@few(3)
@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("speculation", [Speculation.NONE, Speculation.NGRAM])
@pytest.mark.parametrize("windows", [(None,), (None, 7), (20,)])
@pytest.mark.parametrize("aggregated", [True, False])
def test_tokens_are_those_of_a_plain_run(overlap, speculation, windows, aggregated) -> None:
    for page_size, retract_every, cached in ((1, 0, True), (4, 3, True), (4, 0, False)):
        simulation = in_little_memory(
            page_size,
            cached=cached,
            windows=windows,
            aggregated=aggregated,
            overlap=overlap,
            speculation=speculation,
            debug_retract_every=retract_every,
        )
        run_load(simulation, page_size, count=8, choices=3)


@few(2)
@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("kind", ["pair", "aggregated"])
@pytest.mark.parametrize("seed", range(6))
def test_sessions_give_the_tokens_of_plain_runs(kind: str, seed: int) -> None:
    walk_sessions(kind, (None,), seed)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("aggregated", [True, False], ids=["aggregated", "pair"])
def test_pages_that_come_back_from_the_host_are_right(aggregated: bool) -> None:
    simulation = with_host_tier(4, aggregated=aggregated, workers=1)
    rng = random.Random(3)
    heads = [[rng.randrange(97) for _ in range(32)] for _ in range(4)]
    for _ in range(24):
        tail = [rng.randrange(97) for _ in range(rng.randint(1, 8))]
        simulation.submit(rng.choice(heads) + tail, rng.randint(1, 8))
        for _ in range(rng.randint(0, 120)):
            simulation.step()
    simulation.run()
    assert all(request.output == expected(request) for request in simulation.submitted)
    assert tier_counts(simulation, "written_pages")
    assert tier_counts(simulation, "loaded_pages")
    simulation.assert_at_baseline()


@few(1)
@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("aggregated", [True, False], ids=["aggregated", "pair"])
def test_pages_that_come_back_from_storage_are_right(aggregated: bool) -> None:
    """Written there by another worker, by way of the host's memory."""
    shared: SharedPages = {}
    for _ in range(2):
        simulation = with_storage(shared, 4, host_pages=20, aggregated=aggregated, workers=1)
        run_load(simulation, 4, count=12, choices=2)
        ask(simulation, some_prompts(3), 4)
    assert storage_counts(simulation, "loaded_pages")


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("number", [40, pytest.param(150, marks=pytest.mark.slow)])
def test_many_requests_in_virtual_time(number: int) -> None:
    simulation = Clockwork(
        5, page_size=4, pages=110, rows=12, chunk=64, growth_min=0.0, growth_max=0.2
    )
    rng = random.Random(5)
    while len(simulation.submitted) < number:
        request = one_request(simulation, rng)
        if rng.random() < 0.1:
            simulation.run_until(simulation.clock + rng.random() / 10)
            simulation.cancel(request, request.decode)
        simulation.run_until(simulation.clock + rng.expovariate(60))
    simulation.run_until(simulation.clock + 600)
    for request in simulation.submitted:
        if not request.disturbed and request.max_tokens < 500:
            assert request.output == reference(
                request.prompt, request.max_tokens, sampling=request.sampling
            )
    simulation.assert_at_baseline()


@few(1)
@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_tokens_of_real_models_with_log_probabilities_and_penalties(
    tmp_path: Path, architecture: str
) -> None:
    make_checkpoint(tmp_path / architecture, architecture)
    make_checkpoint(tmp_path / "draft", "llama", seed=0)
    asked, model = requests_of(5, 8, 512, 12), tmp_path / architecture
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Simulation, "late", False)
        plain = plain_run(model, "float64", tuple(asked))
    for mode in (Mode(aggregated=False, overlap=True, cached=True, chunk=16), *SPREAD[:2]):
        simulation = serve(model, tmp_path / "draft", "float64", mode, seed=3)
        served = [one.submit(simulation) for one in asked]
        simulation.run()
        for requests, others in zip(served, plain, strict=True):
            for request, other in zip(requests, others, strict=True):
                assert_same(request, other)
        simulation.assert_at_baseline()


# What is launched when


class Flight:
    """A worker's executor, by itself: steps of requests that generate."""

    def __init__(
        self,
        seed: int,
        *prompts: Sequence[int],
        counted_rows: int = 3,
        sampling: SamplingParams = GREEDY,
        max_tokens: int = 20,
        prompt_logprobs: int | None = None,
        masks: GrammarMasks | None = None,
    ) -> None:
        self.device = LateStreams(random.Random(seed))
        self.drafts = 0
        self.drafter = GuessDrafter(seed, FULL, self.device)
        pools = [PoolShape("full", 64)]
        self.model = CountingModel(pools, 4, self.drafter, self.device, counted_rows, masks)
        self.executor = self.model.executor
        self.states = [
            TokenState(
                token_ids=list(prompt),
                input_len=len(prompt),
                prompt_ids=tuple(prompt),
                choices=(0,),
                params=GenerationParams(sampling, StopConditions(max_tokens), 1, prompt_logprobs),
            )
            for prompt in prompts
        ]
        self._number = 0

    def step(self, *numbers: int, tokens: int = 1, copies: Sequence[PageCopy] = ()) -> Step[int]:
        """Compute so many tokens of each of these states, and sample what follows them."""
        self._number += 1
        items = [
            Scheduled(number, self.states[number], tokens, True, self.drafts) for number in numbers
        ]
        tables = np.array([np.arange(8) + 8 * number for number in numbers], np.int32)
        return Step(self._number, items, (tables.reshape(len(items), 8),), copies)


PROMPTS = ([1, 2, 3], [4, 5, 6])
PENALTIES = SamplingParams(temperature=0, frequency_penalty=0.5)
GRAMMAR = SamplingParams(temperature=0, structured_output=StructuredOutput(regex=".*"))
"""Where there are no masks it changes nothing but when a step is launched."""


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLINGS[2], PENALTIES])
@pytest.mark.parametrize("seed", range(10))
def test_a_step_is_launched_without_the_tokens_of_the_one_before(
    seed: int, sampling: SamplingParams
) -> None:
    """And the host waits for no event but that of the step before."""
    flight = Flight(seed, *PROMPTS, sampling=sampling)
    pipeline: StepPipeline[int] = StepPipeline(flight.executor)
    assert not list(pipeline.launch(flight.step(0, 1, tokens=3)))
    for _ in range(10):
        assert not list(pipeline.launch(flight.step(0, 1)))
        first = known(pipeline.oldest)
        assert not flight.device.waits, "the host waited while it launched"
        [ended] = pipeline.finish(first)
        assert all(len(output.tokens) == 1 for output in ended.outputs)
        flight.device.waits = 0
    pipeline.finish_all()
    for state, prompt in zip(flight.states, PROMPTS, strict=True):
        assert state.output_ids == reference(prompt, 11, sampling=sampling)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLINGS[1], PENALTIES])
@pytest.mark.parametrize("seed", range(6))
def test_drafts_are_verified_before_the_host_knows_them(
    seed: int, sampling: SamplingParams
) -> None:
    """But for penalties, which read them; the host waits for no event but the step before."""
    flight = Flight(seed, *PROMPTS, sampling=sampling)
    pipeline: StepPipeline[int] = StepPipeline(flight.executor)
    accepted = 0
    assert not list(pipeline.launch(flight.step(0, 1, tokens=3)))
    flight.drafts = 3
    for _ in range(4):
        for ended in pipeline.finish_all():
            accepted += sum(output.num_accepted for output in ended.outputs)
        flight.device.waits = 0
        assert not list(pipeline.launch(flight.step(0, 1)))
        assert not flight.device.waits, "the host waited while it launched"
    pipeline.finish_all()
    assert accepted
    assert flight.drafter.begun == (0 if sampling is PENALTIES else 4)
    for state, prompt in zip(flight.states, PROMPTS, strict=True):
        assert len(state.output_ids) >= 5
        assert state.output_ids == reference(prompt, len(state.output_ids), sampling=sampling)


def test_drafts_stand_beside_a_token_that_nobody_knows() -> None:
    """One sequence's drafts and another's latest token are put into one batch."""
    flight = Flight(2, *PROMPTS)
    pipeline: StepPipeline[int] = StepPipeline(flight.executor)
    list(pipeline.launch(flight.step(0, 1, tokens=3)))
    pipeline.finish_all()
    verified = 0
    for _ in range(5):
        assert not list(pipeline.launch(flight.step(1)))
        both = flight.step(0, 1)
        items = [replace(both.scheduled[0], num_drafts=2), both.scheduled[1]]
        assert not list(pipeline.launch(replace(both, scheduled=items)))
        verified += sum(one.outputs[0].num_drafts for one in pipeline.finish_all())
    assert verified
    assert flight.drafter.begun == 5
    for state, prompt in zip(flight.states, PROMPTS, strict=True):
        assert state.output_ids == reference(prompt, len(state.output_ids))


def test_what_only_the_host_counts_waits_for_the_latest_token() -> None:
    """There are too few rows."""
    flight = Flight(1, *PROMPTS, counted_rows=1, sampling=PENALTIES)
    pipeline: StepPipeline[int] = StepPipeline(flight.executor)
    assert not list(pipeline.launch(flight.step(0, 1, tokens=3)))
    for _ in range(6):
        [ended] = pipeline.launch(flight.step(0, 1))
        assert len(ended.outputs) == 2
    pipeline.finish_all()
    for state, prompt in zip(flight.states, PROMPTS, strict=True):
        assert state.output_ids == reference(prompt, 7, sampling=PENALTIES)


@pytest.mark.parametrize("seed", range(4))
def test_a_forward_does_not_wait_for_the_tokens_that_a_grammar_reads(seed: int) -> None:
    """While the host waits for a step, the forward of the next one may run already."""
    flight = Flight(seed, *PROMPTS, sampling=GRAMMAR)
    pipeline: StepPipeline[int] = StepPipeline(flight.executor)
    assert not list(pipeline.launch(flight.step(0, 1, tokens=3)))
    for _ in range(6):
        launching, launched = pipeline.launch(flight.step(0, 1)), flight.device.launches
        assert len(next(launching).outputs) == 2
        assert flight.device.launches == launched + 1, "the device had nothing to do"
        assert not list(launching)
    pipeline.finish_all()
    for state, prompt in zip(flight.states, PROMPTS, strict=True):
        assert state.output_ids == reference(prompt, 7, sampling=GRAMMAR)


class OneByteTokens:
    """The counting model's vocabulary, as llguidance asks for one: bytes, and an end."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = VOCAB - 1
    tokens: ClassVar = [bytes([token_id]) for token_id in range(VOCAB - 1)] + [b"<end>"]
    special_token_ids = (VOCAB - 1,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


UPPER_CASE = SamplingParams(temperature=0, structured_output=StructuredOutput(regex="[ -_]{40}"))
ALLOWED = range(ord(" "), ord("_") + 1)
"""The tokens that it allows: two of three."""


def allowed_output(prompt: Sequence[int], count: int) -> list[int]:
    """The output of a plain run of a request with this grammar."""
    tokens = list(prompt)
    for _ in range(count):
        logits = LOGITS[next_value([tokens])]
        tokens.append(max(ALLOWED, key=lambda token_id: float(logits[token_id])))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("seed", range(4))
def test_a_grammar_cuts_drafts_beside_a_token_that_nobody_knows(seed: int) -> None:
    """A request that wants no drafts is in flight while another brings some."""
    grammars = Grammars(lambda: LLTokenizer(TokenizerWrapper(OneByteTokens())))
    masks = GrammarMasks(grammars, VOCAB)
    flight = Flight(seed, *PROMPTS, sampling=UPPER_CASE, masks=masks)
    pipeline: StepPipeline[int] = StepPipeline(flight.executor)
    ends = list(pipeline.launch(flight.step(0, 1, tokens=3)))
    ends += pipeline.finish_all()
    for _ in range(4):
        ends += pipeline.launch(flight.step(0))
        both = flight.step(0, 1)
        items = [both.scheduled[0], replace(both.scheduled[1], num_drafts=3)]
        ends += pipeline.launch(replace(both, scheduled=items))
        ends += pipeline.finish_all()
    grammars.close()
    assert [ended.error for ended in ends] == [None] * 9
    assert sum(output.num_drafts for ended in ends for output in ended.outputs)
    for state, prompt in zip(flight.states, PROMPTS, strict=True):
        assert len(state.output_ids) >= 5
        assert state.output_ids == allowed_output(prompt, len(state.output_ids))


def test_scores_of_a_prompt_come_to_the_host_without_its_logits() -> None:
    """Each token brings a sum and, for itself and the largest, an id and a logit: 32 bytes."""
    flight = Flight(4, *PROMPTS, prompt_logprobs=0)
    pipeline: StepPipeline[int] = StepPipeline(flight.executor)
    list(pipeline.launch(flight.step(0, 1, tokens=3)))
    [ended] = pipeline.finish_all()
    assert [len(output.prompt_logprobs) for output in ended.outputs] == [2, 2]
    ids_and_largest = 2 * (8 + 4)
    assert flight.device.brought_bytes == ids_and_largest + 4 * (8 + 2 * (8 + 4))


def test_a_third_step_waits_for_the_first() -> None:
    flight = Flight(2, *PROMPTS)
    pipeline: StepPipeline[int] = StepPipeline(flight.executor)
    steps = [flight.step(0, tokens=3), flight.step(0), flight.step(0)]
    assert [len(list(pipeline.launch(step))) for step in steps] == [0, 0, 1]
    assert [ended.step for ended in pipeline.finish_all()] == steps[1:]


# What fails


@pytest.mark.parametrize("seed", range(6))
def test_a_step_that_fails_ends_when_what_it_has_launched_has_run(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And behind the one before it, whose tokens are right."""
    flight = Flight(seed, *PROMPTS)
    pipeline: StepPipeline[int] = StepPipeline(flight.executor)
    list(pipeline.launch(flight.step(0, 1, tokens=3)))

    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(flight.executor, "_follow", fail)  # the forward is launched by then
    first, second = pipeline.launch(flight.step(0, copies=[PageCopy(0, 0, 40)]))
    assert first.error is None
    for output, prompt in zip(first.outputs, PROMPTS, strict=True):
        assert [token.token_id for token in output.tokens] == reference(prompt, 1)
    assert second.failure is not None
    assert not flight.device.can_run, "a part of it still runs"
    assert flight.model.kv[0][40].tolist() == [*PROMPTS[0], -1]
    assert flight.model.kv[0][0].tolist() == [*PROMPTS[0], *reference(PROMPTS[0], 1)]
    assert pipeline.oldest is None
    assert not flight.step(0).scheduled[0].is_live


@pytest.mark.parametrize("seed", range(4))
def test_a_sampling_that_cannot_be_launched_fails_its_step_and_no_other(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its forward is launched by then, and has run when the step ends."""
    flight = Flight(seed, *PROMPTS, sampling=GRAMMAR)
    pipeline: StepPipeline[int] = StepPipeline(flight.executor)
    assert not list(pipeline.launch(flight.step(0, 1, tokens=3)))

    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(flight.executor, "_launch_sampling", fail)
    first, second = pipeline.launch(flight.step(0))
    assert [output.error for output in first.outputs] == [None, None]
    assert known(second.error).alone
    assert not flight.device.can_run, "a part of it still runs"
    assert pipeline.oldest is None
    assert [item.is_live for item in flight.step(0, 1).scheduled] == [False, True]


@pytest.mark.parametrize("seed", range(6))
def test_what_fails_on_the_device_breaks_it(seed: int) -> None:
    flight = Flight(seed, *PROMPTS)
    pipeline: StepPipeline[int] = StepPipeline(flight.executor)
    assert not list(pipeline.launch(flight.step(0, tokens=3)))

    def fail() -> None:
        raise DeviceError("an illegal memory access was encountered")

    flight.device.forward.launch(fail)
    assert not list(pipeline.launch(flight.step(0)))
    first, second = pipeline.finish_all()
    assert known(second.error).breaks_device
    # The first may have come home before. If not, either may be to blame.
    assert known(second.error).alone is (first.error is None)
    assert first.error is None or not first.error.alone
    [third] = list(pipeline.launch(flight.step(0))) or pipeline.finish_all()
    assert not third.num_tokens
    assert third.outputs[0].error is flight.states[0].broken is not None


def test_a_device_that_was_broken_before_is_no_fault_of_a_request_alone() -> None:
    """Its step cannot even be launched."""
    flight = Flight(3, *PROMPTS)
    pipeline: StepPipeline[int] = StepPipeline(flight.executor)
    assert not list(pipeline.launch(flight.step(0, tokens=3)))
    assert not list(pipeline.launch(flight.step(0)))
    flight.device.error = DeviceError("injected")
    assert len(pipeline.finish_all()) == 2
    [ended] = pipeline.launch(flight.step(1, tokens=3))
    assert known(ended.error).breaks_device
    assert not known(ended.error).alone


def test_a_request_that_fails_alone_is_one_failed_forward_though_the_next_step_runs() -> None:
    flight = Flight(4, *PROMPTS)
    pipeline: StepPipeline[int] = StepPipeline(flight.executor)
    flight.model.broken = {0}
    assert not list(pipeline.launch(flight.step(0, tokens=3)))
    assert not list(pipeline.launch(flight.step(0)))
    first, second = pipeline.finish_all()
    assert first.failure is not None
    assert (second.failure, second.num_tokens) == (None, 0)
    assert second.outputs[0].error is first.outputs[0].error


@pytest.mark.parametrize("sampling", [GREEDY, GRAMMAR], ids=["plain", "a grammar"])
def test_a_row_without_a_token_ends_its_request_though_the_next_step_runs(
    sampling: SamplingParams,
) -> None:
    flight = Flight(4, *PROMPTS, sampling=sampling)
    pipeline: StepPipeline[int] = StepPipeline(flight.executor)
    flight.model.broken = {1}
    ends = list(pipeline.launch(flight.step(0, 1, tokens=3)))
    ends += pipeline.launch(flight.step(0, 1))
    first, second = [*ends, *pipeline.finish_all()]
    for ended in (first, second):
        assert [output.error is None for output in ended.outputs] == [True, False]
        assert not ended.outputs[1].tokens
        assert ended.failure is None
    assert flight.states[0].output_ids[:1] == reference(PROMPTS[0], 1)


# With threads


def test_the_forward_thread_tells_ends_in_order() -> None:
    """One step alone ends without another being launched; what waits in the queue is computed."""
    flight = Flight(6, *PROMPTS)
    ended: queue.SimpleQueue[StepEnded[int]] = queue.SimpleQueue()
    failures: list[str] = []
    thread = ForwardThread(flight.executor, ended.put, failures.append, flight.device)
    steps = [flight.step(0, 1, tokens=3)]
    thread.launch(steps[0])
    assert ended.get(timeout=WAIT_S).step is steps[0]
    assert thread.work.oldest is None
    steps = [flight.step(0, 1) for _ in range(12)]
    for step in steps:
        thread.launch(step)
    thread.close()
    assert flight.device.entered == {"forward", "results"}
    assert [ended.get(timeout=WAIT_S).step for _ in steps] == steps
    assert ended.empty()
    assert not failures
    for state, prompt in zip(flight.states, PROMPTS, strict=True):
        assert state.output_ids == reference(prompt, 13)


class LoggingExecutor(PassingExecutor):
    """Says what it launches; the first step only once the second one waits for it."""

    def __init__(self, executor: Executor, log: list[tuple[str, int]]) -> None:
        super().__init__(executor)
        self.log = log
        self.second_waits = threading.Event()

    def launch(self, step: Step[Any]) -> LaunchedStep[Any]:
        assert self.second_waits.wait(WAIT_S)
        self.log.append(("launch", step.number))
        return super().launch(step)

    def sample(self, launched: LaunchedStep[Any]) -> None:
        self.log.append(("sample", launched.step.number))
        super().sample(launched)


@pytest.mark.parametrize(
    ("sampling", "between"),
    [
        (PENALTIES, [("end", 1), ("launch", 2)]),
        (GRAMMAR, [("launch", 2), ("end", 1), ("sample", 2)]),
    ],
    ids=["too few rows", "a grammar"],
)
def test_tokens_are_told_before_what_waits_for_them_is_launched(
    sampling: SamplingParams, between: list[tuple[str, int]]
) -> None:
    """To draft for it, to launch its forward, or to compute its masks, takes a while."""
    flight = Flight(9, *PROMPTS, counted_rows=1, sampling=sampling)
    log: list[tuple[str, int]] = []
    failures: list[str] = []
    executor = LoggingExecutor(flight.executor, log)

    def tell(ended: StepEnded[int]) -> None:
        log.append(("end", ended.step.number))

    thread = ForwardThread(executor, tell, failures.append, flight.device)
    for step in (flight.step(0, 1, tokens=3), flight.step(0, 1)):
        thread.launch(step)
    executor.second_waits.set()
    thread.close()
    assert log == [("launch", 1), *between, ("end", 2)]
    assert not failures


def test_a_thread_that_cannot_use_the_device_keeps_no_step_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device that breaks under the first step refuses a context to who waits for it."""
    flight = Flight(8, *PROMPTS)
    ended: queue.SimpleQueue[StepEnded[int]] = queue.SimpleQueue()
    failures: list[str] = []

    def enter() -> None:
        if threading.current_thread().name == "results":
            raise RuntimeError("CUDA error: injected")

    monkeypatch.setattr(flight.device, "enter_thread", enter)
    thread = ForwardThread(flight.executor, ended.put, failures.append, flight.device)
    for step in (flight.step(0, tokens=3), flight.step(0)):
        thread.launch(step)
        assert ended.get(timeout=WAIT_S).step is step
    thread.close()
    assert not failures


def test_a_device_that_fails_is_told_by_the_forward_thread() -> None:
    flight = Flight(7, *PROMPTS)
    ended: queue.SimpleQueue[StepEnded[int]] = queue.SimpleQueue()
    failures: list[str] = []
    thread = ForwardThread(flight.executor, ended.put, failures.append, flight.device)
    flight.device.error = DeviceError("injected")
    thread.launch(flight.step(0, tokens=3))
    assert known(ended.get(timeout=WAIT_S).error).breaks_device
    thread.close()
    assert not failures
