"""The proof, at every start, that a model computes over pages what its own forward computes.

Many models would be served wrong without an exception: positions that they count themselves, masks
that they cut, states that they keep. So nothing is taken for granted. First a small random model of
the same code runs in float32, with every length in its configuration below the proof's sequences.
Then the loaded weights are tried on a few tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from kvrelay.cpu_kernels.kernel_threads import KernelThreads
from kvrelay.mem_cache.geometry import KVGeometry
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.attention.attention_choice import AttentionChoice
from kvrelay.model_runner.batch import ForwardBatch, Int32Array, Int64Array
from kvrelay.model_runner.config.moe_backend import MoEBackend
from kvrelay.model_runner.config.pool_layers import PoolLayers
from kvrelay.model_runner.layers.elementwise import TorchElementwise
from kvrelay.model_runner.layers.experts.expert_factory import ExpertFactory
from kvrelay.model_runner.layers.linear import LinearFactory
from kvrelay.model_runner.transformers_model.attention_interface import plain_attention
from kvrelay.model_runner.transformers_model.configuration import TransformersConfig, describe
from kvrelay.model_runner.transformers_model.own_parts import (
    OwnParts,
    install_parts,
    watch_products,
)
from kvrelay.model_runner.transformers_model.paged_attention import LayoutAttention, PoolAttention
from kvrelay.model_runner.transformers_model.refusals import ModelCodeError, refusing
from kvrelay.model_runner.transformers_model.small_model import make_small_model, shrink
from kvrelay.model_runner.transformers_model.transformers_decoder import TransformersDecoder
from kvrelay.model_runner.transformers_model.weights import load_model

logger = logging.getLogger(__name__)

_SMALL_TOLERANCE: Final = 1e-4
"""The largest difference of logits of the small model, as a part of the largest logit."""
_LOADED_TOLERANCES: Final = {torch.float64: 1e-3, torch.float32: 1e-3}
_HALF_TOLERANCE: Final = 0.1
"""The largest difference of a token's logits by loaded weights, as a part of their norm."""
_LOADED_PART: Final = 0.75
"""The part of tokens that must agree so well."""
_PAGE_SIZE: Final = 4
_CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Schedule:
    """Some sequences, and the steps in which they are computed together."""

    lengths: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]
    """The tokens of each sequence in each step; afterwards one a step, to the end."""


RAGGED: Final = Schedule((34, 21, 13, 6), ((9, 0, 6, 2), (12, 15, 0, 1), (5, 2, 4, 1)))
"""Chunks beside decode: one sequence is past every length of a small model, one is not."""
WHOLE: Final = Schedule((34,), ((34,),))
CHUNKED: Final = Schedule((34,), ((20,), (13,)))
LOADED: Final = Schedule((13, 7), ((8, 5), (4, 1)))
"""Few tokens: the loaded weights are read for each step."""


def load_proven(
    config: TransformersConfig,
    dtype: torch.dtype,
    device: torch.device,
    attention: LayoutAttention,
    parts: OwnParts,
    threads: KernelThreads,
    on_read: Callable[[int], None],
) -> tuple[TransformersDecoder, str]:
    """Prove a model's code, load its weights, and prove these, too.

    Args:
        config: the model's.
        dtype: the dtype that it computes in.
        device: the device that it computes on.
        attention: over the pools of its layout.
        parts: makes what is ours in it.
        threads: the threads of our kernels.
        on_read: called with the size of each tensor that was read, in bytes.

    Returns:
        The decoder, and the hash of its weights.

    Raises:
        CheckpointError: the weights are not usable, or a proof failed: one line.
    """
    prove_code(config)
    model, digest = load_model(config, dtype, device, on_read)
    with refusing(config.path, config.architecture, "its proof"):
        texts = _make_texts(LOADED.lengths, config.vocab_size)
        watch_products(model)
        expected = [plain_logits(model, text) for text in texts]
        install_parts(model, parts)
        decoder = TransformersDecoder(model, config.layout, threads)
        paged = _PagedRun(decoder, attention, config.layout.pools, dtype, device)
        _check_loaded(paged.run(texts, LOADED), expected, dtype)
    logger.info("%s runs by transformers' code, which has proved itself", config.architecture)
    return decoder, digest


