"""Rows of tokens that a device counts: each step's requests find theirs, and nobody else's."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from kvrelay.device.device_streams import NoStaging
from kvrelay.engine.executor.counted_rows import CountedRows
from kvrelay.engine.executor.step import Scheduled
from kvrelay.engine.executor.token_state import UNKNOWN, PendingToken, TokenState
from kvrelay.model_runner.sampling import token_counts
from kvrelay.model_runner.sampling.token_counts import IN_OUTPUT, IN_PROMPT, TokenCounts
from kvrelay.wire.submit import GenerationParams, SamplingParams, StopConditions

CPU = torch.device("cpu")
VOCAB = 12
REPETITION = SamplingParams(repetition_penalty=1.2)
FREQUENCY = SamplingParams(frequency_penalty=0.5)


@dataclass
class Samples:
    """The part of `StepSampling` that is read on the device."""

    ids: torch.Tensor


def state_of(rng: random.Random, sampling: SamplingParams, **others: Any) -> TokenState:
    """A request that has an output, as one that goes on here."""
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))]
    output = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 6))]
    options = {"choices": (0,), **others}
    return TokenState(
        token_ids=prompt + output,
        input_len=len(prompt),
        prompt_ids=tuple(prompt),
        params=GenerationParams(sampling, StopConditions(max_tokens=99)),
        **options,
    )


def expected(state: TokenState) -> list[int]:
    """The row of a request whose tokens are all known."""
    counts = Counter(state.output_ids)
    seen = state.prompt_ids if state.params.sampling.repetition_penalty != 1 else ()
    return [IN_OUTPUT * counts[token] + IN_PROMPT * (token in seen) for token in range(VOCAB)]


class Steps:
    """Steps of requests that come, go, stay away and come back, two of them in flight."""

    def __init__(self, seed: int, rows: int) -> None:
        self.rng = random.Random(seed)
        self.counts = TokenCounts(rows, VOCAB, CPU)
        self.rows = CountedRows(self.counts)
        self.states: list[TokenState] = []
        self.before: list[TokenState] = []
        self.samples = Samples(torch.empty(0, dtype=torch.int64))
        self.counted = 0

    def run_often(self) -> None:
        for _ in range(60):
            self.run()

    def run(self) -> None:
        """One step: who can be launched is, and finds all of its tokens in its row."""
        self.come_and_go()
        chosen = [state for state in self.states if self.rng.random() < 0.8]
        # Those without a row wait until their latest token is known.
        if any(state.pending is not None and not self.rows.has(state) for state in chosen):
            self.end_before()
        items = [Scheduled(0, state, 1, sample=True) for state in chosen]
        step = self.rows.begin(items, [()] * len(items), NoStaging())
        if step is not None:
            step.count()
        found = {} if step is None else step.row_of
        assert len(set(found.values())) == len(found), "a row of two requests"
        assert len(found) == min(len(chosen), self.counts.num_rows), "a row of nobody"
        self.end_before()
        for place, row in found.items():
            assert self.counts.entries[row].tolist() == expected(chosen[place]), "another's row"
        self.counted += len(found)
        self.sample(chosen)

    def come_and_go(self) -> None:
        if self.rng.random() < 0.4:
            self.states.append(state_of(self.rng, self.rng.choice([REPETITION, FREQUENCY])))
        if self.states and self.rng.random() < 0.3:
            self.states.pop(self.rng.randrange(len(self.states)))

    def end_before(self) -> None:
        """The host knows what the step before has sampled."""
        for state in self.before:
            if state.pending is not None:
                state.token_ids[-1] = int(self.samples.ids[state.pending.row])
                state.pending = None

    def sample(self, states: list[TokenState]) -> None:
        ids = [self.rng.randrange(VOCAB) for _ in states]
        self.samples = Samples(torch.tensor(ids, dtype=torch.int64))
        for index, state in enumerate(states):
            state.token_ids.append(UNKNOWN)
            state.pending = PendingToken(self.samples, index, is_sure=True)  # type: ignore[arg-type]
        self.before = states


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("seed", range(10))
def test_each_row_has_its_requests_tokens(seed: int, rows: int) -> None:
    steps = Steps(seed, rows)
    steps.run_often()
    assert steps.counted > 40


def test_a_row_that_another_request_has_by_now_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a request kept it that was away for a step."""
    monkeypatch.setattr(CountedRows, "has", lambda self, state: state.counted is not None)
    steps = Steps(0, rows=2)
    with pytest.raises(AssertionError, match="row"):
        steps.run_often()


@pytest.mark.parametrize(
    ("sampling", "others", "sample", "draft"),
    [
        (SamplingParams(logit_bias={1: 2.0}), {}, True, ()),
        (FREQUENCY, {"choices": (0, 1)}, True, ()),
        (FREQUENCY, {}, False, ()),
        (FREQUENCY, {}, True, (3,)),
    ],
    ids=["no penalties", "several choices", "a chunk", "drafts"],
)
def test_whose_tokens_the_host_counts(
    sampling: SamplingParams, others: dict[str, Any], sample: bool, draft: tuple[int, ...]
) -> None:
    rows = CountedRows(TokenCounts(2, VOCAB, CPU))
    state = state_of(random.Random(0), sampling, **others)
    assert rows.begin([Scheduled(0, state, 1, sample)], [draft], NoStaging()) is None
    assert not rows.has(state)


def test_what_was_sampled_with_drafts_is_counted_by_the_next_step_without() -> None:
    counts = TokenCounts(2, VOCAB, CPU)
    rows, state = CountedRows(counts), state_of(random.Random(1), FREQUENCY)
    items = [Scheduled(0, state, 1, sample=True)]
    for draft in ((), (3, 4), ()):
        if (step := rows.begin(items, [draft], NoStaging())) is not None:
            step.count()
            [row] = step.row_of.values()
            assert counts.entries[row].tolist() == expected(state)
        state.token_ids += [3, 4, 3]


def test_rows_take_no_more_memory_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_counts, "MOST_BYTES", 1000)
    assert TokenCounts.for_requests(3, 64, CPU).num_rows == 3
    assert TokenCounts.for_requests(300, 64, CPU).num_rows == 3
    assert TokenCounts.for_requests(300, 10_000, CPU).num_rows == 1
    assert np.prod(TokenCounts.for_requests(9, 25, CPU).entries.shape) * 4 == 900
