"""Attention in plain torch: any device, any dtype. Also the reference for faster backends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.attention.new_tokens import NewTokens
from kvrelay.model_runner.attention.sinks import tokens_share
from kvrelay.model_runner.batch import ForwardBatch, Int32Array
from kvrelay.model_runner.config.query_heads import QueryHeads
from kvrelay.model_runner.torch_options import pin_to_device

MIN_BLOCK_TOKENS = 128
"""The fewest new tokens of a sequence that are computed together, however short the window is."""


@dataclass(frozen=True, slots=True)
class AttendedTokens:
    """New tokens of one sequence that are computed together, and the tokens that they see.

    ::

        positions   [page page page)[page page page page)
                             ^oldest visible   [new tokens)
                    never read      [gathered           )
                                  [visible              )
    """

    start: int
    """The first of the rows ``[start, end)`` of the batch."""
    end: int
    page_ids: torch.Tensor
    """``[pages]`` int64 on the pool's device: from the oldest visible token to the last new one."""
    visible: slice
    """The `V` tokens of the gathered pages from the oldest visible to the last new one."""
    mask: torch.Tensor | None
    """``[end - start, V]``: what each new token sees; None if plain causal, or if all is seen."""

    @classmethod
    def of(
        cls, start: int, end: int, position: int, page_table: Int32Array, pool: KVPool
    ) -> AttendedTokens:
        """Make the span of the rows ``[start, end)``, whose first is at `position` of its sequence.

        ``page_table [max_pages]`` is the sequence's.
        """
        geometry, device = pool.geometry, pool.data.device
        new, stop = end - start, position + end - start
        oldest = max(0, position + 1 - geometry.window) if geometry.window else 0
        first_page = oldest // geometry.page_size
        page_ids = page_table[first_page : geometry.pages_for(stop)].astype(np.int64)
        below = first_page * geometry.page_size
        return cls(
            start,
            end,
            pin_to_device(page_ids, device),
            slice(oldest - below, stop - below),
            _mask(new, stop - oldest, geometry.window, device),
        )

    def attend(
        self,
        layer: torch.Tensor,
        queries: torch.Tensor,
        heads: QueryHeads,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Gather the pages and attend.

        Args:
            layer: ``[pages, parts, kv_heads, page_size, head_dim]``, the new
                tokens already in it.
            queries: ``[T, num_heads, head_dim]`` of the whole batch.
            heads: the query heads, with scale and softcap.
            sinks: as in `StepAttention.attend`.

        Returns:
            ``[end - start, num_heads, value_dim]``
        """
        gathered = layer[self.page_ids].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, self.visible]
        # A latent is its own value.
        keys, values = gathered[0], gathered[-1, ..., : heads.value_dim]
        queries = queries[self.start : self.end].transpose(0, 1)
        if heads.softcap is None and sinks is None and keys.shape == values.shape:
            attended = self._attend_fused(queries, keys, values, heads.scale)
        else:
            attended = self._attend_plainly(queries, keys, values, heads, sinks)
        return attended.transpose(0, 1)

    def _attend_fused(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            queries[None],
            keys[None],
            values[None],
            attn_mask=self.mask,
            is_causal=self.mask is None and self.end - self.start > 1,
            scale=scale,
            enable_gqa=True,
        )[0]

    def _attend_plainly(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        heads: QueryHeads,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention with softcaps, sinks or latents: torch has no kernel for them.

        Heads that share keys are rows of one product, so that keys need not be repeated.
        """
        kv_heads, seen, _ = keys.shape
        new = queries.shape[1]
        grouped = queries.reshape(kv_heads, -1, queries.shape[2])
        scores = grouped @ keys.transpose(1, 2) * heads.scale
        if heads.softcap is not None:
            scores = torch.tanh(scores / heads.softcap) * heads.softcap
        mask = self.mask
        if mask is None:
            mask = torch.ones(new, seen, dtype=torch.bool, device=keys.device).tril_(seen - new)
        scores = scores.view(kv_heads, -1, new, seen).masked_fill_(~mask, -torch.inf)
        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = torch.softmax(scores, -1, dtype=wide).to(values.dtype)
        attended = (weights.flatten(1, 2) @ values).view(heads.num_heads, new, -1)
        if sinks is None:
            return attended
        sums = torch.logsumexp(scores.to(wide), -1).view(heads.num_heads, new)
        return attended * tokens_share(sums.T, sinks).transpose(0, 1).to(attended.dtype)


def cut_spans(
    batch: ForwardBatch, index: int, page_table: Int32Array, pool: KVPool
) -> Iterator[AttendedTokens]:
    """Yield the spans of sequence `index`, cut so that little is computed outside of a window."""
    start, end = int(batch.query_start[index]), int(batch.query_start[index + 1])
    offset = int(batch.seq_lens[index]) - end
    window = pool.geometry.window
    block = max(window, MIN_BLOCK_TOKENS) if window else end - start
    for first in range(start, end, block):
        last = min(first + block, end)
        yield AttendedTokens.of(first, last, first + offset, page_table[index], pool)


def _mask(new: int, seen: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """The mask ``[new, seen]`` for the last `new` of `seen` tokens; None if none is needed."""
    earlier = seen - new
    felt = window is not None and new > window
    if new == 1 or (earlier == 0 and not felt):
        return None
    mask = torch.ones(new, seen, dtype=torch.bool, device=device).tril_(earlier)
    return mask if window is None else mask.triu_(earlier - window + 1)


class TorchAttention:
    """The `AttentionBackend` of devices and dtypes without compiled kernels."""

    def __init__(self, pool: KVPool, heads: QueryHeads) -> None:
        self.pool = pool
        self.heads = heads

    def plan(self, batch: ForwardBatch, page_table: Int32Array) -> TorchStepAttention:
        """Cut `batch` into spans, and copy the places of its new tokens to the device."""
        return TorchStepAttention(self, batch, page_table)


class TorchStepAttention:
    """The `StepAttention` of `TorchAttention`: gathers the pages of one span after the other."""

    def __init__(
        self, backend: TorchAttention, batch: ForwardBatch, page_table: Int32Array
    ) -> None:
        pool = backend.pool
        self._pool = pool
        self._heads = backend.heads
        self._spans = [
            span
            for index in range(len(batch.seq_lens))
            for span in cut_spans(batch, index, page_table, pool)
        ]
        self._new_tokens = NewTokens(batch, page_table, pool)

    def attend(
        self, layer: int, rows: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Write and attend; shapes as in `StepAttention.attend`."""
        pages = self._pool.layer(layer)
        queries, new = rows[:, : self._heads.num_heads], rows[:, self._heads.num_heads :]
        self._new_tokens.write(pages, new)
        attended = torch.cat(
            [span.attend(pages, queries, self._heads, sinks) for span in self._spans]
        )
        return attended.flatten(1)
