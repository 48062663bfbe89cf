"""The sampling of tokens from logits, each a pure function of its row, seed, choice and position.

A row's result depends neither on the rows beside it nor on any state. So a stream that is resumed
elsewhere goes on with the same tokens. The order of steps: bias, penalties, bans, grammar,
temperature, top-k, top-p, min-p, noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvrelay.cpu_kernels.gumbel import WORDS_MULTIPLE, add_noise, random_words
from kvrelay.cpu_kernels.nucleus import find_nucleus
from kvrelay.model_runner.errors import NonFiniteLogitsError, NothingAllowedError
from kvrelay.wire.output import SampledToken, TokenLogprob
from kvrelay.wire.submit import SamplingParams

Float32Array = npt.NDArray[np.float32]
IdArray = npt.NDArray[np.int64]
TokenMasks = npt.NDArray[np.int32]
"""``[masks, words]``: each mask has a bit for each token, from the lowest of the first word on."""


@dataclass(slots=True)  # not frozen: that would cost a microsecond more, for each token
class SamplingRow:
    """All inputs of one token's choice beside its logits."""

    params: SamplingParams
    position: int
    """The absolute position of the token that is sampled."""
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    """The output so far; it may be empty without `params.edits_logits`, or with a `counted_row`."""
    banned_ids: Sequence[int] = ()
    """Tokens that must not be sampled, such as ends of sequence before `min_tokens`."""
    banned_for: int = 1
    """The number of tokens from this one on that `banned_ids` holds for; 0: it does not hold."""
    choice: int = 0
    """The number of the request's completion, at least 0: each has its own draws."""
    allowed: TokenMasks | None = None
    """The tokens that a grammar allows next, and after each draft; None: there is no grammar."""
    counted_row: int | None = None
    """The row where a device has counted prompt and output, for penalties; None: they are above."""

    @property
    def edits_logits(self) -> bool:
        """Whether logits are changed before the temperature."""
        has_bans = bool(self.banned_ids) and self.banned_for > 0
        return has_bans or self.allowed is not None or self.params.edits_logits

    @property
    def is_argmax(self) -> bool:
        """Whether the largest logit is chosen, independent of position and earlier tokens."""
        return self.params.is_greedy and not self.edits_logits

    def after(self, token_ids: Sequence[int]) -> SamplingRow:
        """The row of the token after `token_ids`, if these are sampled from this row on."""
        count = len(token_ids)
        outputs = (*self.output_ids, *token_ids) if self.params.edits_logits else self.output_ids
        return replace(
            self,
            position=self.position + count,
            output_ids=outputs,
            banned_for=max(0, self.banned_for - count),
            allowed=None if self.allowed is None else self.allowed[count:],
        )


Sampled: TypeAlias = SampledToken | NonFiniteLogitsError
"""The outcome of one row."""


def argmax_rows(raw: Float32Array, rows: Iterable[SamplingRow]) -> Sequence[int | None]:
    """The index of the largest of each row of ``[S, V]`` logits, if no row edits its logits.

    Otherwise `None` for each row: it must be found row by row, after the edits.
    """
    if any(row.edits_logits for row in rows):
        return [None] * len(raw)
    largest: list[int] = raw.argmax(axis=1).tolist()
    return largest


def sample_row(raw: Float32Array, row: SamplingRow, likeliest: int | None = None) -> Sampled:
    """Choose a token by one row of ``[V]`` logits, or return the error that says why none can be.

    Args:
        raw: the logits, which are not changed.
        row: the other inputs of the choice.
        likeliest: the index of the largest edited logit (the first of equal ones), if it is known.
    """
    token_id = sample_token_id(raw, row, likeliest)
    if isinstance(token_id, NonFiniteLogitsError):
        return token_id
    return gather_logprobs(raw, token_id, row.params.logprobs)


def sample_token_id(
    raw: Float32Array, row: SamplingRow, likeliest: int | None = None
) -> int | NonFiniteLogitsError:
    """The token of `sample_row` without its log-probability; the arguments are the same."""
    edited = edit_logits(raw, row) if row.edits_logits else raw
    if likeliest is None:
        # argmax prefers a NaN, so none is missed.
        likeliest = int(edited.argmax())
    largest = edited[likeliest]
    if not math.isfinite(largest):
        return refusal(largest)
    params = row.params
    if params.is_greedy:
        return likeliest
    return sample_gumbel(edited, largest, row)


def refusal(largest: float) -> NonFiniteLogitsError:
    """The error for edited logits whose largest is not finite."""
    if largest == -np.inf:
        return NothingAllowedError("no token can be sampled: every one is banned or impossible")
    return NonFiniteLogitsError(f"the model's logits are not finite: {largest}")


