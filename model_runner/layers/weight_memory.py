"""Memory of weights that each step reads from the first to the last."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch

from kvrelay.cpu_kernels.lanes import LINE_BYTES
from kvrelay.mem_cache.pool import HUGE_PAGE, allocate_huge_pages

BLOCK_BYTES: Final = 32 * HUGE_PAGE
"""Taken from the system at a time; what is not given away of it is never backed by memory."""


class WeightMemory:
    """Gives weights memory, one behind the other, in huge pages where the system has them.

    With small ones a TLB miss comes every 4 KiB, and there the processor's own prefetching ends:
    a layer's weights are smaller than what would get huge pages by itself. Memory is free
    again when all weights of a block are gone.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialized memory on the CPU that begins a line of the cache."""
        nbytes = math.prod(shape) * dtype.itemsize
        kept = -(-nbytes // LINE_BYTES) * LINE_BYTES
        if len(self._free) < kept:
            self._free = allocate_huge_pages(max(kept, BLOCK_BYTES))
        taken, self._free = self._free[:nbytes], self._free[kept:]
        return taken.view(dtype).view(shape)
