"""From logits to tokens, each a pure function of its own row, seed, choice and position.

Nothing of a row's result depends on the rows beside it or on any state, so a
stream that is resumed elsewhere goes on with the same tokens. The order of
steps: bias, penalties, bans, temperature, top-k, top-p, min-p, draw.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvrelay.model_runner.errors import NonFiniteLogitsError
from kvrelay.model_runner.sampling_params import SamplingParams

Float32Array = npt.NDArray[np.float32]
IdArray = npt.NDArray[np.int64]

_BLOCK = 256
"""Weights summed at once when looking for the drawn one."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What the choice of one token depends on beside its logits."""

    params: SamplingParams
    position: int
    """Absolute position of the token being sampled."""
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    """The output so far; may be left empty where `params.edits_logits` is false."""
    banned_ids: Sequence[int] = ()
    """Not to be sampled, such as ends of sequence before `min_tokens`."""
    banned_for: int = 1
    """How many tokens from this one on `banned_ids` counts for; 0: it does not."""
    choice: int = 0
    """Which of a request's completions this is: each has draws of its own. At least 0."""

    @property
    def edits_logits(self) -> bool:
        """Whether logits are changed before the temperature."""
        return (bool(self.banned_ids) and self.banned_for > 0) or self.params.edits_logits

    @property
    def is_argmax(self) -> bool:
        """Whether the largest logit is chosen, wherever it is and whatever came before."""
        return self.params.is_greedy and not self.edits_logits

    def after(self, token_ids: Sequence[int]) -> SamplingRow:
        """The row of the token that follows this one's, were it and those after it `token_ids`."""
        count = len(token_ids)
        outputs = (*self.output_ids, *token_ids) if self.params.edits_logits else self.output_ids
        banned_for = max(0, self.banned_for - count)
        return replace(
            self, position=self.position + count, output_ids=outputs, banned_for=banned_for
        )


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token, and the model's own log-probabilities if they were asked for."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens with their log-probabilities, likeliest first."""


Sampled: TypeAlias = SampledToken | NonFiniteLogitsError
"""What becomes of one row."""


def find_likeliest(raw: Float32Array, rows: Iterable[SamplingRow]) -> Sequence[int | None]:
    """The largest of each row of ``[S, V]`` logits, at once, if none of `rows` edits its logits.

    Otherwise `None` for each: it must be looked for row by row, after the edits.
    """
    if any(row.edits_logits for row in rows):
        return [None] * len(raw)
    largest: list[int] = raw.argmax(axis=1).tolist()
    return largest


def sample_row(raw: Float32Array, row: SamplingRow, likeliest: int | None = None) -> Sampled:
    """Choose a token by one row of ``[V]`` logits, or say why none can be.

    Args:
        raw: not changed.
        row: what the choice depends on besides.
        likeliest: the first of the largest of the edited logits, where it is known.
    """
    token_id = choose(raw, row, likeliest)
    if isinstance(token_id, NonFiniteLogitsError):
        return token_id
    return report(raw, token_id, row.params.logprobs)


def choose(
    raw: Float32Array, row: SamplingRow, likeliest: int | None = None
) -> int | NonFiniteLogitsError:
    """The token of `sample_row` without a word on its probability."""
    edited = edit_logits(raw, row) if row.edits_logits else raw
    if likeliest is None:
        # Prefers a NaN, so none is missed.
        likeliest = int(edited.argmax())
    largest = edited[likeliest]
    if largest == -np.inf:
        return NonFiniteLogitsError("no token can be sampled: every one is banned or impossible")
    if not math.isfinite(largest):
        return NonFiniteLogitsError(f"the model's logits are not finite: {largest}")
    params = row.params
    if params.is_greedy:
        return likeliest
    return draw(edited, largest, params, uniform(params.seed, row.choice, row.position))


