"""FlashInfer's kernels that write a forward's keys and values into a pool's pages.

The kernels append to sequences with given pages, as in `paged_plan`. Here the place of each token
is known. So each token is passed as a sequence of one full page that holds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from kvrelay.mem_cache.geometry import KVGeometry
from kvrelay.model_runner.attention.new_tokens import StaticNewTokens
from kvrelay.model_runner.batch import ForwardBatch, Int32Array, new_token_slots
from kvrelay.model_runner.torch_options import pin_to_device

APPENDED_DIMS = (64, 128, 256, 512)
"""The dimensions of heads of keys and values that the kernels write."""
APPENDED_LATENTS = ((512, 64),)
"""The dimensions of a latent and of its rotary key that the kernels write."""
_MOST_THREADS: Final = 1024
"""The most threads of a block, which has one token's heads."""
_VECTOR_BYTES: Final = 16
"""The fewest bytes that a thread copies."""
_HEAD_THREADS: Final = 32
"""The most threads that copy one head."""


def appends(geometry: KVGeometry, value_dim: int) -> bool:
    """Whether there is a kernel for such a pool; `value_dim` is a latent's."""
    if geometry.latent:
        return (value_dim, geometry.head_dim - value_dim) in APPENDED_LATENTS
    if geometry.head_dim not in APPENDED_DIMS:
        return False
    copied = max(_VECTOR_BYTES // geometry.dtype.itemsize, geometry.head_dim // _HEAD_THREADS)
    return geometry.num_kv_heads * (geometry.head_dim // copied) <= _MOST_THREADS


class AppendKernel:
    """FlashInfer's kernel for one pool.

    Args:
        package: the flashinfer package.
        geometry: the pool's geometry.
        value_dim: the dimensions of a latent, if the pool has latents.
    """

    def __init__(self, package: Any, geometry: KVGeometry, value_dim: int) -> None:
        assert appends(geometry, value_dim)
        self._package = package
        self._geometry = geometry
        self._value_dim = value_dim

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self._geometry.page_size

    def locate(
        self, batch: ForwardBatch, page_table: Int32Array, device: torch.device
    ) -> AppendedTokens:
        """The new tokens of `batch`."""
        places = np.stack(new_token_slots(batch, page_table, self.page_size)).astype(np.int32)
        page_ids, slots = pin_to_device(places, device)
        return AppendedTokens(page_ids, slots, self)

    def write(
        self, pages: torch.Tensor, new: torch.Tensor, sequences: Mapping[str, torch.Tensor]
    ) -> None:
        """Write the new tokens, shaped as in `NewTokens.write`; `sequences` has kernels' names."""
        if self._geometry.latent:
            self._write_latents(pages[:, 0, 0], new[:, 0], sequences)
            return
        heads = self._geometry.num_kv_heads
        self._package.append_paged_kv_cache(
            new[:, :heads],
            new[:, heads:],
            paged_kv_cache=(pages[:, 0], pages[:, 1]),
            kv_layout="HND",
            **sequences,
        )

    def _write_latents(
        self, pages: torch.Tensor, new: torch.Tensor, sequences: Mapping[str, torch.Tensor]
    ) -> None:
        """Write ``new [T, head_dim]`` into ``pages [pages, page_size, head_dim]``."""
        dim = self._value_dim
        self._package.append_paged_mla_kv_cache(
            new[:, :dim],
            new[:, dim:],
            ckv_cache=pages[..., :dim],
            kpe_cache=pages[..., dim:],
            **sequences,
        )


class AppendedTokens(StaticNewTokens):
    """New tokens that a kernel writes: ``page_ids, slots [T]`` int32, at fixed addresses."""

    def __init__(self, page_ids: torch.Tensor, slots: torch.Tensor, kernel: AppendKernel) -> None:
        super().__init__(page_ids, slots)
        self._kernel = kernel
        # Made once: a graph goes on reading them.
        indptr = torch.arange(len(page_ids) + 1, dtype=torch.int32, device=page_ids.device)
        self._sequences = {
            "batch_indices": indptr[:-1],
            "positions": slots,
            "kv_indices": page_ids,
            "kv_indptr": indptr,
            "kv_last_page_len": torch.full_like(page_ids, kernel.page_size),
        }

    def write(self, pages: torch.Tensor, new: torch.Tensor) -> None:
        """Store the new tokens; shapes as in `NewTokens.write`."""
        self._kernel.write(pages, new, self._sequences)