def _check_loaded(
    got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], dtype: torch.dtype
) -> None:
    """Compare the logits of loaded weights, token by token.

    Rounding may send a token to another expert, so some tokens may differ by more.
    """
    rows, wanted = torch.cat(list(got)), torch.cat(list(expected))
    errors = (rows - wanted).norm(dim=1) / wanted.norm(dim=1)
    worst = float(errors.nan_to_num(torch.inf).quantile(_LOADED_PART))
    most = _LOADED_TOLERANCES.get(dtype, _HALF_TOLERANCE)
    if not worst <= most:
        raise ModelCodeError(
            f"with the loaded weights in {dtype} its logits over pages differ from those of its "
            f"own forward by {worst:.1e} of their size, {most:.0e} at most"
        )


def prove_code(config: TransformersConfig) -> None:
    """Prove the code of a model by a small one; no weights are read.

    Raises:
        CheckpointError: it cannot be run over pages: one line.
    """
    with refusing(config.path, config.architecture, "a small model of its code"):
        prove_small(config.config, config.architecture)


def prove_small(config: Any, architecture: str) -> None:
    """Prove a small random model of the code that `config` chooses.

    Raises:
        ModelCodeError: it differs from its own forward; the line says in what.
    """
    small = shrink(config)
    described = describe(small, architecture, Path(), ())
    model = make_small_model(small, architecture)
    watch_products(model)
    longest, layout = described.max_model_len, described.layout
    texts = [text[:longest] for text in _make_texts(RAGGED.lengths, described.vocab_size)]
    expected = [plain_logits(model, text) for text in texts]
    if not all(one.isfinite().all() for one in expected):
        raise ModelCodeError("a small model of its code has logits that are not finite")
    dtype = torch.float32
    attention = LayoutAttention(
        AttentionChoice.AUTO, layout, _geometries(layout.pools, dtype), dtype, _CPU
    )
    decoder = TransformersDecoder(model, layout, KernelThreads())
    paged = _PagedRun(decoder, attention, layout.pools, dtype, _CPU)
    worst = _compare(paged, texts, expected, RAGGED)
    if worst < _SMALL_TOLERANCE:
        _prove_rows(paged, texts, expected)
        install_parts(model, _plain_parts())
        worst = _compare(paged, texts, expected, RAGGED)
        if not worst < _SMALL_TOLERANCE:
            raise ModelCodeError(f"parts of ours in it change its logits (by {worst:.1e})")
        return
    if _difference(plain_logits(model, texts[0], numbered=True), expected[0]) > _SMALL_TOLERANCE:
        what = "it numbers positions in a way of its own"
    elif not _compare(paged, texts, expected, WHOLE) < _SMALL_TOLERANCE:
        what = "its attention to one whole sequence differs from its own forward's"
    elif not _compare(paged, texts, expected, CHUNKED) < _SMALL_TOLERANCE:
        what = "a sequence in chunks differs from a whole one: it keeps a state or counts positions"
    else:
        what = "sequences that are computed together change each other"
    raise ModelCodeError(f"{what} (by {worst:.1e} of the largest logit)")


def _plain_parts() -> OwnParts:
    """The makers of our parts of a small model."""
    linears, elementwise, threads = LinearFactory(), TorchElementwise(), KernelThreads()
    dtype = torch.float32
    experts = ExpertFactory(MoEBackend.AUTO, dtype, _CPU, linears, elementwise, threads)
    return OwnParts(linears, elementwise, experts)


def _prove_rows(
    paged: _PagedRun, texts: Sequence[Sequence[int]], expected: Sequence[torch.Tensor]
) -> None:
    """Prove that logits of some rows are those of all, and that none may be asked for."""
    wanted = torch.cat(list(expected))
    some = np.arange(1, len(wanted), 3)
    got = paged.run_rows(texts, some)
    if not _difference(got, wanted[some]) < _SMALL_TOLERANCE:
        raise ModelCodeError("its logits of some rows are not those of all")
    if paged.run_rows(texts, some[:0]).shape != wanted[:0].shape:
        raise ModelCodeError("it computes logits where none are asked for")


def _compare(
    paged: _PagedRun,
    texts: Sequence[Sequence[int]],
    expected: Sequence[torch.Tensor],
    schedule: Schedule,
) -> float:
    """The largest difference of logits over pages, as a part of the largest logit."""
    got = paged.run(texts[: len(schedule.lengths)], schedule)
    return max(_difference(one, other) for one, other in zip(got, expected, strict=False))


def _difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    worst = (got - expected).abs().max() / expected.abs().max()
    return float(worst.nan_to_num(torch.inf))


