"""Whatever the drafts, the tokens are those of plain decoding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.model_runner.errors import NonFiniteLogitsError
from kvrelay.model_runner.sampling.sampler import Sampled, SamplingRow, sample_row
from kvrelay.model_runner.sampling.verify import DraftedSequence, verify
from kvrelay.wire.output import SampledToken
from kvrelay.wire.submit import SamplingParams
from tests.model_runner.samples import as_tokens

VOCAB = 6
LENGTH = 14
token_ids = st.integers(0, VOCAB - 1)


def toy_logits(context: list[int]) -> torch.Tensor:
    """``[V]``, a function of the whole context."""
    seed = np.random.SeedSequence(context).generate_state(1)[0]
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32))


@dataclass
class Sequence:
    """A request as an engine would run it."""

    prompt: list[int]
    params: SamplingParams
    choice: int
    banned: list[int]
    min_tokens: int

    def row(self, output: list[int]) -> SamplingRow:
        return SamplingRow(
            self.params,
            position=len(self.prompt) + len(output),
            prompt_ids=self.prompt,
            output_ids=tuple(output) if self.params.edits_logits else (),
            banned_ids=self.banned,
            banned_for=max(0, self.min_tokens - len(output)),
            choice=self.choice,
        )

    def decode(self) -> list[Sampled]:
        """Token by token, with bans as they are before each token."""
        output: list[int] = []
        samples: list[Sampled] = []
        while len(output) < LENGTH:
            banned = self.banned if len(output) < self.min_tokens else []
            row = replace(self.row(output), banned_ids=banned, banned_for=1)
            samples.append(sample_row(toy_logits(self.prompt + output).numpy(), row))
            assert isinstance(samples[-1], SampledToken)
            output.append(samples[-1].token_id)
        return samples


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 0, 0.7, 1.5]),
    top_p=st.sampled_from([1.0, 0.8]),
    top_k=st.sampled_from([0, 3]),
    frequency_penalty=st.sampled_from([0.0, 0.9]),
    presence_penalty=st.sampled_from([0.0, 1.1]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.sampled_from([None, 0, 2]),
    logit_bias=st.dictionaries(token_ids, st.floats(-3, 3), max_size=2),
)
plain = st.builds(SamplingParams, temperature=st.sampled_from([0, 1]))
sequences = st.builds(
    Sequence,
    st.lists(token_ids, min_size=1, max_size=5),
    params | plain,
    st.integers(0, 3),
    st.lists(token_ids, max_size=2, unique=True),
    st.integers(0, LENGTH),
)


@settings(deadline=None)
@given(st.lists(sequences, min_size=1, max_size=4), st.data())
def test_speculation_equals_plain_decoding(batch: list[Sequence], data: st.DataObject) -> None:
    expected = [sequence.decode() for sequence in batch]
    got: list[list[Sampled]] = [[] for _ in batch]
    while running := [i for i in range(len(batch)) if len(got[i]) < LENGTH]:
        drafted, logits = [], []
        for i in running:
            output = [token.token_id for token in as_tokens(got[i])]
            ahead = [token.token_id for token in as_tokens(expected[i][len(output) :])]
            good = data.draw(st.integers(0, min(4, len(ahead))))
            drafts = ahead[:good] + data.draw(st.lists(token_ids, max_size=2))
            drafted.append(DraftedSequence(batch[i].row(output), drafts))
            context = batch[i].prompt + output
            logits += [toy_logits(context + drafts[:n]) for n in range(len(drafts) + 1)]
        for i, one, samples in zip(
            running, drafted, verify(torch.stack(logits), drafted), strict=True
        ):
            # As many as the drafts allow, no more and no fewer.
            kept = [token.token_id for token in as_tokens(samples)]
            assert kept[:-1] == list(one.draft_ids[: len(kept) - 1])
            assert len(kept) == one.num_rows or kept[-1] != one.draft_ids[len(kept) - 1]
            got[i] += samples
    assert [samples[:LENGTH] for samples in got] == expected


@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"logit_bias": {1: 0.5}}])
def test_broken_logits_end_a_sequence_and_no_other(options: dict[str, Any]) -> None:
    row = SamplingRow(SamplingParams(**options), 3, [0], [])
    logits = torch.full((4, VOCAB), -50.0)
    logits[:, 2] = 50.0
    logits[1, 4] = torch.nan
    first, second = verify(logits, [DraftedSequence(row, [2, 2]), DraftedSequence(row)])
    assert isinstance(first[0], SampledToken)
    assert isinstance(first[1], NonFiniteLogitsError)
    assert len(first) == 2
    assert second == [first[0]]


def test_no_sequences() -> None:
    assert verify(torch.empty(0, VOCAB), []) == []
