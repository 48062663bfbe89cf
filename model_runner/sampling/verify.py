"""The verification of drafts: a sequence keeps those that plain decoding would have sampled.

Most engines accept a draft with a probability that leaves the distribution as it was (Leviathan and
others 2023, arXiv 2211.17192). Here a token is a function of its logits, seed, choice and position.
So a draft is accepted if it is that token, and the output is that of plain decoding, token for
token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvrelay.model_runner.sampling.sampler import (
    Float32Array,
    Sampled,
    SamplingRow,
    argmax_rows,
    sample_row,
)
from kvrelay.wire.output import SampledToken


@dataclass(slots=True)  # not frozen, as its row
class DraftedSequence:
    """A sequence's next token, and drafts of it and those after it."""

    row: SamplingRow
    """The inputs of the choice of the token after the last known one."""
    draft_ids: Sequence[int] = ()
    """Drafts of that token and of those after it; none: plain decoding."""

    @property
    def num_rows(self) -> int:
        """The rows of logits that it takes: after the last known token, and after each draft."""
        return len(self.draft_ids) + 1


def verify(logits: torch.Tensor, drafted: Sequence[DraftedSequence]) -> list[list[Sampled]]:
    """Sample each sequence's next tokens, as many as its drafts allow.

    The first is sampled as in plain decoding. If it equals the first draft, the logits after that
    draft are those that plain decoding would have next. This goes on until a sample differs from
    its draft.

    Args:
        logits: ``[S, vocab_size]`` float32 on any device, `DraftedSequence.num_rows` for each
            sequence, end to end. They are not changed.
        drafted: the sequences.

    Returns: For each sequence 1 to `num_rows` samples. All but the last equal their drafts. The
        last differs from its draft, follows all drafts, or is an error.
    """
    assert len(logits) == sum(one.num_rows for one in drafted)
    if not drafted:
        return []
    raw: Float32Array = logits.cpu().numpy()
    likeliest = argmax_rows(raw, (one.row for one in drafted))
    samples, start = [], 0
    for one in drafted:
        end = start + one.num_rows
        samples.append(_accept(raw[start:end], one, likeliest[start:end]))
        start = end
    return samples


def rows_of(drafted: Sequence[DraftedSequence]) -> list[SamplingRow]:
    """The sampling row for each row of logits, also after drafts that turn out to be wrong."""
    return [
        one.row if one.row.is_argmax else one.row.after(one.draft_ids[:index])
        for one in drafted
        for index in range(one.num_rows)
    ]


def cut_at_other(
    sampled: Sequence[Sampled], drafted: Sequence[DraftedSequence]
) -> list[list[Sampled]]:
    """The return value of `verify`, from the samples of all of `rows_of`."""
    rows = iter(sampled)
    return [_until_other([next(rows) for _ in range(one.num_rows)], one) for one in drafted]


def _until_other(samples: list[Sampled], drafted: DraftedSequence) -> list[Sampled]:
    """The samples up to the first that differs from its draft."""
    for index, (sample, draft_id) in enumerate(zip(samples, drafted.draft_ids, strict=False)):
        if not isinstance(sample, SampledToken) or sample.token_id != draft_id:
            return samples[: index + 1]
    return samples


def _accept(
    raw: Float32Array, drafted: DraftedSequence, likeliest: Sequence[int | None]
) -> list[Sampled]:
    """One sequence's samples from its rows of logits."""
    row, draft_ids = drafted.row, drafted.draft_ids
    samples: list[Sampled] = []
    for index in range(len(raw)):
        now = row if not index or row.is_argmax else row.after(draft_ids[:index])
        sample = sample_row(raw[index], now, likeliest[index])
        samples.append(sample)
        if index == len(draft_ids) or not isinstance(sample, SampledToken):
            break
        if sample.token_id != draft_ids[index]:
            break
    return samples
