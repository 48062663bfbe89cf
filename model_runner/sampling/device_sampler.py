"""The sampler on a CUDA device: only chosen tokens, and log-probabilities asked for, leave it.

The tokens are the same as in `sampler`: the order of steps and the noise are the same. Rounding may
differ at the edge of top-p or min-p, see `kernels.sampling_triton`.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.model_runner.sampling.sampler import Sampled, SamplingRow, refusal
from kvrelay.model_runner.sampling.token_counts import TokenCounts
from kvrelay.model_runner.torch_options import pin_to_device
from kvrelay.wire.output import SampledToken, TokenLogprob
from kvrelay.wire.submit import SamplingParams

_RANKED_AT_ONCE = 32
"""The rows whose logits are compared at once, which takes five bytes for each of them."""


def samples_on(device: torch.device) -> bool:
    """Whether rows of logits on `device` are sampled there."""
    return device.type == "cuda" and _has_triton()


@dataclass(frozen=True)
class Scores:
    """The parts of some rows' log-probabilities on the device; `read` waits for them."""

    totals: torch.Tensor
    """``[N]`` float64: the sum of ``exp(logit - largest)``."""
    ids: torch.Tensor
    """``[N, 2 + most]`` int64: the likeliest token, the chosen one, and the reported likeliest."""
    logits: torch.Tensor
    """The same of their logits, float32."""
    counts: Sequence[int]
    """The number of likeliest tokens that each row reports."""
    ranks: torch.Tensor | None = None
    """``[N]`` int64: how many logits are at least as large as the chosen one's; None: unknown."""

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Scores:
        """A copy elsewhere, as in `Draws.moved`."""
        totals, ids, logits = map(move, (self.totals, self.ids, self.logits))
        ranks = None if self.ranks is None else move(self.ranks)
        return replace(self, totals=totals, ids=ids, logits=logits, ranks=ranks)

    def read(self) -> list[SampledToken]:
        """Return each row's chosen token; where a row is not finite its numbers are NaN."""
        totals, tops, values = (one.cpu().numpy() for one in (self.totals, self.ids, self.logits))
        log_totals = values[:, 0].astype(np.float64) + np.log(totals)
        logprobs = (values.astype(np.float64) - log_totals[:, None]).tolist()
        ranks = [0] * len(tops) if self.ranks is None else self.ranks.cpu().tolist()
        return [
            SampledToken(
                ids[1],
                own[1],
                tuple(map(TokenLogprob, ids[2 : 2 + count], own[2 : 2 + count])),
                rank or None,
            )
            for ids, own, count, rank in zip(
                tops.tolist(), logprobs, self.counts, ranks, strict=True
            )
        ]


@dataclass(frozen=True)
class Draws:
    """Sampled tokens on the device; `read` waits for them."""

    ids: torch.Tensor
    """``[S]`` int64."""
    largest: torch.Tensor
    """``[S]`` float32: the largest of each row's edited logits."""
    counts: Sequence[int | None]
    """The number of likeliest tokens that each row asks for; None: no log-probabilities."""
    scores: Scores | None
    """The scores of the rows whose count is not None; None: there are no such rows."""

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Draws:
        """A copy elsewhere: `move` copies each tensor there, or begins to."""
        scores = None if self.scores is None else self.scores.moved(move)
        return replace(self, ids=move(self.ids), largest=move(self.largest), scores=scores)

    def read(self) -> list[Sampled]:
        """Return each row's token, or the error that says why it has none."""
        ids, largest = self.ids.cpu().tolist(), self.largest.cpu().tolist()
        scored = iter(() if self.scores is None else self.scores.read())
        outcomes: list[Sampled] = []
        for token_id, most, count in zip(ids, largest, self.counts, strict=True):
            token = SampledToken(token_id, None, ()) if count is None else next(scored)
            outcomes.append(token if math.isfinite(most) else refusal(most))
        return outcomes


