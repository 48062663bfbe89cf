"""A draft model beside its target: whatever it guesses, the tokens are those of plain decoding."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvrelay.engine.executor.drafters import ModelDrafter
from kvrelay.engine.executor.token_state import TokenState
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner import draft_model
from kvrelay.model_runner import runner as runner_module
from kvrelay.model_runner.batch import ForwardBatch
from kvrelay.model_runner.draft_model import DraftModel, DraftRequest, count_dummy_pages
from kvrelay.model_runner.errors import CheckpointError
from kvrelay.model_runner.runner import ModelRunner
from kvrelay.model_runner.sampling.device_sampler import Draws
from kvrelay.model_runner.sampling.ngram import NgramIndex
from kvrelay.model_runner.sampling.sampler import Sampled, SamplingRow
from kvrelay.model_runner.sampling.verify import DraftedSequence, verify
from kvrelay.wire.output import SampledToken
from kvrelay.wire.submit import GenerationParams, SamplingParams, StopConditions
from tests.known import known
from tests.late_device import LateStreams, draw
from tests.model_runner.samples import as_tokens
from tests.model_runner.tiny_models import Models

PAGE_SIZE = 3
CAPACITY = 90
LENGTH = 40
GREEDY = {"temperature": 0}
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
PENALIZED = {"temperature": 0.9, "repetition_penalty": 1.3, "logit_bias": {5: 2.0}, "logprobs": 1}


class Speculation:
    """Sequences that a target and perhaps a draft model run together, on shuffled pages.

    Before each step, what neither model looks at any more is gone from pools
    with a window: its table's entries are -1 and its pages NaN.
    """

    def __init__(
        self,
        target: ModelRunner,
        draft: DraftModel | None,
        prompts: Sequence[list[int]],
        params: Sequence[dict[str, Any]],
    ) -> None:
        self.target, self.draft = target, draft
        geometries = target.make_geometries(PAGE_SIZE)
        own = len(geometries)
        if draft is not None:
            geometries += draft.make_geometries(PAGE_SIZE)
        pages_each = geometries[0].pages_for(CAPACITY)
        total = len(prompts) * pages_each + 4
        # With graphs each pool has a dummy page.
        dummy = count_dummy_pages(target, draft)
        self.pools = [
            KVPool(geometry, total + dummy, target.device, dummy) for geometry in geometries
        ]
        self.tables = []
        for seed, pool in enumerate(self.pools):
            pool.data.fill_(torch.nan)
            shuffled = np.random.default_rng(seed).permutation(total)[: len(prompts) * pages_each]
            self.tables.append(shuffled.reshape(len(prompts), pages_each).astype(np.int32))
        target.bind(self.pools[:own])
        if draft is not None:
            draft.bind(self.pools[own:])
        self.prompts = prompts
        self.params = [SamplingParams(**options, seed=i) for i, options in enumerate(params)]
        self.texts = [list(prompt) for prompt in prompts]
        self.draft_kv = [0] * len(prompts)
        self.target_kv = [0] * len(prompts)
        self.samples: list[list[SampledToken]] = [[] for _ in prompts]
        self.guessed = self.kept = 0
        self.proposer: Callable[[dict[int, int]], dict[int, Sequence[int]]] = self.propose
        """Guesses for each sequence: the draft model's unless a test has others."""

    @property
    def drafter(self) -> DraftModel:
        assert self.draft is not None
        return self.draft

    def prefill(self, chunk: int) -> None:
        """All but each prompt's last token, in chunks, through both models."""
        for i, prompt in enumerate(self.prompts):
            for start in range(0, len(prompt) - 1, chunk):
                end = min(start + chunk, len(prompt) - 1)
                self.run([i], [prompt[start:end]], draft_too=True)

    def run(self, indices: list[int], new: list[list[int]], draft_too: bool) -> torch.Tensor:
        """Logits of all new tokens of some sequences, after what the target has written."""
        starts = [self.target_kv[i] for i in indices]
        query_start = np.cumsum([0, *map(len, new)]).astype(np.int32)
        for i, tokens in zip(indices, new, strict=True):
            self.target_kv[i] += len(tokens)
        batch = ForwardBatch(
            input_ids=np.concatenate([np.array(tokens, np.int64) for tokens in new]),
            positions=np.concatenate(
                [np.arange(a, a + len(t)) for a, t in zip(starts, new, strict=True)]
            ),
            query_start=query_start,
            seq_lens=np.array([self.target_kv[i] for i in indices], np.int32),
            page_tables=tuple(table[indices] for table in self.tables),
            logit_rows=np.arange(query_start[-1], dtype=np.int64),
        )
        if draft_too and self.draft is not None:
            self.draft.follow(batch)
            for i in indices:
                self.draft_kv[i] = self.target_kv[i]
        return self.target.forward(batch)

    def row(self, i: int) -> SamplingRow:
        output = self.texts[i][len(self.prompts[i]) :]
        return SamplingRow(
            self.params[i],
            position=len(self.texts[i]),
            prompt_ids=self.prompts[i],
            output_ids=tuple(output),
            banned_ids=[7, 8],
            banned_for=max(0, 9 - len(output)),
        )

    def step(self, counts: dict[int, int]) -> None:
        """Propose so many tokens for some sequences, verify, keep what is right."""
        self.slide()
        drafts = self.proposer(counts)
        new = [[self.texts[i][-1], *drafts[i]] for i in counts]
        logits = self.run(list(counts), new, draft_too=False)
        verified = verify(logits, [DraftedSequence(self.row(i), drafts[i]) for i in counts])
        for i, samples in zip(counts, verified, strict=True):
            self.guessed += len(drafts[i])
            self.kept += len(samples) - 1
            self.samples[i] += as_tokens(samples)
            self.texts[i] += [token.token_id for token in as_tokens(samples)]
            self.target_kv[i] = len(self.texts[i]) - 1
            self.draft_kv[i] = min(self.draft_kv[i], len(self.texts[i]) - 1)

    def propose(self, counts: dict[int, int]) -> dict[int, Sequence[int]]:
        if self.draft is None:
            return dict.fromkeys(counts, ())
        drafting = [
            DraftRequest(self.row(i), self.texts[i][self.draft_kv[i] :], count)
            for i, count in counts.items()
        ]
        assert all(1 <= len(one.new_ids) <= 2 for one in drafting)
        proposals = self.draft.propose(drafting, [table[list(counts)] for table in self.tables])
        for i, one, proposal in zip(counts, drafting, proposals, strict=True):
            assert len(proposal.token_ids) == one.count
            assert proposal.kv_len == one.kv_end
            self.draft_kv[i] = proposal.kv_len
        return {i: proposal.token_ids for i, proposal in zip(counts, proposals, strict=True)}

    def token_states(self, indices: Sequence[int]) -> list[TokenState]:
        """What an engine keeps of these sequences."""
        return [
            TokenState(
                token_ids=list(self.texts[i]),
                input_len=len(self.prompts[i]),
                prompt_ids=self.prompts[i],
                params=GenerationParams(self.params[i], StopConditions(LENGTH)),
                choices=(0,),
                draft_kv_len=self.draft_kv[i],
            )
            for i in indices
        ]

    def slide(self) -> None:
        for pool, table in zip(self.pools, self.tables, strict=True):
            window = pool.geometry.window
            if window is None:
                continue
            for i in range(len(self.texts)):
                next_ = (
                    min(self.target_kv[i], self.draft_kv[i]) if self.draft else self.target_kv[i]
                )
                gone = table[i, : max(0, next_ - window + 1) // PAGE_SIZE]
                for layer in range(pool.geometry.num_layers):
                    pool.layer(layer)[gone[gone >= 0]] = torch.nan
                gone[:] = -1

    def finish(self, most: int) -> list[list[SampledToken]]:
        """Run to `LENGTH` outputs each, with counts that differ by sequence and step."""
        number = 0
        while running := [i for i, samples in enumerate(self.samples) if len(samples) < LENGTH]:
            self.step({i: (number + 2 * i) % (most + 1) for i in running})
            number += 1
        return [samples[:LENGTH] for samples in self.samples]


def assert_same(got: list[list[SampledToken]], expected: list[list[SampledToken]]) -> None:
    for mine, plain in zip(got, expected, strict=True):
        assert [s.token_id for s in mine] == [s.token_id for s in plain]
        for one, other in zip(mine, plain, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


def runs(
    models: Models,
    target: str,
    draft: tuple[str, str] | None,
    tokens: list[int],
    params: Sequence[dict[str, Any]] = (GREEDY, SAMPLED, PENALIZED, GREEDY),
) -> Speculation:
    prompts = [tokens[:17], tokens[20:21], tokens[30:42], tokens[50:72]]
    runner = ModelRunner(models.folder(target), "float32", "cpu")
    drafter = None if draft is None else DraftModel(models.folder(draft[0]), draft[1], "cpu")
    running = Speculation(runner, drafter, prompts, params)
    running.prefill(chunk=5)
    return running


@pytest.fixture(scope="module")
def plain(models: Models, tokens: list[int]) -> dict[str, list[list[SampledToken]]]:
    """Without a draft model."""
    return {
        name: runs(models, name, None, tokens).finish(0)
        for name in ("llama", "gemma3", "deepseek-v3")
    }


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek-v3"])
def test_a_twin_is_always_right(
    name: str, models: Models, tokens: list[int], plain: dict[str, list[list[SampledToken]]]
) -> None:
    running = runs(models, name, (name, "float32"), tokens)
    assert_same(running.finish(4), plain[name])
    assert running.kept == running.guessed > 50


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("llama", "qwen3-window"),
        ("llama", "gemma3"),
        ("gemma3", "deepseek-v3"),
        ("gemma3", "mistral-window"),
        ("deepseek-v3", "llama"),
    ],
)
def test_another_model_changes_no_token(
    target: str,
    draft: str,
    models: Models,
    tokens: list[int],
    plain: dict[str, list[list[SampledToken]]],
) -> None:
    running = runs(models, target, (draft, "float32"), tokens)
    assert_same(running.finish(3), plain[target])
    assert running.kept < running.guessed


