"""The bytes of the KV cache: one tensor that holds every page of a pool."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from kvrelay.mem_cache.geometry import KVGeometry, PageOrder

HUGE_PAGE = 2 << 20
"""The size of a huge page of the host's memory; not of a page of the pool."""


class KVPool:
    """A device's paged KV memory, allocated once and never freed while the process lives.

    (A peer may still read it: memory that is registered for transfers and then freed can kill the
    process that owned it.)

    Args:
        geometry: of its pages.
        total_pages: of the pool.
        device: the device that has its memory.
        reserved_pages: the number of last pages that never belong to a request.
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
        """View one layer's pages, ``[pages, parts, kv_heads, page_size, head_dim]``.

        The strides depend on the page order; the shape does not.
        """
        if self.geometry.order is PageOrder.PAGE_FIRST:
            return self.data[:, index]
        return self.data[index]

    @property
    def address(self) -> int:
        """The address of the pool in its device's memory."""
        return self.data.data_ptr()

    @property
    def nbytes(self) -> int:
        """The size of the whole pool in bytes."""
        return self.data.numel() * self.data.element_size()


def _allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate uninitialized memory; a host's memory is in huge pages.

    Pages are used in no order. With small ones most copies and reads of 16 KiB would begin with a
    TLB miss.
    """
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return allocate_huge_pages(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def allocate_huge_pages(nbytes: int) -> torch.Tensor:
    """Allocate ``[nbytes]`` uint8 of the host, uninitialized, from the start of a huge page.

    It is in huge pages if the system gives them on request: numpy requests them, torch does not.
    """
    memory = np.empty(nbytes + HUGE_PAGE, np.uint8)
    start = -memory.ctypes.data % HUGE_PAGE
    # Cut before torch sees it: kernels reckon from where the tensor's storage begins.
    return torch.from_numpy(memory[start : start + nbytes])
