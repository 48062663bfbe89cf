"""The byte runs that a transfer moves, made from lists of pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvrelay.mem_cache.geometry import Int64Array, KVGeometry
from kvrelay.mem_cache.pool import KVPool


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """A pool as bytes: its address, its number of pages and their geometry."""

    geometry: KVGeometry
    total_pages: int
    address: int
    device_id: int
    memory_type: str
    """The memory type in NIXL's terms: ``DRAM`` or ``VRAM``."""

    @classmethod
    def of(cls, pool: KVPool) -> PoolLayout:
        """Describe a pool of this process."""
        device = pool.data.device
        memory_type = "VRAM" if device.type == "cuda" else "DRAM"
        return cls(pool.geometry, pool.total_pages, pool.address, device.index or 0, memory_type)

    @property
    def nbytes(self) -> int:
        """The size of the whole pool."""
        return self.total_pages * self.geometry.page_bytes


@dataclass(frozen=True, slots=True)
class SpanPairs:
    """Byte runs to copy: `lengths[i]` bytes from `remote[i]` to `local[i]` (addresses)."""

    local: Int64Array
    remote: Int64Array
    lengths: Int64Array

    @property
    def nbytes(self) -> int:
        """The number of bytes to move."""
        return int(self.lengths.sum())

    @classmethod
    def joined(cls, parts: Sequence[SpanPairs]) -> SpanPairs:
        """Join the runs of all `parts`, one part after the other."""
        return cls(
            np.concatenate([part.local for part in parts]),
            np.concatenate([part.remote for part in parts]),
            np.concatenate([part.lengths for part in parts]),
        )


def pair_spans(
    local: PoolLayout, local_pages: Int64Array, remote: PoolLayout, remote_pages: Int64Array
) -> SpanPairs:
    """Make the runs that copy `remote_pages` into `local_pages`; adjacent runs are merged.

    The two pools may differ in page order; a run ends where either side is no longer contiguous.
    Long runs are fast: with `page_first` on both sides a page is at most one run.

    Raises:
        ValueError: a page id is out of range, or the two lists differ in length.
    """
    if len(local_pages) != len(remote_pages):
        raise ValueError(f"{len(remote_pages)} pages do not fit into {len(local_pages)}")
    piece = local.geometry.layer_page_bytes
    here = local.address + _pieces(local, local_pages)
    there = remote.address + _pieces(remote, remote_pages)
    if len(here) == 0:
        return SpanPairs(here, there, here)
    follows = (np.diff(here) == piece) & (np.diff(there) == piece)
    starts = np.flatnonzero(np.concatenate(([True], ~follows)))
    counts = np.diff(np.concatenate((starts, [len(here)])))
    return SpanPairs(here[starts], there[starts], counts * piece)


def _pieces(layout: PoolLayout, pages: Int64Array) -> Int64Array:
    """Compute the byte offset of every (page, layer) piece, page by page; [pages * layers]."""
    if len(pages) and not 0 <= pages.min() <= pages.max() < layout.total_pages:
        raise ValueError(f"page ids must lie in [0, {layout.total_pages}), got {pages.tolist()}")
    return layout.geometry.piece_offsets(pages, layout.total_pages).ravel()