def test_a_twin_of_less_precision_is_often_right(
    models: Models, tokens: list[int], plain: dict[str, list[list[SampledToken]]]
) -> None:
    running = runs(models, "llama", ("llama", "bfloat16"), tokens)
    assert_same(running.finish(4), plain["llama"])
    assert running.guessed / 2 < running.kept < running.guessed


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A device that draws; whenever the host waits for it, a line."""
    lines: list[str] = []
    read, nobodys = Draws.read, torch.empty(0)

    def listen(self: Draws) -> list[Sampled]:
        lines.append("draws")
        return read(self)

    monkeypatch.setattr(Draws, "read", listen)
    monkeypatch.setattr(runner_module, "wait_for_device", lambda _: lines.append("forward"))
    monkeypatch.setattr(draft_model, "samples_on", lambda _: True)
    monkeypatch.setattr(
        draft_model, "launch", lambda logits, rows, **_: draw(logits, rows, nobodys)
    )
    return lines


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_guesses_stay_on_the_device_until_all_are_made(
    name: str, models: Models, tokens: list[int], waits: list[str]
) -> None:
    params: list[dict[str, Any]] = [
        GREEDY,
        SAMPLED,
        {"temperature": 0.9, "logit_bias": {5: 2.0}},
        GREEDY,
    ]
    expected = runs(models, name, None, tokens, params).finish(0)
    running = runs(models, name, (name, "float32"), tokens, params)
    waits.clear()
    running.propose({0: 4, 1: 0, 2: 1, 3: 3})
    assert waits == ["draws"]
    drafter, states = ModelDrafter(running.drafter), running.token_states([0, 3])
    asked = (states, [running.row(0), running.row(3)], [4, 2])
    tables = [table[[0, 3]] for table in running.tables]
    waits.clear()
    pending = known(drafter.begin(*asked, tables))
    assert not waits
    pending.send_home(torch.clone)
    pending.read()
    kv_lens = [state.draft_kv_len for state in states]
    for state in states:
        state.draft_kv_len = 0
    assert drafter.propose(*asked, tables) == pending.drafts
    assert [state.draft_kv_len for state in states] == kv_lens
    running.draft_kv = [length - 1 for length in map(len, running.texts)]
    assert_same(running.finish(4), expected)
    assert running.kept == running.guessed > 50


@pytest.mark.usefixtures("waits")
def test_a_launch_that_fails_has_its_turn_of_the_plans(
    models: Models, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch waits for the last but one, whose plan it takes, though that one has failed."""
    device = LateStreams(random.Random(0))
    running = runs(models, "llama", ("llama", "float32"), tokens)
    runner, numbers, ran = running.drafter._runner, itertools.count(), list[int]()
    launch_plainly, failing = runner.launch, 1

    def launch(batch: ForwardBatch) -> torch.Tensor:
        number = next(numbers)
        assert len(ran) >= number - 1, "kernels of the plan that is made anew may run"
        device.forward.launch(lambda: ran.append(number))
        if number == failing:
            raise RuntimeError("injected")
        return launch_plainly(batch)

    monkeypatch.setattr(runner_module, "record_event", lambda _: device.forward.record())
    monkeypatch.setattr(runner, "launch", launch)
    with pytest.raises(RuntimeError, match="injected"):
        running.propose({0: 4})
    running.propose({0: 4})
    assert next(numbers) == 6


