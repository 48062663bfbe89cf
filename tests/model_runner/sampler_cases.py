"""The sampler of CUDA devices, on one or by Triton's interpreter: its tokens are the CPU's.

Run by `test_device_sampler.py`, in a process of its own: whether triton interprets is decided when
it is imported, and the interpreter leaves triton changed behind.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from kvrelay.cpu_kernels.gumbel import add_noise, random_words
from kvrelay.model_runner.sampling import sampling_triton
from kvrelay.model_runner.sampling.device_sampler import launch, launch_scores, sample_on_device
from kvrelay.model_runner.sampling.prompt_scores import score_prompt
from kvrelay.model_runner.sampling.sampler import SamplingRow, sample_row
from kvrelay.model_runner.sampling.step_sampling import DeviceSampling
from kvrelay.model_runner.sampling.token_counts import CountChanges, TokenCounts, places_of
from kvrelay.model_runner.sampling.verify import DraftedSequence, verify
from kvrelay.wire.output import SampledToken
from kvrelay.wire.submit import SamplingParams

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
VOCAB = 200
SEED = 2**63 + 12345
_prepared: set[int] = set()
_gumbel = sampling_triton._gumbel


def call_quickly(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Prepare triton for the functions of a module once, not at each of thousands of calls."""
    names = self.fn.__globals__
    if names["__name__"] != sampling_triton.__name__ and id(names) not in _prepared:
        _prepared.add(id(names))
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **kwargs)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of which a vocabulary has several."""
    for name in ("BLOCK", "ROW_BLOCK"):
        monkeypatch.setattr(sampling_triton, name, 128)
    monkeypatch.setattr(sampling_triton, "ENTRIES", 16)
    if INTERPRETED:
        monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call_quickly)


def row(position: int = 0, **params: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(seed=SEED, **params), position, (), ())


def random_logits(rows: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0)) * scale


def equal(got: object, expected: object) -> None:
    assert type(got) is type(expected)
    if not isinstance(got, SampledToken) or not isinstance(expected, SampledToken):
        assert str(got) == str(expected)
        return
    assert (got.token_id, got.rank) == (expected.token_id, expected.rank)
    assert [top.token_id for top in got.top] == [top.token_id for top in expected.top]
    assert (got.logprob is None) == (expected.logprob is None)
    if expected.logprob is not None:
        logprobs = [got.logprob, *(top.logprob for top in got.top)]
        others = [expected.logprob, *(top.logprob for top in expected.top)]
        assert logprobs == pytest.approx(others, abs=2e-6)


def agrees(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    before = logits.clone()
    there = logits.to(DEVICE)
    for got, raw, one in zip(sample_on_device(there, rows), logits.numpy(), rows, strict=True):
        equal(got, sample_row(raw, one))
    assert torch.equal(before.nan_to_num(7), there.cpu().nan_to_num(7))


@triton.jit  # type: ignore[untyped-decorator]
def _noise(
    seed: tl.tensor,
    position: tl.tensor,
    words_out: tl.tensor,
    out: tl.tensor,
    block: tl.constexpr,
) -> None:
    counter = tl.arange(0, block // 4)
    words = tl.philox(tl.load(seed), counter.to(tl.uint32), position, 3, 0)
    for word in tl.static_range(4):
        ids = counter // 16 * 64 + word * 16 + counter % 16
        tl.store(words_out + ids, words[word].to(tl.int32, bitcast=True))
        tl.store(out + ids, _gumbel(words[word]))


def test_counter_bits_are_those_of_the_cpu_and_the_noise_nearly() -> None:
    """Within two units in the last place of a number from 1 on: compilers fuse on a CPU."""
    words, expected = np.empty(4096, np.uint32), np.empty(4096, np.float32)
    random_words(np.uint64(SEED), 3, 77, words)
    zero = np.zeros(4096, np.float32)
    add_noise(zero, np.float32(0), np.float32(1), words, expected)
    got = torch.empty(4096, device=DEVICE)
    bits = torch.empty(4096, dtype=torch.int32, device=DEVICE)
    seed = torch.from_numpy(np.array([SEED], np.uint64).view(np.int64)).to(DEVICE)
    _noise[(1,)](seed, 77, bits, got, block=4096, enable_fp_fusion=False)
    assert np.array_equal(bits.cpu().numpy(), words.view(np.int32))
    units = np.spacing(np.maximum(np.abs(expected), 1))
    assert (np.abs(got.cpu().numpy() - expected) <= 2 * units).all()


def test_draws_without_filters() -> None:
    """Nearly equal logits: nothing but noise decides."""
    rows = [replace(row(position, temperature=0.9), choice=position % 2) for position in range(4)]
    agrees(random_logits(4, scale=0.01), rows)


def test_the_largest_without_temperature() -> None:
    logits = random_logits(2)
    logits[1] = logits[1].round()  # many are equally large
    agrees(logits, [row(temperature=0)] * 2)


def test_filters() -> None:
    filters: list[dict[str, Any]] = [
        {"top_k": 5},
        {"top_k": 1},
        {"top_k": VOCAB + 3},
        {"top_p": 0.6},
        {"top_p": 1e-6},
        {"min_p": 0.2},
        {"top_k": 40, "top_p": 0.5, "min_p": 0.1},
    ]
    rows = [row(at, temperature=0.8, **one) for at, one in enumerate(filters)]
    agrees(random_logits(len(rows), scale=2.0), rows)


def test_filters_among_equals() -> None:
    """Top-k keeps all that equal its last token; top-p the smaller ids."""
    logits = random_logits(4).round()
    rows = [row(at, temperature=1.0, top_p=0.35) for at in range(2)]
    rows += [row(at, temperature=1.0, top_k=9) for at in range(2)]
    agrees(logits, rows)


def test_edits() -> None:
    prompt, output = list(range(40)), [3, 3, 190, 41, 3]
    penalties: dict[str, Any] = {"repetition_penalty": 1.7, "frequency_penalty": 0.6}
    rows = [
        row(temperature=0, logit_bias={7: 100.0, 199: -3.5}),
        row(temperature=0.7, **penalties, presence_penalty=-0.4, logit_bias={3: 1.25}),
        row(temperature=0),
        row(temperature=0.7, presence_penalty=2.0),
        replace(row(temperature=0), banned_ids=tuple(range(150)), banned_for=1),
        replace(row(temperature=0), banned_ids=tuple(range(150)), banned_for=0),
        replace(row(temperature=1.0), allowed=np.array([[5, *[0] * 5, 1 << 3]], np.int32)),
        replace(row(temperature=1.0, top_p=0.7), allowed=np.array([[-1] * 7], np.int32)),
    ]
    rows = [replace(one, prompt_ids=prompt, output_ids=output) for one in rows]
    agrees(random_logits(len(rows)), rows)


def test_penalties_of_tokens_that_the_device_has_counted() -> None:
    """The latest is known to the device alone; of a request before nothing is left in the row."""
    prompt, output = [1, 1, *range(30, 60)], [3, 3, 190, 41, 3]
    counts = TokenCounts(3, VOCAB, DEVICE)
    counts.change(changes(counts, 1, list(range(VOCAB)), [5, 6]), None)
    counts.change(changes(counts, 1, prompt, output[:4], cleared=[1], source=2), sampled(7, 9, 3))
    counts.change(changes(counts, 2, prompt, output), None)
    penalties: dict[str, Any] = {"repetition_penalty": 1.7, "frequency_penalty": 0.6}
    logits = random_logits(4)
    rows = [
        row(temperature=0, **penalties, presence_penalty=0.3),
        row(temperature=0.7, **penalties, logit_bias={3: 1.25, 41: -9.0}),
        replace(row(temperature=0, **penalties), banned_ids=tuple(range(150))),
        row(temperature=0.7, top_p=0.8, presence_penalty=-2.0, logprobs=2),
    ]
    counted = [replace(one, counted_row=1 + at % 2) for at, one in enumerate(rows)]
    got = launch(logits.to(DEVICE), counted, counts=counts.entries).read()
    for token, raw, one in zip(got, logits.numpy(), rows, strict=True):
        equal(token, sample_row(raw, replace(one, prompt_ids=prompt, output_ids=output)))


def changes(
    counts: TokenCounts,
    row: int,
    prompt: list[int],
    output: list[int],
    cleared: Sequence[int] = (),
    source: int | None = None,
) -> CountChanges:
    awaited = ([], []) if source is None else ([row * VOCAB], [source])
    return CountChanges(
        np.array(cleared, np.int64),
        places_of(row, counts.vocab, prompt),
        places_of(row, counts.vocab, output),
        np.array(awaited, np.int64),
    )


def sampled(*token_ids: int) -> torch.Tensor:
    return torch.tensor(token_ids).to(DEVICE)


def test_log_probabilities() -> None:
    counts = [None, 0, 1, 4, None, 20]
    rows = [row(at, temperature=0.7, logprobs=count) for at, count in enumerate(counts)]
    rows[3] = replace(rows[3], banned_ids=(4,))  # they are of the model, not of the edits
    logits = random_logits(len(rows))
    logits[3] = logits[3].round()
    agrees(logits, rows)


def test_scores_of_prompts() -> None:
    """Chunks of which some rows are scored, each with its number of likeliest tokens."""
    logits = random_logits(6)
    logits[5] = logits[5].round()
    counts = {1: 2, 2: 2, 4: 0, 5: 3}
    token_ids = [5, 199, 0, 77]
    got = launch_scores(logits.to(DEVICE), list(counts), token_ids, list(counts.values())).read()
    for (place, count), token_id, one in zip(counts.items(), token_ids, got, strict=True):
        [expected] = score_prompt(logits[place : place + 1], [token_id], count)
        equal(one, expected)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, where it computes for a device
def test_a_broken_row_of_a_prompt_is_nan_and_the_others_are_not() -> None:
    logits = random_logits(4)
    logits[0, 5], logits[1, 6], logits[2] = torch.nan, torch.inf, torch.nan
    *broken, right = launch_scores(logits.to(DEVICE), range(4), [5, 6, 7, 8], [1] * 4).read()
    for one in broken:
        assert np.isnan(np.array([one.logprob, *(top.logprob for top in one.top)], float)).all()
        assert all(0 <= top.token_id < VOCAB for top in one.top)
    equal(right, score_prompt(logits[3:], [8], 1)[0])


def test_rows_without_a_token() -> None:
    logits = random_logits(5)
    logits[0, 5] = torch.nan
    logits[1, 6] = torch.inf
    logits[2] = -torch.inf
    rows = [row(temperature=1.0, logprobs=1), row(temperature=0), row(temperature=0), row(), row()]
    rows[3] = replace(rows[3], banned_ids=tuple(range(VOCAB)))
    agrees(logits, rows)


def test_drafts_are_kept_as_on_the_cpu() -> None:
    params = SamplingParams(seed=SEED, temperature=0.8, frequency_penalty=1.0, logprobs=1)
    rows = [SamplingRow(params, 4, (1, 2, 3), (9,)), SamplingRow(SamplingParams(), 4, (), ())]
    logits = random_logits(5)
    logits[4, 0] = torch.nan
    right = [sample_row(logits[0].numpy(), rows[0]), sample_row(logits[3].numpy(), rows[1])]
    first, second = (one.token_id for one in right if isinstance(one, SampledToken))
    drafted = [DraftedSequence(rows[0], (first, VOCAB - 1)), DraftedSequence(rows[1], (second,))]
    expected = verify(logits, drafted)
    assert [len(samples) for samples in expected] == [2, 2]
    sampling = DeviceSampling(launch, drafted)
    sampling.launch(logits.to(DEVICE))
    sampling.send_home(torch.Tensor.cpu)
    for got, others in zip(sampling.read(), expected, strict=True):
        for one, other in zip(got, others, strict=True):
            equal(one, other)