def edit_logits(logits: Float32Array, row: SamplingRow) -> Float32Array:
    """A copy of one row's ``[V]`` logits with bias, penalties and bans applied, in this order.

    The formulas are vLLM's: repetition counts prompt and output, frequency and
    presence the output alone.
    """
    params = row.params
    logits = logits.copy()
    for token_id, bias in params.logit_bias.items():
        logits[token_id] += bias
    if params.repetition_penalty != 1:
        seen = np.unique(np.array([*row.prompt_ids, *row.output_ids], np.int64))
        values = logits[seen]
        penalty = np.float32(params.repetition_penalty)
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if params.frequency_penalty != 0 or params.presence_penalty != 0:
        seen, counts = np.unique(np.array(row.output_ids, np.int64), return_counts=True)
        logits[seen] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
        logits[seen] -= np.float32(params.presence_penalty)
    if row.banned_for > 0:
        logits[list(row.banned_ids)] = -np.inf
    return logits


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) by Philox, keyed by seed and choice, at the counter of this position."""
    key = choice << 64 | seed & (2**64 - 1)
    philox = np.random.Philox(key=key, counter=position)
    return (int(philox.random_raw()) >> 11) * 2.0**-53


def draw(logits: Float32Array, largest: np.float32, params: SamplingParams, point: float) -> int:
    """The token at `point` of the cumulative distribution, tokens in order of their ids."""
    # Below: a temperature near zero sends all but the likeliest to -inf, as it should.
    with np.errstate(over="ignore"):
        weights: Float32Array = np.exp((logits - largest) / np.float32(params.temperature))
    if params.top_k == 0 and params.top_p == 1 and params.min_p == 0:
        return _invert(weights, point)
    kept = keep(weights, params)
    return int(kept[_invert(weights[kept], point)])


def keep(weights: Float32Array, params: SamplingParams) -> IdArray:
    """Ids, ascending, that top-k, then top-p, then min-p leave of unnormalized `weights`.

    The largest weight is 1. Of equal weights the smaller id is the likelier.
    """
    ids = _largest(weights, params.top_k or len(weights))
    if params.top_p < 1:
        ids = ids[_nucleus(weights[ids], params.top_p)]
    if params.min_p > 0:
        ids = ids[weights[ids] >= params.min_p]
    return np.sort(ids)


def _largest(values: Float32Array, count: int) -> IdArray:
    """Indices, ascending, of the `count` largest values and of all that equal the last of them."""
    if count >= len(values):
        return np.arange(len(values))
    cut = len(values) - count
    return np.flatnonzero(values >= np.partition(values, cut)[cut])


def largest_first(values: Float32Array, count: int) -> IdArray:
    """Indices of at least the `count` largest values in their order, equals by index."""
    indices = _largest(values, count)
    return indices[np.argsort(-values[indices], kind="stable")]


def _nucleus(weights: Float32Array, top_p: float) -> IdArray:
    """Indices of the fewest largest weights that reach `top_p` of their sum, in any order.

    Weights are first counted by the upper half of their bits, which ascend with
    their values; only those around the cut are then sorted.
    """
    buckets = weights.view(np.uint32) >> 16
    sums = np.cumsum(np.bincount(buckets, weights)[::-1])
    target = top_p * sums[-1]
    step = int(np.searchsorted(sums, target))
    bucket = len(sums) - 1 - step
    inside, edge = np.flatnonzero(buckets > bucket), np.flatnonzero(buckets == bucket)
    edge = edge[np.argsort(-weights[edge], kind="stable")]
    before = sums[step - 1] if step else 0.0
    reached = before + np.cumsum(weights[edge], dtype=np.float64)
    return np.concatenate((inside, edge[: int(np.searchsorted(reached, target)) + 1]))


def _invert(weights: Float32Array, point: float) -> int:
    """The first index whose cumulative weight exceeds `point` times the sum, in float64."""
    whole = len(weights) // _BLOCK * _BLOCK
    block_sums = weights[:whole].reshape(-1, _BLOCK).sum(axis=1, dtype=np.float64)
    before = np.concatenate(([0.0], np.cumsum(block_sums)))
    total = before[-1] + weights[whole:].sum(dtype=np.float64)
    target = point * total
    block = int(np.searchsorted(before, target, side="right")) - 1
    start = block * _BLOCK
    sums = before[block] + np.cumsum(weights[start : start + _BLOCK], dtype=np.float64)
    index = start + int(np.searchsorted(sums, target, side="right"))
    # Rounding between the two sums can point past the end, or at a weight of zero.
    return _last_positive(weights, min(index, len(weights) - 1))


def _last_positive(weights: Float32Array, index: int) -> int:
    """`index`, or the nearest one before it that has any weight (there is one: the largest)."""
    if weights[index] > 0:
        return index
    positive = np.flatnonzero(weights)
    return int(positive[max(0, int(np.searchsorted(positive, index)) - 1)])


def report(raw: Float32Array, token_id: int, count: int | None) -> SampledToken:
    """`token_id` with `count` alternatives, of the distribution before any editing."""
    if count is None:
        return SampledToken(token_id, None, ())
    largest = raw.max()
    log_total = float(largest) + float(np.log(np.exp(raw - largest).sum(dtype=np.float64)))
    top = largest_first(raw, count)[:count] if count else ()
    return SampledToken(
        token_id,
        float(raw[token_id]) - log_total,
        tuple((int(i), float(raw[i]) - log_total) for i in top),
    )
