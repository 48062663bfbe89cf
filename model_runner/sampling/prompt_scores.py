"""Log-probabilities of a prompt's own tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.model_runner.sampling.device_sampler import Scores
from kvrelay.model_runner.sampling.sampler import Float32Array, IdArray, topk_indices
from kvrelay.wire.output import SampledToken, TokenLogprob

Float64Array = npt.NDArray[np.float64]
Score: TypeAlias = Callable[[torch.Tensor, Sequence[int], Sequence[int], Sequence[int]], Scores]
"""A function that scores tokens on the logits' device, such as `device_sampler.launch_scores`."""
Bring: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""A function that begins to copy a device's tensor to the host, and returns the host's tensor."""

_BLOCK = 4
"""The rows that are normalized at once: they fit into a cache between the passes over them."""


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """A chunk of a prompt, of whose tokens' followers the log-probabilities are wanted."""

    rows: slice
    """The chunk's rows in the step's logits."""
    next_ids: Sequence[int]
    """The token after each row's own."""
    count: int
    """The number of likeliest tokens to report beside each."""


class PromptScoring(Protocol):
    """The scoring of a step's chunks, each by its own key."""

    def launch(self, logits: torch.Tensor) -> None:
        """Score by the step's logits. Called by work on the forward's stream."""
        ...

    def send_home(self, bring: Bring) -> None:
        """Copy what `read` needs to the host. Called by work behind `launch`."""
        ...

    def read(self) -> Mapping[int, Sequence[SampledToken]]:
        """Return each chunk's scores, once that work has run."""
        ...


class HostScoring:
    """Scoring on the host, to which the chunks' logits are copied."""

    def __init__(self, chunks: Mapping[int, ScoredChunk]) -> None:
        self._chunks = chunks
        # Kept until they are on the host. A device gives memory that nothing refers to to the next
        # forward.
        self._logits: list[torch.Tensor] = []
        self._home: list[torch.Tensor] = []

    def launch(self, logits: torch.Tensor) -> None:
        """See `PromptScoring`."""
        self._logits = [logits[chunk.rows] for chunk in self._chunks.values()]

    def send_home(self, bring: Bring) -> None:
        """See `PromptScoring`."""
        self._home = list(map(bring, self._logits))

    def read(self) -> Mapping[int, Sequence[SampledToken]]:
        """See `PromptScoring`."""
        return {
            key: score_prompt(logits, chunk.next_ids, chunk.count)
            for (key, chunk), logits in zip(self._chunks.items(), self._home, strict=True)
        }


class DeviceScoring:
    """Scoring on the device; the scores leave it, and no logits.

    Args:
        score: scores tokens.
        chunks: the chunks.
    """

    def __init__(self, score: Score, chunks: Mapping[int, ScoredChunk]) -> None:
        self._score = score
        self._chunks = chunks
        self._scores: Scores | None = None
        self._home: Scores | None = None

    def launch(self, logits: torch.Tensor) -> None:
        """See `PromptScoring`."""
        rows: list[int] = []
        next_ids: list[int] = []
        counts: list[int] = []
        for chunk in self._chunks.values():
            rows += range(chunk.rows.start, chunk.rows.stop)
            next_ids += chunk.next_ids
            counts += [chunk.count] * len(chunk.next_ids)
        self._scores = self._score(logits, rows, next_ids, counts)

    def send_home(self, bring: Bring) -> None:
        """See `PromptScoring`."""
        assert self._scores is not None, "nothing was scored"
        self._home = self._scores.moved(bring)

    def read(self) -> Mapping[int, Sequence[SampledToken]]:
        """See `PromptScoring`."""
        assert self._home is not None, "nothing is on its way"
        scored = iter(self._home.read())
        return {key: [next(scored) for _ in chunk.next_ids] for key, chunk in self._chunks.items()}


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
    own = raw[np.arange(len(raw)), np.asarray(next_ids, np.int64)]
    chosen = own.astype(np.float64) - totals
    ids = _likeliest(logits, raw, count)
    logprobs = np.take_along_axis(raw, ids, axis=1).astype(np.float64) - totals[:, None]
    tops = map(zip, ids.tolist(), logprobs.tolist())
    return [
        SampledToken(token_id, logprob, tuple(TokenLogprob(*entry) for entry in top), rank or None)
        for token_id, logprob, top, rank in zip(
            next_ids, chosen.tolist(), tops, _ranks(raw, own), strict=True
        )
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


def _ranks(raw: Float32Array, own: Float32Array) -> list[int]:
    """How many logits of each row are at least as large as its own; 0: the row is not finite."""
    return [int(np.count_nonzero(row >= logit)) for row, logit in zip(raw, own, strict=True)]


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
