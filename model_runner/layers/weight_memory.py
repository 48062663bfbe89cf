"""Memory for weights, laid out in the order in which each step reads them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch

from kvrelay.cpu_kernels.lanes import LINE_BYTES
from kvrelay.mem_cache.pool import HUGE_PAGE, allocate_huge_pages

BLOCK_BYTES: Final = 32 * HUGE_PAGE
"""The bytes taken from the system at a time; a part that is never used takes no memory."""


class WeightMemory:
    """Memory for weights, one behind the other, in huge pages where the system has them.

    With small pages a TLB miss comes every 4 KiB, and the processor's own prefetching ends there. A
    single layer's weights are too small to get huge pages by themselves. Memory is free again when
    all weights of a block are gone.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialized CPU memory that begins at a cache line."""
        nbytes = math.prod(shape) * dtype.itemsize
        kept = -(-nbytes // LINE_BYTES) * LINE_BYTES
        if len(self._free) < kept:
            self._free = allocate_huge_pages(max(kept, BLOCK_BYTES))
        taken, self._free = self._free[:nbytes], self._free[kept:]
        return taken.view(dtype).view(shape)
