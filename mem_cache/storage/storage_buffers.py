"""The memory of pages on their way to a store and back: the host's pools, and headers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvrelay.mem_cache.byte_sum import hash_bytes
from kvrelay.mem_cache.storage.storage_format import ALIGNMENT, StorageFormat
from kvrelay.mem_cache.storage.storage_pages import MOST_OPERATIONS, MOST_PAGES, StoragePage

HostMemory = Sequence[npt.NDArray[np.uint8]]
"""The host's pools, each as ``[pages, bytes]``: the bytes of each page are contiguous."""

_SUM_STEP: Final = 0x9E3779B97F4A7C15


class PageBuffers:
    """Blocks for the headers of all pages that can be on their way, and the host's pools.

    Args:
        layout: of the slots that pages go to.
        memory: the host's pools. They must stay in place.
    """

    def __init__(self, layout: StorageFormat, memory: HostMemory) -> None:
        self._format = layout
        self._memory = memory
        self._headers = _aligned_bytes(MOST_OPERATIONS * MOST_PAGES, layout.header_bytes)
        self._free = list(range(len(self._headers)))

    @property
    def regions(self) -> list[tuple[int, int]]:
        """The address and the bytes of each part."""
        return [(array.ctypes.data, array.nbytes) for array in (self._headers, *self._memory)]

    def take(self, number: int) -> list[int]:
        """Take blocks for the headers of `number` pages."""
        assert number <= len(self._free), "too many operations at a time"
        return [self._free.pop() for _ in range(number)]

    def give_back(self, blocks: Sequence[int]) -> None:
        """Give back blocks, which nothing reads or writes any more."""
        self._free += blocks

    def parts(self, block: int, slot: int) -> list[tuple[int, int]]:
        """List address and bytes of a header, and of a page in each pool, in a slot's order."""
        parts = [(self._headers[block].ctypes.data, self._format.header_bytes)]
        return [*parts, *((pool[slot].ctypes.data, pool.shape[1]) for pool in self._memory)]

    def write_header(self, block: int, page: StoragePage) -> None:
        """Write the header of a page that is to be written."""
        packed = self._format.pack_slot(page, self._checksum(page.slot))
        self._headers[block, : len(packed)] = np.frombuffer(packed, np.uint8)

    def clear_header(self, block: int) -> None:
        """Clear a block, so that it is no page's header."""
        self._headers[block] = 0

    def is_page(self, block: int, page: StoragePage) -> bool:
        """Whether the header and bytes that were read are this page's."""
        checksum = self._format.checksum_in(self._headers[block].tobytes(), page)
        return checksum is not None and checksum == self._checksum(page.slot)

    def is_another_page(self, block: int) -> bool:
        """Whether the header that was read is one of any page of this layout."""
        return self._format.is_header(self._headers[block].tobytes())

    def _checksum(self, slot: int) -> int:
        total = 0
        for pool in self._memory:
            total = (total * _SUM_STEP + hash_bytes(pool[slot])) % (1 << 64)
        return total


def _aligned_bytes(blocks: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Allocate ``[blocks, nbytes]`` zeros that begin at a multiple of `ALIGNMENT`."""
    memory = np.zeros(blocks * nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + blocks * nbytes].reshape(blocks, nbytes)
