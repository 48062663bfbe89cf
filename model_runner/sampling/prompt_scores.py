"""Log-probabilities of a prompt's own tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.model_runner.sampling.sampler import Float32Array, IdArray, topk_indices
from kvrelay.wire.output import SampledToken, TokenLogprob

Float64Array = npt.NDArray[np.float64]

_BLOCK = 4
"""The rows that are normalized at once: they fit into a cache between the passes over them."""


def score_prompt(logits: torch.Tensor, next_ids: Sequence[int], count: int) -> list[SampledToken]:
    """The log-probability of each token that follows a prompt's position.

    They are in the model's distribution before any editing, as the sampler reports them for its own
    tokens. A row that is not finite has log-probabilities that are NaN.

    Args:
        logits: ``[S, vocab_size]`` float32 of consecutive positions, on any device; not changed.
        next_ids: `S` tokens, each the one after its row's position.
        count: the number of likeliest tokens to report beside each; at least 0.
    """
    assert logits.ndim == 2
    assert len(logits) == len(next_ids)
    if not len(logits):
        return []
    count = min(count, logits.shape[1])
    raw: Float32Array = logits.cpu().numpy()
    totals = _log_totals(raw)
    chosen = raw[np.arange(len(raw)), np.asarray(next_ids, np.int64)].astype(np.float64) - totals
    ids = _likeliest(logits, raw, count)
    logprobs = np.take_along_axis(raw, ids, axis=1).astype(np.float64) - totals[:, None]
    tops = map(zip, ids.tolist(), logprobs.tolist())
    return [
        SampledToken(token_id, logprob, tuple(TokenLogprob(*entry) for entry in top))
        for token_id, logprob, top in zip(next_ids, chosen.tolist(), tops, strict=True)
    ]


def _log_totals(raw: Float32Array) -> Float64Array:
    """``[S]`` logarithms of each row's sum of exponentials."""
    totals = np.empty(len(raw))
    # One buffer for all: fresh memory of this size costs more than the exponentials.
    buffer = np.empty_like(raw[:_BLOCK])
    for start in range(0, len(raw), _BLOCK):
        rows = raw[start : start + _BLOCK]
        exponentials = buffer[: len(rows)]
        largest = rows.max(axis=1)
        np.subtract(rows, largest[:, None], out=exponentials)
        np.exp(exponentials, out=exponentials)
        sums = exponentials.sum(axis=1, dtype=np.float64)
        totals[start : start + _BLOCK] = largest + np.log(sums)
    return totals


def _likeliest(logits: torch.Tensor, raw: Float32Array, count: int) -> IdArray:
    """``[S, count]`` ids of the largest logits of each row in their order, equals by id."""
    if count == 0:
        return np.empty((len(raw), 0), np.int64)
    more = min(count + 1, raw.shape[1])
    found = torch.topk(logits, more, dim=1)
    values, ids = found.values.cpu().numpy(), found.indices.cpu().numpy()
    # Which of several equal logits topk takes is not said: it matters where they are at the cut.
    cut = np.flatnonzero(values[:, count - 1] == values[:, -1]) if count < more else ()
    values, ids = values[:, :count], ids[:, :count]
    ids = np.take_along_axis(ids, np.lexsort((ids, -values), axis=1), axis=1)
    for index in cut:
        ids[index] = topk_indices(raw[index], count)[:count]
    return ids
