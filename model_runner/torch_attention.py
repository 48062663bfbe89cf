"""Attention in plain torch: any device, any dtype. Also the reference for faster backends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """One sequence of a batch: its new tokens are the rows ``[start, end)``."""

    start: int
    end: int
    seq_len: int
    page_ids: torch.Tensor
    """``[ceil(seq_len / page_size)]`` int64, on the pool's device."""
    mask: torch.Tensor | None
    """``[end - start, seq_len]``: what each new token sees; None if plain causal or everything."""

    @classmethod
    def of(cls, batch: ForwardBatch, index: int, pool: KVPool) -> SequenceSpan:
        """Sequence `index` of `batch`."""
        start, end = int(batch.query_start[index]), int(batch.query_start[index + 1])
        seq_len = int(batch.seq_lens[index])
        device = pool.data.device
        page_ids = batch.page_tables[index, : pool.geometry.pages_for(seq_len)]
        new = end - start
        mask = None
        if 1 < new < seq_len:
            earlier = seq_len - new
            mask = torch.ones(new, seq_len, dtype=torch.bool, device=device).tril_(earlier)
        return cls(start, end, seq_len, torch.from_numpy(page_ids).to(device, torch.int64), mask)

    def attend(self, layer: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """Gather the sequence's pages and attend.

        Args:
            layer: ``[pages, 2, kv_heads, page_size, head_dim]``, the new keys
                and values already in it.
            queries: ``[T, num_heads, head_dim]`` of the whole batch.

        Returns:
            ``[end - start, num_heads, head_dim]``
        """
        _, _, kv_heads, page_size, head_dim = layer.shape
        gathered = layer[self.page_ids].permute(1, 2, 0, 3, 4)
        tokens = len(self.page_ids) * page_size
        keys, values = gathered.reshape(2, kv_heads, tokens, head_dim)[:, :, : self.seq_len]
        attended = functional.scaled_dot_product_attention(
            queries[self.start : self.end].transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=self.mask,
            is_causal=self.mask is None and self.end - self.start > 1,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)


class TorchAttention:
    """See `AttentionBackend`."""

    def __init__(self, pool: KVPool, num_heads: int) -> None:
        self._pool = pool
        self._num_heads = num_heads

    def plan(self, batch: ForwardBatch) -> TorchStepAttention:
        """See `AttentionBackend`."""
        return TorchStepAttention(self._pool, self._num_heads, batch)


class TorchStepAttention:
    """See `StepAttention`."""

    def __init__(self, pool: KVPool, num_heads: int, batch: ForwardBatch) -> None:
        self._pool = pool
        self._num_heads = num_heads
        self._spans = [SequenceSpan.of(batch, i, pool) for i in range(len(batch.seq_lens))]
        positions = torch.from_numpy(batch.positions).to(pool.data.device)
        page_size = pool.geometry.page_size
        self._slots = positions % page_size
        self._page_ids = torch.cat(
            [span.page_ids[positions[span.start : span.end] // page_size] for span in self._spans]
        )

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """See `StepAttention`."""
        pages = self._pool.layer(layer)
        kv_heads = self._pool.geometry.num_kv_heads
        queries, keys, values = torch.split(qkv, [self._num_heads, kv_heads, kv_heads], dim=1)
        pages[self._page_ids, 0, :, self._slots] = keys
        pages[self._page_ids, 1, :, self._slots] = values
        attended = torch.cat([span.attend(pages, queries) for span in self._spans])
        return attended.flatten(1)
