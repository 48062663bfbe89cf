"""The sampler as Triton kernels, a program for each row of logits: only ids leave the device.

This is the only file of its room that imports triton, which CUDA builds of torch bring along. Its
counter bits are those of `cpu_kernels.gumbel`. The noise is computed by the same operations in the
same order, none of them fused. It differs by 2 units in the last place at most, since a CPU's
products and sums are fused. Weights of top-p are summed in another order than there, and their
exponentials differ in the last bits. Both matter only between two tokens that nearly tie, and for
a token at the very edge of top-k, top-p or min-p.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

BLOCK: Final = 2048
"""The tokens that a program looks at together; a multiple of `gumbel.WORDS_MULTIPLE`."""
ROW_BLOCK: Final = 8192
"""The same of a program that has a whole row, and goes over it many times: few programs run."""
ROW_WARPS: Final = 16
"""The warps of such a program: as many as have registers for all that it keeps, 128 a thread."""
ENTRIES: Final = 256
"""The edits of a program."""

# Columns of the numbers of a row; the kernels have them as literals.
SEED, CHOICE, POSITION, TOP_K, MASK, INTS = range(6)
"""`MASK` is -1 for a row without one; a temperature of 0 takes the likeliest."""
TEMPERATURE, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE, FLOATS = range(7)
# Columns of the numbers of an edit.
ROW, TOKEN, REPEATED, COUNT, BANNED, EDIT_INTS = range(6)


def edit_rows(
    logits: torch.Tensor, edits: torch.Tensor, biases: torch.Tensor, floats: torch.Tensor
) -> None:
    """Apply bias, penalties and bans in place, in that order.

    Args:
        logits: ``[S, V]`` float32.
        edits: ``[N, EDIT_INTS]`` int64; no row has a token twice.
        biases: ``[N]`` float32.
        floats: ``[S, FLOATS]`` float64.
    """
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        _edit_rows[(triton.cdiv(len(edits), ENTRIES),)](
            logits,
            logits.stride(0),
            edits,
            biases,
            floats,
            len(edits),
            block=ENTRIES,
            enable_fp_fusion=False,
        )


def penalize_rows(
    logits: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor, floats: torch.Tensor
) -> None:
    """Apply penalties for tokens that were counted on the device, in place.

    Args:
        logits: ``[S, V]`` float32, with bias and bans.
        rows: ``[N, 2]`` int64: a row, and its row of `counts`.
        counts: ``[R, V]`` int32 as `TokenCounts.entries`.
        floats: ``[S, FLOATS]`` float64.
    """
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        _penalize_rows[(len(rows), triton.cdiv(logits.shape[1], BLOCK))](
            logits,
            logits.stride(0),
            logits.shape[1],
            rows,
            counts,
            floats,
            block=BLOCK,
            enable_fp_fusion=False,
        )


def sample_rows(
    logits: torch.Tensor,
    masks: torch.Tensor,
    ints: torch.Tensor,
    floats: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    largest: torch.Tensor,
) -> None:
    """Choose a token by each row: top-k, top-p, min-p, then the largest with noise.

    Args:
        logits: ``[S, V]`` float32, edited, but for masks.
        masks: ``[M, words]`` int32 as `TokenMasks`.
        ints: ``[S, INTS]`` int64.
        floats: ``[S, FLOATS]`` float64.
        weights: ``[S, V]`` float32, for the kernel's own use; only of rows with a filter.
        ids: ``[S]`` int64, written.
        largest: ``[S]`` float32, written: the largest logit; NaN if any is NaN.
    """
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        _sample_rows[(len(logits),)](
            logits,
            logits.stride(0),
            logits.shape[1],
            masks,
            masks.stride(0),
            ints,
            floats,
            weights,
            ids,
            largest,
            block=ROW_BLOCK,
            num_warps=ROW_WARPS,
            enable_fp_fusion=False,
        )


def score_rows(
    logits: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    totals: torch.Tensor,
    tops: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Compute the parts of log-probabilities for some rows.

    Args:
        logits: ``[S, V]`` float32, not edited.
        rows: ``[N, 2]`` int64: a row, and the number of its likeliest tokens that are wanted.
        ids: ``[S]`` int64, the chosen tokens.
        totals: ``[N]`` float64, written: the sum of ``exp(logit - largest)``.
        tops: ``[N, 2 + most]`` int64, written: the likeliest token of all, the chosen
            one, and the wanted ones, the likeliest first, equals by id. Where a row has too many
            NaNs the last token of the vocabulary takes their places.
        values: the same of their logits, float32.
    """
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        _score_rows[(len(rows),)](
            logits,
            logits.stride(0),
            logits.shape[1],
            rows,
            ids,
            totals,
            tops,
            values,
            tops.stride(0),
            block=ROW_BLOCK,
            num_warps=ROW_WARPS,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _penalized(
    x: tl.tensor,
    is_repeated: tl.tensor,
    count: tl.tensor,
    repetition: tl.tensor,
    frequency: tl.tensor,
    presence: tl.tensor,
) -> Any:
    """A logit after the penalties, as in `sampler.edit_logits`."""
    penalized = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    x = tl.where(is_repeated, penalized, x)
    return tl.where(count > 0, x - frequency * count.to(tl.float32) - presence, x)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _edit_rows(
    logits: tl.tensor,
    row_stride: tl.tensor,
    edits: tl.tensor,
    biases: tl.tensor,
    floats: tl.tensor,
    count: tl.tensor,
    block: tl.constexpr,
) -> None:
    entry = tl.program_id(0) * block + tl.arange(0, block)
    inside = entry < count
    edit = edits + entry * 5
    row = tl.load(edit, mask=inside, other=0)
    place = logits + row * row_stride + tl.load(edit + 1, mask=inside, other=0)
    repeated = tl.load(edit + 2, mask=inside, other=0)
    seen = tl.load(edit + 3, mask=inside, other=0)
    banned = tl.load(edit + 4, mask=inside, other=0)
    numbers = floats + row * 6
    repetition = tl.load(numbers + 3, mask=inside, other=1.0).to(tl.float32)
    frequency = tl.load(numbers + 4, mask=inside, other=0.0).to(tl.float32)
    presence = tl.load(numbers + 5, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(place, mask=inside, other=0.0) + tl.load(biases + entry, mask=inside, other=0.0)
    x = _penalized(x, repeated != 0, seen, repetition, frequency, presence)
    tl.store(place, tl.where(banned != 0, -float("inf"), x), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _penalize_rows(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.tensor,
    rows: tl.tensor,
    counts: tl.tensor,
    floats: tl.tensor,
    block: tl.constexpr,
) -> None:
    pair = rows + tl.program_id(0) * 2
    row, counted = tl.load(pair), tl.load(pair + 1)
    ids = tl.program_id(1) * block + tl.arange(0, block)
    entry = tl.load(counts + counted * vocab + ids, mask=ids < vocab, other=0)
    numbers = floats + row * 6
    place = logits + row * row_stride + ids
    x = _penalized(
        tl.load(place, mask=entry != 0, other=0.0),
        entry != 0,
        entry >> 1,
        tl.load(numbers + 3).to(tl.float32),
        tl.load(numbers + 4).to(tl.float32),
        tl.load(numbers + 5).to(tl.float32),
    )
    tl.store(place, x, mask=entry != 0)


@triton.jit  # type: ignore[untyped-decorator]
def _load(
    row: tl.tensor, mask: tl.tensor, mask_index: tl.tensor, ids: tl.tensor, vocab: tl.tensor
) -> Any:
    """Load logits, with -inf for tokens that are masked or beyond the vocabulary."""
    inside = ids < vocab
    x = tl.load(row + ids, mask=inside, other=-float("inf"))
    masked = ids < tl.where(mask_index >= 0, vocab, 0)
    bits = tl.load(mask + ids // 32, mask=masked, other=-1)
    return tl.where(((bits >> (ids % 32)) & 1) != 0, x, -float("inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _as_float(bits: tl.tensor) -> Any:
    return bits.to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _count_from(weights: tl.tensor, vocab: tl.tensor, least: tl.tensor, block: tl.constexpr) -> Any:
    """The number of a row's weights that are at least `least`."""
    total = tl.zeros((), tl.int32)
    for start in range(0, vocab, block):
        ids = start + tl.arange(0, block)
        kept = tl.load(weights + ids, mask=ids < vocab, other=-1.0) >= least
        total += tl.sum(kept.to(tl.int32), 0)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _sum_from(weights: tl.tensor, vocab: tl.tensor, least: tl.tensor, block: tl.constexpr) -> Any:
    """The float64 sum of a row's weights that are at least `least`."""
    total = tl.zeros((), tl.float64)
    for start in range(0, vocab, block):
        ids = start + tl.arange(0, block)
        weight = tl.load(weights + ids, mask=ids < vocab, other=-1.0)
        total += tl.sum(tl.where(weight >= least, weight, 0.0).to(tl.float64), 0)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _find_kth(weights: tl.tensor, vocab: tl.tensor, count: tl.tensor, block: tl.constexpr) -> Any:
    """The `count`-th largest weight, by bisecting the bits of floats."""
    low = tl.zeros((), tl.int32)
    high = low + 0x3F800001
    wanted = tl.minimum(count, vocab)
    for _ in range(30):
        middle = (low + high) >> 1
        enough = _count_from(weights, vocab, _as_float(middle), block) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return _as_float(low)


@triton.jit  # type: ignore[untyped-decorator]
def _find_nucleus(
    weights: tl.tensor, vocab: tl.tensor, top_p: tl.tensor, floor: tl.tensor, block: tl.constexpr
) -> Any:
    """The least weight of the nucleus among weights from `floor` on, and its last token.

    Of tokens with that weight, smaller ids are in it first.
    """
    target = top_p * _sum_from(weights, vocab, floor, block)
    low = tl.zeros((), tl.int32)
    high = low + 0x3F800001
    for _ in range(30):
        middle = (low + high) >> 1
        least = tl.maximum(_as_float(middle), floor)
        enough = _sum_from(weights, vocab, least, block) >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    least = tl.maximum(_as_float(low), floor)
    missing = target - _sum_from(weights, vocab, tl.maximum(_as_float(high), floor), block)
    equals = tl.where(least > 0, tl.ceil(missing / least.to(tl.float64)), 1.0).to(tl.int32)
    equals = tl.maximum(equals, 1)
    before, last = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    for start in range(0, vocab, block):
        ids = start + tl.arange(0, block)
        at_edge = (tl.load(weights + ids, mask=ids < vocab, other=-1.0) == least).to(tl.int32)
        rank = before + tl.cumsum(at_edge, 0)
        last = tl.maximum(last, tl.max(tl.where((at_edge != 0) & (rank <= equals), ids, 0), 0))
        before += tl.sum(at_edge, 0)
    return least, last


@triton.jit  # type: ignore[untyped-decorator]
def _log(x: tl.tensor) -> Any:
    """`gumbel._log`."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    p = f * 7.0376836292e-2 - 1.1514610310e-1
    p = p * f + 1.1676998740e-1
    p = p * f - 1.2420140846e-1
    p = p * f + 1.4249322787e-1
    p = p * f - 1.6668057665e-1
    p = p * f + 2.0000714765e-1
    p = p * f - 2.4999993993e-1
    p = p * f + 3.3333331174e-1
    square = f * f
    return f + (f * square * p - 0.5 * square) + exponent.to(tl.float32) * 0.693147181


@triton.jit  # type: ignore[untyped-decorator]
def _gumbel(word: tl.tensor) -> Any:
    """`gumbel._gumbel`."""
    v = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    small = v * (1.0 + v * (0.5 + v * 0.33333334))
    large = -_log(tl.maximum(1.0 - v, 2.9802322387695312e-08))
    return -_log(tl.where(v >= 0.01, large, small))


@triton.jit  # type: ignore[untyped-decorator]
def _better(best: tl.tensor, best_id: tl.tensor, scores: tl.tensor, ids: tl.tensor) -> Any:
    """The larger of the best so far and the largest of `scores`; of equals the smaller id."""
    largest = tl.max(scores, 0)
    first = tl.min(tl.where(scores == largest, ids, 0x7FFFFFFF), 0)
    better = (largest > best) | ((largest == best) & (first < best_id))
    return tl.where(better, largest, best), tl.where(better, first, best_id)


@triton.jit  # type: ignore[untyped-decorator]
def _store_weights(
    row: tl.tensor,
    mask: tl.tensor,
    mask_index: tl.tensor,
    vocab: tl.tensor,
    most: tl.tensor,
    heat: tl.tensor,
    out: tl.tensor,
    block: tl.constexpr,
) -> None:
    for start in range(0, vocab, block):
        ids = start + tl.arange(0, block)
        x = _load(row, mask, mask_index, ids, vocab)
        tl.store(out + ids, tl.exp(tl.div_rn(x - most, heat)), mask=ids < vocab)
    tl.debug_barrier()  # other threads read them


@triton.jit  # type: ignore[untyped-decorator]
def _draw(
    row: tl.tensor,
    mask: tl.tensor,
    mask_index: tl.tensor,
    vocab: tl.tensor,
    most: tl.tensor,
    heat: tl.tensor,
    seed: tl.tensor,
    choice: tl.tensor,
    position: tl.tensor,
    weights: tl.tensor,
    weighed: tl.tensor,
    floor: tl.tensor,
    least: tl.tensor,
    last: tl.tensor,
    block: tl.constexpr,
) -> Any:
    """The token with the largest score among those that the filters leave.

    Tokens from `weighed` on have no weight; `weighed` is 0 in a row without filters.
    """
    best, best_id = tl.full((), -float("inf"), tl.float32), tl.full((), 0x7FFFFFFF, tl.int32)
    for start in range(0, vocab, block):
        counter = tl.arange(0, block // 4)
        words = tl.philox(seed, (start // 4 + counter).to(tl.uint32), position, choice, 0)
        for word in tl.static_range(4):
            ids = start + counter // 16 * 64 + word * 16 + counter % 16
            x = _load(row, mask, mask_index, ids, vocab)
            weight = tl.load(weights + ids, mask=ids < weighed, other=0.0)
            kept = (weight > least) | ((weight == least) & (ids <= last))
            scores = tl.div_rn(x - most, heat) + _gumbel(words[word])
            scores = tl.where(kept & (weight >= floor), scores, -float("inf"))
            best, best_id = _better(best, best_id, scores, ids)
    return best_id


@triton.jit  # type: ignore[untyped-decorator]
def _sample_rows(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.tensor,
    masks: tl.tensor,
    mask_stride: tl.tensor,
    ints: tl.tensor,
    floats: tl.tensor,
    weights: tl.tensor,
    ids_out: tl.tensor,
    largest_out: tl.tensor,
    block: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    row, own, numbers = logits + index * row_stride, ints + index * 5, floats + index * 6
    weights += index * vocab
    mask_index = tl.load(own + 4)
    mask = masks + tl.maximum(mask_index, 0) * mask_stride
    most, most_id = tl.full((), -float("inf"), tl.float32), tl.full((), 0x7FFFFFFF, tl.int32)
    broken = tl.zeros((), tl.int32)
    for start in range(0, vocab, block):
        ids = start + tl.arange(0, block)
        x = _load(row, mask, mask_index, ids, vocab)
        most, most_id = _better(most, most_id, x, ids)
        broken = tl.maximum(broken, tl.max((x != x).to(tl.int32), 0))
    heat = tl.load(numbers).to(tl.float32)
    finite = (broken == 0) & (most > -float("inf")) & (most < float("inf"))
    token = tl.where(finite, most_id, 0)
    if finite & (heat > 0):
        top_k, top_p = tl.load(own + 3).to(tl.int32), tl.load(numbers + 1)
        floor = tl.load(numbers + 2).to(tl.float32)
        filtered = ((top_k > 0) | (top_p < 1.0) | (floor > 0)).to(tl.int32)
        least, last = tl.zeros((), tl.float32), tl.full((), 0x7FFFFFFF, tl.int32)
        if filtered != 0:
            _store_weights(row, mask, mask_index, vocab, most, heat, weights, block)
            if top_k > 0:
                least = _find_kth(weights, vocab, top_k, block)
            if top_p < 1.0:
                least, last = _find_nucleus(weights, vocab, top_p, least, block)
        token = _draw(
            row,
            mask,
            mask_index,
            vocab,
            most,
            heat,
            tl.load(own),
            tl.load(own + 1).to(tl.uint32),
            tl.load(own + 2).to(tl.uint32),
            weights,
            tl.where(filtered != 0, vocab, 0),
            floor,
            least,
            last,
            block,
        )
    tl.store(ids_out + index, token.to(tl.int64))
    tl.store(largest_out + index, tl.where(broken != 0, float("nan"), most))


@triton.jit(do_not_specialize=["top_stride"])  # type: ignore[untyped-decorator]
def _score_rows(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.tensor,
    rows: tl.tensor,
    ids_in: tl.tensor,
    totals: tl.tensor,
    tops: tl.tensor,
    values: tl.tensor,
    top_stride: tl.tensor,
    block: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    which, wanted = tl.load(rows + index * 2), tl.load(rows + index * 2 + 1).to(tl.int32)
    row, chosen = logits + which * row_stride, tl.load(ids_in + which)
    tops, values = tops + index * top_stride, values + index * top_stride
    tl.store(tops + 1, chosen)
    tl.store(values + 1, tl.load(row + chosen))
    value, token = tl.full((), float("inf"), tl.float32), tl.full((), -1, tl.int32)
    most = value
    for place in range(tl.maximum(wanted, 1)):
        best, best_id = tl.full((), -float("inf"), tl.float32), tl.full((), 0x7FFFFFFF, tl.int32)
        for start in range(0, vocab, block):
            ids = start + tl.arange(0, block)
            x = tl.load(row + ids, mask=ids < vocab, other=-float("inf"))
            after = (x < value) | ((x == value) & (ids > token))
            ids = tl.where(after & (ids < vocab), ids, 0x7FFFFFFF)
            best, best_id = _better(best, best_id, tl.where(after, x, -float("inf")), ids)
        value, token = best, tl.minimum(best_id, vocab - 1)
        if place == 0:
            most = best
            tl.store(tops, token.to(tl.int64))
            tl.store(values, value)
        if place < wanted:
            tl.store(tops + 2 + place, token.to(tl.int64))
            tl.store(values + 2 + place, value)
    total = tl.zeros((), tl.float64)
    for start in range(0, vocab, block):
        ids = start + tl.arange(0, block)
        x = tl.load(row + ids, mask=ids < vocab, other=-float("inf"))
        total += tl.sum(tl.exp(x - most).to(tl.float64), 0)
    tl.store(totals + index, total)