@pytest.mark.usefixtures("waits")
def test_guesses_that_the_host_reads_take_turns_of_the_plans_too(
    models: Models, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guesses before them, of other requests, may not have run."""
    device = LateStreams(random.Random(0))
    params: list[dict[str, Any]] = [GREEDY, PENALIZED, GREEDY, GREEDY]
    running = runs(models, "llama", ("llama", "float32"), tokens, params)
    runner, numbers, ran = running.drafter._runner, itertools.count(), list[int]()
    launch_plainly = runner.launch

    def launch(batch: ForwardBatch) -> torch.Tensor:
        number = next(numbers)
        assert len(ran) >= number - 1, "kernels of the plan that is made anew may run"
        device.forward.launch(lambda: ran.append(number))
        return launch_plainly(batch)

    monkeypatch.setattr(runner_module, "record_event", lambda _: device.forward.record())
    monkeypatch.setattr(runner, "launch", launch)
    running.propose({0: 4})
    assert len(ran) < 4, "nothing is on its way"
    monkeypatch.setattr(draft_model, "samples_on", lambda _: False)  # for want of a GPU's sampler
    running.propose({1: 2})
    assert ran == [*range(6)], "the host reads what has not run"


def test_prompts_are_followed_without_a_wait(
    models: Models, tokens: list[int], waits: list[str]
) -> None:
    """The host waits for the target's chunks alone, as a test's forwards do."""
    running = runs(models, "llama", ("llama", "float32"), tokens)
    chunks = sum(-(-(len(prompt) - 1) // 5) for prompt in running.prompts)
    assert waits == ["forward"] * chunks


@pytest.mark.usefixtures("waits")
def test_broken_logits_end_a_proposal_on_the_device(models: Models, tokens: list[int]) -> None:
    test_broken_logits_end_a_proposal(models, tokens)


def test_many_new_tokens_are_caught_up_with(models: Models, tokens: list[int]) -> None:
    running = runs(models, "llama", ("llama", "float32"), tokens)
    for _ in range(3):
        running.step({0: 2, 1: 2, 2: 2, 3: 2})
    row = running.row(0)
    tables = [table[:1] for table in running.tables]
    (close,) = running.drafter.propose(
        [DraftRequest(row, running.texts[0][running.draft_kv[0] :], 3)], tables
    )
    (far,) = running.drafter.propose([DraftRequest(row, running.texts[0], 3)], tables)
    assert close == far


def test_broken_logits_end_a_proposal(models: Models, tokens: list[int]) -> None:
    params: list[dict[str, Any]] = [GREEDY, SAMPLED, GREEDY, GREEDY]
    running = runs(models, "llama", ("llama", "float32"), tokens, params)
    first_page = running.tables[1][2, 0]
    running.pools[1].data[first_page] = torch.nan
    counts = dict.fromkeys(range(4), 2)
    drafting = [DraftRequest(running.row(i), running.texts[i][-1:], 2) for i in counts]
    proposals = running.drafter.propose(drafting, running.tables)
    assert [len(proposal.token_ids) for proposal in proposals] == [2, 2, 0, 2]
    assert [proposal.kv_len - len(running.texts[i]) for i, proposal in enumerate(proposals)] == [
        1,
        1,
        0,
        1,
    ]


def test_no_sequences(models: Models) -> None:
    draft = DraftModel(models.folder("llama"), "float32", "cpu")
    assert draft.propose([], []) == []


def test_pages_that_are_missing_are_noticed(models: Models, tokens: list[int]) -> None:
    running = runs(models, "llama", ("llama", "float32"), tokens)
    drafting = [DraftRequest(running.row(1), running.texts[1][-1:], 3)]
    table = running.tables[1][1:2].copy()
    table[0, 1:] = -1
    running.drafter.propose(drafting, [table])
    with pytest.raises(AssertionError):
        running.drafter.propose([DraftRequest(running.row(1), running.texts[1][-1:], 4)], [table])


def test_geometries_are_the_drafts(models: Models) -> None:
    draft = DraftModel(models.folder("gemma3"), "bfloat16", "cpu")
    geometries = draft.make_geometries(16)
    assert [geometry.pool_name for geometry in geometries] == ["draft_full", "draft_window"]
    assert all(geometry.draft and geometry.page_size == 16 for geometry in geometries)


def test_another_vocabulary_is_refused(models: Models, tmp_path: Path) -> None:
    draft = DraftModel(models.folder("llama"), "float32", "cpu")
    target = ModelRunner(models.folder("gemma3"), "float32", "cpu").config
    draft.check_vocab(target)
    with pytest.raises(CheckpointError, match=r"llama/config\.json: vocab_size .* 132, not 131$"):
        draft.check_vocab(replace(target, vocab_size=132))


def test_warm_up_leaves_the_bound_pools_alone(models: Models) -> None:
    draft = DraftModel(models.folder("gemma3"), "float32", "cpu")
    pools = [KVPool(g, 8, torch.device("cpu")) for g in draft.make_geometries(4)]
    for pool in pools:
        pool.data.fill_(torch.nan)
    draft.bind(pools)
    draft.warm_up()
    assert all(pool.data.isnan().all() for pool in pools)


def test_ngrams_change_no_token(
    models: Models, tokens: list[int], plain: dict[str, list[list[SampledToken]]]
) -> None:
    running = runs(models, "llama", None, tokens)
    indices = [NgramIndex() for _ in running.texts]

    def propose(counts: dict[int, int]) -> dict[int, Sequence[int]]:
        for i in counts:
            indices[i].extend(running.texts[i][len(indices[i]) :])
        return {i: indices[i].propose(count) for i, count in counts.items()}

    running.proposer = propose
    assert_same(running.finish(4), plain["llama"])
    assert running.guessed > 0