def plain_logits(model: Any, text: Sequence[int], *, numbered: bool = False) -> torch.Tensor:
    """Compute logits by the model's own forward in one pass: ``[len(text), vocab]`` float32.

    Only if it is `numbered` the model is told positions.
    """
    device = next(model.parameters()).device
    tokens = torch.tensor([list(text)], device=device)
    positions = {"position_ids": torch.arange(len(text), device=device)[None]} if numbered else {}
    with plain_attention(model), torch.inference_mode():
        logits: torch.Tensor = model(tokens, use_cache=False, **positions).logits[0]
    return logits.to(torch.float32)


def _make_texts(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Random tokens, without those at the start of a vocabulary: some have a meaning."""
    random = np.random.default_rng(5)
    return [random.integers(3, vocab_size, length).tolist() for length in lengths]


def _geometries(pools: Sequence[PoolLayers], dtype: torch.dtype) -> list[KVGeometry]:
    return [
        KVGeometry(
            one.num_layers,
            one.num_kv_heads,
            one.head_dim,
            dtype,
            _PAGE_SIZE,
            latent=one.latent,
            window=one.window,
        )
        for one in pools
    ]


class _PagedRun:
    """A decoder over scratch pools, with shuffled pages that hold NaN until they are written."""

    def __init__(
        self,
        decoder: TransformersDecoder,
        attention: LayoutAttention,
        layers: Sequence[PoolLayers],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._geometries = [attention.for_pools(one) for one in _geometries(layers, dtype)]
        self._device = device

    def run(self, texts: Sequence[Sequence[int]], schedule: Schedule) -> list[torch.Tensor]:
        """Compute the logits of all tokens of each text, ``[len(text), vocab]``."""
        tables, backends = self._take_pages(texts)
        done = [0] * len(texts)
        parts: list[list[torch.Tensor]] = [[] for _ in texts]
        steps = iter(schedule.steps)
        with torch.inference_mode():
            while any(count < len(text) for count, text in zip(done, texts, strict=True)):
                wanted = next(steps, (1,) * len(texts))
                new = {
                    index: texts[index][done[index] : done[index] + count]
                    for index, count in enumerate(wanted)
                    if count and done[index] < len(texts[index])
                }
                every = np.arange(sum(map(len, new.values())))
                batch = _make_batch(new, done, tables, len(backends), every)
                logits = self._decoder.forward(batch, backends)
                split = torch.split(logits, [len(one) for one in new.values()])
                for (index, tokens), part in zip(new.items(), split, strict=True):
                    parts[index].append(part)
                    done[index] += len(tokens)
        return [torch.cat(one) for one in parts]

    def run_rows(self, texts: Sequence[Sequence[int]], rows: Int64Array) -> torch.Tensor:
        """Compute all texts in one step; return the logits of these rows of it alone."""
        tables, backends = self._take_pages(texts)
        new = dict(enumerate(texts))
        batch = _make_batch(new, [0] * len(texts), tables, len(backends), rows)
        with torch.inference_mode():
            return self._decoder.forward(batch, backends)

    def _take_pages(
        self, texts: Sequence[Sequence[int]]
    ) -> tuple[Int32Array, tuple[PoolAttention, ...]]:
        """Make pools with just the pages of these texts, and a table of them."""
        pages_each = [-(-len(text) // _PAGE_SIZE) for text in texts]
        return self._make_tables(pages_each), self._make_backends(sum(pages_each))

    def _make_tables(self, pages_each: Sequence[int]) -> Int32Array:
        shuffled = np.random.default_rng(6).permutation(sum(pages_each)).astype(np.int32)
        table = np.full((len(pages_each), max(pages_each)), -1, np.int32)
        ends = np.cumsum(pages_each)
        for row, end, count in zip(table, ends, pages_each, strict=True):
            row[:count] = shuffled[end - count : end]
        return table

    def _make_backends(self, pages: int) -> tuple[PoolAttention, ...]:
        pools = [KVPool(one, pages, self._device) for one in self._geometries]
        for pool in pools:
            pool.data.fill_(torch.nan)
        return self._attention.make_all(pools)


def _make_batch(
    new: dict[int, Sequence[int]],
    done: Sequence[int],
    table: Int32Array,
    pools: int,
    rows: Int64Array,
) -> ForwardBatch:
    starts = np.cumsum([0, *map(len, new.values())]).astype(np.int32)
    ends = {index: done[index] + len(tokens) for index, tokens in new.items()}
    return ForwardBatch(
        input_ids=np.concatenate([np.array(tokens, np.int64) for tokens in new.values()]),
        positions=np.concatenate([np.arange(done[index], end) for index, end in ends.items()]),
        query_start=starts,
        seq_lens=np.array(list(ends.values()), np.int32),
        page_tables=(table[list(new)],) * pools,
        logit_rows=rows,
    )
