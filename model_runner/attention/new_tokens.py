"""The writing of a forward's keys and values into a pool's pages, in plain torch on any device."""

from __future__ import annotations

import numpy as np
import torch

from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.batch import ForwardBatch, Int32Array, new_token_slots
from kvrelay.model_runner.torch_options import pin_to_device


class NewTokens:
    """The places of one batch's new tokens in a pool, on the pool's device."""

    def __init__(self, batch: ForwardBatch, page_table: Int32Array, pool: KVPool) -> None:
        places = np.stack(new_token_slots(batch, page_table, pool.geometry.page_size))
        self._page_ids, self._slots = pin_to_device(places, pool.data.device)

    def write(self, pages: torch.Tensor, new: torch.Tensor) -> None:
        """Store the new tokens.

        Args:
            pages: a layer of the pool, ``[pages, parts, kv_heads, page_size, head_dim]``.
            new: ``[T, parts * kv_heads, head_dim]``: keys, then values, or latents.
        """
        if pages.dtype.itemsize == 1:  # not every device can index float8
            pages, new = pages.view(torch.uint8), new.view(torch.uint8)
        pages[self._page_ids, :, :, self._slots] = new.view(len(new), *pages.shape[1:3], -1)


class StaticNewTokens(NewTokens):
    """New tokens whose places others write to the device: ``page_ids, slots [T]`` int32."""

    def __init__(self, page_ids: torch.Tensor, slots: torch.Tensor) -> None:
        self._page_ids, self._slots = page_ids, slots