def launch(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    *,
    logprobs: bool = True,
    counts: torch.Tensor | None = None,
) -> Draws:
    """Sample each row of ``logits [S, V]`` float32 on its device, without changing them.

    Args:
        logits: the logits, at least one row.
        rows: the other inputs of each row's choice.
        logprobs: report log-probabilities of the rows that ask for them.
        counts: `TokenCounts.entries`, for the rows that have a `counted_row`.
    """
    assert len(rows) == len(logits) > 0
    kernels, device = _kernels(), logits.device
    masks, mask_of = _stack_masks(rows, logits)
    floats, ints = _to_device(_floats(rows), _ints(rows, mask_of), device)
    edited = _edit(logits, rows, floats, counts)
    count = len(rows)
    has_filters = any(_is_filtered(row) for row in rows)
    weights = logits.new_empty(logits.shape if has_filters else (0, logits.shape[1]))
    ids = torch.empty(count, dtype=torch.int64, device=device)
    largest = torch.empty(count, dtype=torch.float32, device=device)
    kernels.sample_rows(edited, masks, ints, floats, weights, ids, largest)
    asked = [row.params.logprobs if logprobs else None for row in rows]
    return Draws(ids, largest, asked, _score(logits, ids, asked))


def launch_scores(
    logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], counts: Sequence[int]
) -> Scores:
    """Score one token by each of some rows of ``logits [S, V]`` float32, on their device.

    Args:
        logits: the logits, which are not changed.
        rows: the rows, at least one.
        token_ids: the token that each row scores.
        counts: the number of likeliest tokens that each row reports beside it.
    """
    chosen = np.zeros(len(logits), np.int64)
    chosen[list(rows)] = token_ids
    pairs = _within(list(zip(rows, counts, strict=True)), logits)
    numbers = pin_to_device(np.concatenate((pairs.ravel(), chosen)), logits.device)
    places, ids = numbers[: pairs.size].view(pairs.shape), numbers[pairs.size :]
    scores = _launch_scores(logits, places, ids, counts)
    return replace(scores, ranks=_ranks(logits, places[:, 0], scores.logits[:, 1]))


def join_draws(draws: Sequence[Draws]) -> Draws:
    """Several draws without log-probabilities as one, which is read at once."""
    return Draws(
        torch.cat([one.ids for one in draws]),
        torch.cat([one.largest for one in draws]),
        [None for one in draws for _ in one.counts],
        None,
    )


def sample_on_device(
    logits: torch.Tensor, rows: Sequence[SamplingRow], logprobs: bool = True
) -> list[Sampled]:
    """Launch the sampling and return its outcome; empty for no rows."""
    return launch(logits, rows, logprobs=logprobs).read() if rows else []


def warm_up(device: torch.device, vocab: int) -> None:
    """Compile what a first draw on `device` needs. May take many seconds."""
    if samples_on(device):
        run_largest(torch.zeros(1, vocab, device=device))


def run_largest(logits: torch.Tensor) -> None:
    """Draw from each row in the way that takes the most memory, and wait."""
    params = SamplingParams(
        top_k=2, top_p=0.5, presence_penalty=1.0, logprobs=1, logit_bias={0: 1.0}
    )
    counts = TokenCounts(1, logits.shape[1], logits.device).entries
    launch(
        logits, [SamplingRow(params, 1, (), (), counted_row=0)] * len(logits), counts=counts
    ).read()


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _kernels() -> ModuleType:
    """The module of kernels. A CUDA device comes with triton; elsewhere it is not imported."""
    from kvrelay.model_runner.sampling import sampling_triton

    return sampling_triton


def _is_filtered(row: SamplingRow) -> bool:
    params = row.params
    return not params.is_greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