def edit_logits(logits: Float32Array, row: SamplingRow) -> Float32Array:
    """A copy of one row's ``[V]`` logits with bias, penalties, bans and grammar applied, in order.

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
    if row.allowed is not None:
        bits = row.allowed[0].view(np.uint8)
        logits[np.unpackbits(bits, count=len(logits), bitorder="little") == 0] = -np.inf
    return logits


def sample_gumbel(logits: Float32Array, largest: np.float32, row: SamplingRow) -> int:
    """The token with the largest sum of ``logit / temperature`` and its noise (`gumbel`).

    A token's noise depends on seed, choice, position and its id alone. So a rounding error of the
    logits, as from another batch, matters only where two tokens nearly tie. It also matters at the
    edge of top-k, top-p or min-p, which are applied before.

    Args:
        logits: ``[V]``, already edited.
        largest: the largest of `logits`.
        row: the other inputs of the choice.
    """
    params = row.params
    words = np.empty(-(-len(logits) // WORDS_MULTIPLE) * WORDS_MULTIPLE, np.uint32)
    random_words(np.uint64(params.seed & (2**64 - 1)), row.choice, row.position, words)
    if params.top_k == 0 and params.top_p == 1 and params.min_p == 0:
        return int(_add_noise(logits, largest, params.temperature, words).argmax())
    # Below: a temperature near zero sends all but the likeliest to -inf, as it should.
    with np.errstate(over="ignore"):
        weights: Float32Array = np.exp((logits - largest) / np.float32(params.temperature))
    kept = filter_top_k_top_p_min_p(weights, params)
    return int(kept[_add_noise(logits[kept], largest, params.temperature, words[kept]).argmax()])


def warm_up() -> None:
    """Compile what a first draw needs, or load it from disk. May take seconds."""
    row = SamplingRow(SamplingParams(top_p=0.5), 0, (), ())
    sample_token_id(np.zeros(WORDS_MULTIPLE, np.float32), row)


def _add_noise(
    logits: Float32Array, largest: np.float32, temperature: float, words: npt.NDArray[np.uint32]
) -> Float32Array:
    scores = np.empty(len(logits), np.float32)
    add_noise(logits, largest, np.float32(temperature), words, scores)
    return scores


def filter_top_k_top_p_min_p(weights: Float32Array, params: SamplingParams) -> IdArray:
    """The ids, ascending, that are left of unnormalized `weights` after top-k, top-p and min-p.

    The largest weight is 1. Of equal weights the smaller id is the likelier.
    """
    steps: list[Callable[[Float32Array], IdArray]] = []
    if params.top_k:
        steps.append(partial(_top_k_set, count=params.top_k))
    if params.top_p < 1:
        steps.append(partial(_top_p_set, top_p=params.top_p))
    if params.min_p > 0:
        steps.append(lambda kept: np.flatnonzero(kept >= params.min_p))
    ids: IdArray | None = None
    for step in steps:
        ids = step(weights) if ids is None else ids[step(weights[ids])]
    return np.arange(len(weights)) if ids is None else ids


def _top_k_set(values: Float32Array, count: int) -> IdArray:
    """The indices, ascending, of the `count` largest values, and of all equal to the last."""
    if count >= len(values):
        return np.arange(len(values))
    cut = len(values) - count
    return np.flatnonzero(values >= np.partition(values, cut)[cut])


def topk_indices(values: Float32Array, count: int) -> IdArray:
    """The indices of at least the `count` largest values in descending order, equals by index."""
    indices = _top_k_set(values, count)
    return indices[np.argsort(-values[indices], kind="stable")]


def _top_p_set(weights: Float32Array, top_p: float) -> IdArray:
    """The indices, ascending, of the fewest largest weights that reach `top_p` of their sum.

    Of equal weights the earlier ones count as larger.
    """
    least, equals = find_nucleus(weights, top_p)
    ids = np.flatnonzero(weights >= least)
    edge = np.flatnonzero(weights[ids] == least)
    return np.delete(ids, edge[equals:])


def gather_logprobs(raw: Float32Array, token_id: int, count: int | None) -> SampledToken:
    """The log-probabilities of `token_id` and of the `count` likeliest tokens.

    They are in the distribution before any editing; there are none if `count` is None.
    """
    if count is None:
        return SampledToken(token_id, None, ())
    largest = raw.max()
    log_total = float(largest) + float(np.log(np.exp(raw - largest).sum(dtype=np.float64)))
    top = topk_indices(raw, count)[:count] if count else ()
    return SampledToken(
        token_id,
        float(raw[token_id]) - log_total,
        tuple(TokenLogprob(int(i), float(raw[i]) - log_total) for i in top),
    )
