"""The bytes of the KV cache: one tensor that holds every page of a pool."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from kvrelay.mem_cache.geometry import KVGeometry, PageOrder

HUGE_PAGE = 2 << 20
"""Of the host's memory; not a page of the pool."""


class KVPool:
    """A device's paged KV memory, allocated once and never freed while the process lives.

    (A peer may still read it: memory that is registered for transfers and then
    freed can kill the process that owned it.)

    Args:
        geometry: of its pages.
        total_pages: of the pool.
        device: where its memory is.
        reserved_pages: the last ones of these, which never belong to a request.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        total_pages: int,
        device: torch.device,
        reserved_pages: int = 0,
    ) -> None:
        if total_pages <= reserved_pages:
            raise ValueError("the pool must hold at least one page of requests")
        self.geometry = geometry
        self.total_pages = total_pages
        self.reserved_pages = reserved_pages
        g = geometry
        if g.order is PageOrder.PAGE_FIRST:
            shape = (total_pages, g.num_layers, *g.piece_shape)
        else:
            shape = (g.num_layers, total_pages, *g.piece_shape)
        # Zeroed, so that every page is backed by memory before the first request.
        self.data = _allocate(shape, g.dtype, device).zero_()

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


def _allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialized; a host's memory is in huge pages.

    Pages lie scattered: with small ones most of the copies and reads of 16 KiB begin with a
    miss in the TLB.
    """
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return allocate_huge_pages(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def allocate_huge_pages(nbytes: int) -> torch.Tensor:
    """``[nbytes]`` uint8 of the host, uninitialized, from the start of a huge page on.

    In huge pages where the system has them on request: numpy asks for them and torch does not.
    """
    memory = np.empty(nbytes + HUGE_PAGE, np.uint8)
    start = -memory.ctypes.data % HUGE_PAGE
    # Cut before torch sees it: kernels reckon from where the tensor's storage begins.
    return torch.from_numpy(memory[start : start + nbytes])
