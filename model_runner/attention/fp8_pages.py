"""Keys and values in FP8: how they are written to pages, and how they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from kvrelay.cpu_kernels.arrays import as_array
from kvrelay.cpu_kernels.dequantize_kv import dequantize_pages
from kvrelay.cpu_kernels.kernel_threads import KernelThreads
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.batch import Int64Array
from kvrelay.model_runner.config.kv_scale import KVScale
from kvrelay.model_runner.torch_options import pin_to_device

FP8: Final = torch.float8_e4m3fn
LARGEST: Final = torch.finfo(FP8).max
_SHARED_NUMBERS: Final = 1 << 18
"""The fewest numbers for which a second thread saves more than its start costs."""
_PIECE_NUMBERS: Final = 1 << 22
"""The numbers that a device widens at a time: for a moment each takes 9 bytes more."""


class Fp8Pages:
    """The pages of a pool in FP8, one scale a layer and part.

    A number that is too large for its scale becomes FP8's largest; infinity becomes NaN.

    Args:
        pool: the pool, in FP8.
        scales: the scales of each of the pool's layers.
        dtype: the dtype that the model computes in.
        threads: the threads that read pages on a CPU; None: as many as torch has now.
    """

    def __init__(
        self,
        pool: KVPool,
        scales: Sequence[KVScale],
        dtype: torch.dtype,
        threads: KernelThreads | None = None,
    ) -> None:
        geometry = pool.geometry
        assert geometry.dtype is FP8
        assert len(scales) == geometry.num_layers
        self.pool = pool
        self.scales = tuple(scales)
        self.dtype = dtype
        parts = [(one.key, one.value)[: geometry.parts] for one in scales]
        self._scales = torch.tensor(parts, dtype=torch.float32).to(pool.data.device)
        """``[layers, parts]``"""
        self._threads = threads or KernelThreads()
        self._tables = self._make_tables() if pool.data.device.type == "cpu" else None

    def quantize(self, layer: int, new: torch.Tensor) -> torch.Tensor:
        """``[T, parts * kv_heads, head_dim]`` in FP8."""
        scaled = self._by_part(new).to(torch.float32) / self._scales[layer][:, None, None]
        # Infinity must become NaN, not a number: the sampler refuses logits that are not finite.
        stored = scaled.clamp(-LARGEST, LARGEST) + (scaled - scaled)
        return stored.to(FP8).view(new.shape)

    def dequantize(self, layer: int, stored: torch.Tensor) -> torch.Tensor:
        """The numbers that `quantize` has stored, as they are read, in the model's dtype."""
        wide = self._by_part(stored).to(torch.float32) * self._scales[layer][:, None, None]
        return wide.to(self.dtype).view(stored.shape)

    def read_pages(self, layer: int, page_ids: Int64Array, out: torch.Tensor) -> None:
        """Write pages of `layer` to ``out [n, parts, kv_heads, page_size, head_dim]``."""
        pages = self.pool.layer(layer)
        if self._tables is None:
            rows = pin_to_device(page_ids, pages.device)
            count = max(1, _PIECE_NUMBERS // max(1, out[:1].numel()))
            for first in range(0, len(rows), count):
                some = slice(first, first + count)
                stored = pages.view(torch.uint8)[rows[some]].view(FP8).to(torch.float32)
                out[some] = stored * self._scales[layer][:, None, None, None]
            return
        dequantize_pages(
            self._threads.count if out.numel() >= _SHARED_NUMBERS else 1,
            as_array(self.pool.data.view(torch.uint8).view(-1)),
            int(pages.storage_offset()),
            pages.stride(0),
            page_ids,
            as_array(self._tables[layer]),
            as_array(out.view(len(page_ids), self.pool.geometry.parts, -1)),
        )

    def _by_part(self, rows: torch.Tensor) -> torch.Tensor:
        """``[T, parts, kv_heads, head_dim]``"""
        geometry = self.pool.geometry
        return rows.reshape(len(rows), geometry.parts, geometry.num_kv_heads, -1)

    def _make_tables(self) -> torch.Tensor:
        """``[layers, parts, 256]``: the value of each byte, in the model's dtype."""
        numbers = torch.from_numpy(np.arange(256, dtype=np.uint8)).view(FP8).to(torch.float32)
        return (self._scales[:, :, None] * numbers).to(self.dtype)
