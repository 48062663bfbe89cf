"""The bytes themselves: one tensor that holds every page of a worker."""

from __future__ import annotations

import torch

from kvrelay.mem_cache.geometry import KVGeometry, PageOrder


class KVPool:
    """A device's paged KV memory, allocated once and never freed while the process lives.

    (A peer may still read it: memory that is registered for transfers and then
    freed can kill the process that owned it.)
    """

    def __init__(self, geometry: KVGeometry, total_pages: int, device: torch.device) -> None:
        if total_pages < 1:
            raise ValueError("the pool must hold at least one page")
        self.geometry = geometry
        self.total_pages = total_pages
        g = geometry
        if g.order is PageOrder.PAGE_FIRST:
            shape = (total_pages, g.num_layers, *g.piece_shape)
        else:
            shape = (g.num_layers, total_pages, *g.piece_shape)
        # Zeroed, so that every page is backed by memory before the first request.
        self.data = torch.zeros(shape, dtype=g.dtype, device=device)

    def layer(self, index: int) -> torch.Tensor:
        """One layer's pages, ``[pages, parts, kv_heads, page_size, head_dim]``, a view.

        The strides depend on the page order; the shape does not.
        """
        if self.geometry.order is PageOrder.PAGE_FIRST:
            return self.data[:, index]
        return self.data[index]

    @property
    def address(self) -> int:
        """Where the pool starts in its device's memory."""
        return self.data.data_ptr()

    @property
    def nbytes(self) -> int:
        """Size of the whole pool in bytes."""
        return self.data.numel() * self.data.element_size()
