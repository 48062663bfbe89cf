"""Writes a forward's keys and values into a pool's pages with plain torch, on any device."""

from __future__ import annotations

import torch

from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.batch import ForwardBatch, Int32Array, new_token_slots


class NewTokens:
    """Where the new tokens of one batch lie in a pool, on the pool's device."""

    def __init__(self, batch: ForwardBatch, page_table: Int32Array, pool: KVPool) -> None:
        self._page_ids, self._slots = (
            torch.from_numpy(array).to(pool.data.device)
            for array in new_token_slots(batch, page_table, pool.geometry.page_size)
        )

    def write(self, pages: torch.Tensor, new: torch.Tensor) -> None:
        """Store the new tokens.

        Args:
            pages: a layer of the pool, ``[pages, parts, kv_heads, page_size, head_dim]``.
            new: ``[T, parts * kv_heads, head_dim]``: keys, then values, or latents.
        """
        pages[self._page_ids, :, :, self._slots] = new.view(len(new), *pages.shape[1:3], -1)
