"""The arrays of a step of decode at fixed addresses, as CUDA graphs read them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvrelay.mem_cache.geometry import KVGeometry


class GraphBuffers:
    """The arrays of one pool, on its device; graphs of all sizes share them, each the first part.

    Args:
        geometry: the pool's geometry.
        largest: the most sequences of a step.
        max_pages: the most pages of a sequence.
        device: the pool's device.
    """

    def __init__(
        self, geometry: KVGeometry, largest: int, max_pages: int, device: torch.device
    ) -> None:

        def zeros(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self.new_pages = zeros(largest)
        """The pages that new tokens are written to."""
        self.new_slots = zeros(largest)
        self._query_indptr = zeros(largest + 1)
        self._indptr = zeros(largest + 1)
        self._page_ids = zeros(largest * max_pages)
        self._lengths = zeros(largest)
        self._latent = geometry.latent

    @property
    def nbytes(self) -> int:
        """The device memory that is taken, in bytes."""
        return sum(one.nbytes for one in vars(self).values() if isinstance(one, torch.Tensor))

    def of_wrapper(self, size: int) -> Mapping[str, torch.Tensor]:
        """The buffers that the wrapper of `size` sequences plans into, by FlashInfer's names."""
        indptr, lengths = self._indptr[: size + 1], self._lengths[:size]
        if not self._latent:
            return {
                "paged_kv_indptr_buffer": indptr,
                "paged_kv_indices_buffer": self._page_ids,
                "paged_kv_last_page_len_buffer": lengths,
            }
        return {
            "qo_indptr": self._query_indptr[: size + 1],
            "kv_indptr": indptr,
            "kv_indices": self._page_ids,
            "kv_len_arr": lengths,
        }