def _to_device(
    floats: npt.NDArray[np.float64], ints: npt.NDArray[np.int64], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both on the device, by one copy."""
    bits = np.concatenate((floats.reshape(-1).view(np.int64), ints.reshape(-1)))
    both = pin_to_device(bits, device)
    return (
        both[: floats.size].view(torch.float64).view(floats.shape),
        both[floats.size :].view(ints.shape),
    )


def _floats(rows: Sequence[SamplingRow]) -> npt.NDArray[np.float64]:
    """``[S, FLOATS]`` in the order of `sampling_triton`'s columns."""
    return np.array(
        [
            (
                0.0 if row.params.is_greedy else row.params.temperature,
                row.params.top_p,
                row.params.min_p,
                row.params.repetition_penalty,
                row.params.frequency_penalty,
                row.params.presence_penalty,
            )
            for row in rows
        ],
        np.float64,
    )


def _ints(rows: Sequence[SamplingRow], mask_of: Sequence[int]) -> npt.NDArray[np.int64]:
    """``[S, INTS]`` in the order of `sampling_triton`'s columns; a seed's 64 bits as they are."""
    numbers = np.empty((len(rows), 5), np.int64)
    seeds = np.array([row.params.seed & (2**64 - 1) for row in rows], np.uint64)
    numbers[:, 0] = seeds.view(np.int64)
    others = zip(rows, mask_of, strict=True)
    numbers[:, 1:] = [(row.choice, row.position, row.params.top_k, mask) for row, mask in others]
    return numbers


def _stack_masks(
    rows: Sequence[SamplingRow], logits: torch.Tensor
) -> tuple[torch.Tensor, list[int]]:
    """The masks ``[M, words]`` of the rows with a grammar, and each row's index there or -1.

    Without any there is one that nobody reads, as kernels are compiled for its stride.
    """
    masks: list[npt.NDArray[np.int32]] = []
    places: list[int] = []
    for row in rows:
        places.append(-1 if row.allowed is None else len(masks))
        if row.allowed is not None:
            masks.append(row.allowed[0])
    if not masks:
        return logits.new_empty((1, -(-logits.shape[1] // 32)), dtype=torch.int32), places
    stacked = np.ascontiguousarray(np.stack(masks), np.int32)
    return pin_to_device(stacked, logits.device), places


def _edit(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    floats: torch.Tensor,
    counts: torch.Tensor | None,
) -> torch.Tensor:
    """A copy with bias, penalties and bans applied; `logits` themselves if there are none.

    Penalties of counted tokens come after the bans: a banned logit stays -inf.
    """
    found = [(index, *edit) for index, row in enumerate(rows) for edit in _edits_of(row)]
    counted = [
        (index, row.counted_row) for index, row in enumerate(rows) if row.counted_row is not None
    ]
    if not found and not counted:
        return logits
    edited, device = logits.clone(), logits.device
    if found:
        numbers = np.array([(row, token, *rest) for row, token, _, *rest in found], np.int64)
        biases = np.array([bias for _, _, bias, *_ in found], np.float32)
        edits = pin_to_device(numbers, device), pin_to_device(biases, device)
        _kernels().edit_rows(edited, *edits, floats)
    if counted:
        assert counts is not None
        pairs = pin_to_device(np.array(counted, np.int64), device)
        _kernels().penalize_rows(edited, pairs, counts, floats)
    return edited


def _edits_of(row: SamplingRow) -> list[tuple[int, float, int, int, int]]:
    """The edits of `row`: token, bias, is repeated or not, times in the output, is banned or not.

    Penalties of tokens that the device has counted are not among them.
    """
    params = row.params
    repeated: set[int] = set()
    counts: Counter[int] = Counter()
    is_counted = row.counted_row is not None
    if params.repetition_penalty != 1 and not is_counted:
        repeated = {*row.prompt_ids, *row.output_ids}
    if (params.frequency_penalty != 0 or params.presence_penalty != 0) and not is_counted:
        counts = Counter(row.output_ids)
    banned = set(row.banned_ids) if row.banned_for > 0 else set()
    tokens = {*params.logit_bias, *repeated, *counts, *banned}
    return [
        (
            token,
            params.logit_bias.get(token, 0.0),
            token in repeated,
            counts[token],
            token in banned,
        )
        for token in tokens
    ]


def _score(logits: torch.Tensor, ids: torch.Tensor, counts: Sequence[int | None]) -> Scores | None:
    """The scores of the drawn tokens for the rows that ask for them."""
    wanted = [(row, count) for row, count in enumerate(counts) if count is not None]
    if not wanted:
        return None
    rows = pin_to_device(_within(wanted, logits), logits.device)
    return _launch_scores(logits, rows, ids, [count for _, count in wanted])


def _within(wanted: Sequence[tuple[int, int]], logits: torch.Tensor) -> npt.NDArray[np.int64]:
    """``[N, 2]``: rows, and how many likeliest tokens each reports of those that there are."""
    return np.minimum(np.array(wanted, np.int64), (len(logits), logits.shape[1]))


def _ranks(logits: torch.Tensor, rows: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """How many logits of some rows are at least as large as one of each."""
    blocks = [slice(at, at + _RANKED_AT_ONCE) for at in range(0, len(rows), _RANKED_AT_ONCE)]
    return torch.cat([(logits[rows[one]] >= own[one, None]).sum(1) for one in blocks])


def _launch_scores(
    logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, counts: Sequence[int]
) -> Scores:
    device, width = logits.device, 2 + min(max(counts), logits.shape[1])
    totals = torch.empty(len(rows), dtype=torch.float64, device=device)
    tops = torch.zeros(len(rows), width, dtype=torch.int64, device=device)
    values = torch.zeros(len(rows), width, dtype=torch.float32, device=device)
    _kernels().score_rows(logits, rows, ids, totals, tops, values)
    return Scores(totals, tops, values, counts)
