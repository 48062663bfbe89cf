"""A model of transformers as a decoder: one forward of ragged tokens over pages."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from kvrelay.cpu_kernels.kernel_threads import KernelThreads
from kvrelay.model_runner.batch import ForwardBatch, Int64Array, input_ids_on
from kvrelay.model_runner.torch_options import to_device
from kvrelay.model_runner.transformers_model.attention_interface import (
    NAME,
    CacheOfForward,
    Scoring,
    running,
    use_attention,
)
from kvrelay.model_runner.transformers_model.described_mask import DescribedMask
from kvrelay.model_runner.transformers_model.layout import AttentionCall, Layout
from kvrelay.model_runner.transformers_model.paged_attention import PoolAttention, PoolStep
from kvrelay.model_runner.transformers_model.refusals import ModelCodeError

_MOST_LATENTS: Final = 8192
"""Tokens whose latents become keys and values at once, where nobody has measured what they take."""


class TransformersDecoder:
    """A model of transformers, ready to run over pages.

    Args:
        model: with its weights, and with attention of ours (`use_attention`).
        layout: the model's.
        threads: the threads of our kernels.
    """

    def __init__(self, model: Any, layout: Layout, threads: KernelThreads) -> None:
        use_attention(model, NAME)
        self._model = model
        self._layout = layout
        self._threads = threads
        self._most_latents = _MOST_LATENTS
        self._picks_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(self, batch: ForwardBatch, backends: Sequence[PoolAttention]) -> torch.Tensor:
        """Run `batch`, writing its keys and values into the pages of the backends' pools.

        Args:
            batch: the input, with a page table for each pool.
            backends: one for each pool of the layout.

        Returns:
            ``[S, vocab_size]`` float32 logits of ``batch.logit_rows``.
        """
        if not self._layout.latents:
            return self._forward(batch, backends)
        ends = group_sequences(batch.seq_lens.tolist(), self._most_latents)
        if len(ends) == 1:
            return self._forward(batch, backends)
        groups = [_part(batch, first, end) for first, end in zip([0, *ends], ends, strict=False)]
        logits = torch.cat([self._forward(one, backends) for one, _ in groups])
        order = np.argsort(np.concatenate([places for _, places in groups]))
        return logits[to_device(order, logits.device)]

    def hold_latents(self, tokens: int) -> None:
        """Make keys and values of no more latents at once, but for one sequence that has more."""
        self._most_latents = tokens

    def _forward(self, batch: ForwardBatch, backends: Sequence[PoolAttention]) -> torch.Tensor:
        steps = [
            backend.plan(batch, table)
            for backend, table in zip(backends, batch.page_tables, strict=True)
        ]
        device = backends[0].pool.data.device
        rows = to_device(batch.logit_rows, device)
        # Rows by index: a number of rows lets some models drop others before their last layers.
        options = {"logits_to_keep": rows} if self._picks_rows else {}
        forward = _PagedForward(self._layout, steps, self._threads)
        with running(forward):
            logits: torch.Tensor = self._model(
                input_ids=input_ids_on(batch, device)[None],
                position_ids=to_device(batch.positions, device)[None],
                past_key_values=CacheOfForward(),
                use_cache=False,
                **options,
            ).logits[0]
        forward.finish()
        return (logits if self._picks_rows else logits[rows]).to(torch.float32)


def group_sequences(lengths: Sequence[int], most: int) -> list[int]:
    """Group neighbours that have up to `most` tokens together; return where each group ends."""
    ends, total = [], 0
    for index, length in enumerate(lengths):
        if total and total + length > most:
            ends.append(index)
            total = 0
        total += length
    return [*ends, len(lengths)]


def _part(batch: ForwardBatch, first: int, end: int) -> tuple[ForwardBatch, Int64Array]:
    """The sequences from `first` to before `end`, and the places of their rows of logits."""
    start, stop = batch.query_start[first], batch.query_start[end]
    tokens, sequences = slice(start, stop), slice(first, end)
    places = np.flatnonzero((start <= batch.logit_rows) & (batch.logit_rows < stop))
    pending = batch.pending
    if pending is not None:
        own = (start <= pending.places) & (pending.places < stop)
        pending = replace(pending, places=pending.places[own] - start, sources=pending.sources[own])
    part = ForwardBatch(
        input_ids=batch.input_ids[tokens],
        positions=batch.positions[tokens],
        query_start=batch.query_start[first : end + 1] - start,
        seq_lens=batch.seq_lens[sequences],
        page_tables=tuple(table[sequences] for table in batch.page_tables),
        logit_rows=batch.logit_rows[places] - start,
        pending=pending,
    )
    return part, places


class _PagedForward:
    """The `Forward` over pages: calls come in the layout's order."""

    def __init__(self, layout: Layout, steps: Sequence[PoolStep], threads: KernelThreads) -> None:
        self._calls = iter(layout.calls)
        self._latents = enumerate(layout.latents)
        self._has_latents = bool(layout.latents)
        self._steps = steps
        self._threads = threads

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: DescribedMask | None,
        scoring: Scoring,
    ) -> torch.Tensor:
        self._threads.renew()
        call = next(self._calls, None)
        if call is None:
            raise ModelCodeError("it attends more often than at first")
        if not _fits(call, query, key, scoring):
            raise ModelCodeError("a call of its attention is not as at first")
        step = self._steps[call.pool]
        attend = step.attend_expanded if self._has_latents else step.attend
        return attend(call, query, key, value, mask, scoring)

    def update(
        self, first: torch.Tensor, second: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._has_latents:
            return first, second
        place, width = next(self._latents, (None, 0))
        if place is None:
            raise ModelCodeError("it stores latents more often than at first")
        new = torch.cat((first, second), dim=-1)[0, 0]
        contexts = self._steps[0].store_latents(place, new)
        return contexts[None, None, :, :width], contexts[None, None, :, width:]

    def finish(self) -> None:
        """Refuse a model that has not made all calls of its layout."""
        if next(self._calls, None) is not None or next(self._latents, None) is not None:
            raise ModelCodeError("it attends less often than at first")


def _fits(call: AttentionCall, query: torch.Tensor, key: torch.Tensor, scoring: Scoring) -> bool:
    """Whether a call of attention is the one that the layout has."""
    heads, own = (query.shape[1], key.shape[1]), (call.heads.num_heads, call.num_kv_heads)
    scores, own_scores = (scoring.scale, scoring.softcap), (call.heads.scale, call.heads.softcap)
    return heads == own and scores == own_scores
