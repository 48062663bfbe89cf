"""Scratch pages, which belong to no request: peers probe the transport with them.

The first half of a worker's scratch pages is constant, and read by peers. The second half is
written by peers. The bytes that this worker reads arrive in landing areas (`landing.py`).
"""

from __future__ import annotations

import zlib

import numpy as np
import torch

from kvrelay.kv_transfer.checksums import written_bytes
from kvrelay.kv_transfer.cuda_memory import outside_expandable_segments
from kvrelay.kv_transfer.pull import Pull
from kvrelay.mem_cache.geometry import Int64Array, KVGeometry
from kvrelay.mem_cache.pool import KVPool

SCRATCH_BYTES = 16 << 20
"""The size of all scratch pages together, unless that is fewer than 4 pages."""
MOST_PAGES = 1024
PROBED_AT_ONCE = 8
"""The number of peers whose landing areas are reserved when the memory for KV is measured."""


def make_scratch(pool: KVPool, incarnation: str) -> KVPool:
    """Make scratch pages with the geometry of `pool`, on its device.

    Each constant page and layer has bytes of its own. They also depend on the incarnation, so that
    late bytes of one peer are not taken for another's.
    """
    half = _half(pool.geometry)
    with outside_expandable_segments():
        scratch = KVPool(pool.geometry, 2 * half, pool.data.device)
    for layer in range(pool.geometry.num_layers):
        values = [scratch_byte(incarnation, page, layer) for page in range(half)]
        data = scratch.layer(layer)[:half].view(torch.uint8)
        data[:] = torch.tensor(values, dtype=torch.uint8).view(-1, 1, 1, 1, 1)
    _synchronize(scratch)
    return scratch


def probe_bytes(geometry: KVGeometry) -> int:
    """Compute the bytes that probes of `PROBED_AT_ONCE` peers need beside pages of `geometry`."""
    return (2 + PROBED_AT_ONCE) * _half(geometry) * geometry.page_bytes


def constant_pages(scratch: KVPool) -> Int64Array:
    """Get the ids of the pages that peers read."""
    return np.arange(scratch.total_pages // 2)


def landing_pages(scratch: KVPool) -> Int64Array:
    """Get the ids of the pages that peers write to.

    They are in descending order, so that no two pages are adjacent on both sides of a probe.
    """
    return np.arange(scratch.total_pages // 2, scratch.total_pages)[::-1]


def make_landing(scratch: KVPool) -> KVPool:
    """Make pages that the constant pages of one peer can be read into."""
    with outside_expandable_segments():
        return KVPool(scratch.geometry, scratch.total_pages // 2, scratch.data.device)


def clear_landing(landing: KVPool) -> None:
    """Zero a landing area, so that a page that was not written is noticed."""
    landing.data.zero_()
    _synchronize(landing)


def holds_scratch_of(landing: KVPool, pull: Pull) -> bool:
    """Whether a read of a peer's constant pages brought the bytes that the peer has there."""
    (local,), (remote,) = pull.local_pages, pull.remote_pages
    return all(
        _is_page(landing, int(here), pull.peer, int(there))
        for here, there in zip(local, remote, strict=True)
    )


def _half(geometry: KVGeometry) -> int:
    """Compute the number of constant pages, of written pages and of landing pages."""
    return min(max(SCRATCH_BYTES // geometry.page_bytes, 4), MOST_PAGES) // 2


def _is_page(landing: KVPool, page: int, peer: str, source: int) -> bool:
    geometry = landing.geometry
    layers = written_bytes(landing, page, geometry.page_size).reshape(geometry.num_layers, -1)
    return all(
        bool((row == scratch_byte(peer, source, layer)).all()) for layer, row in enumerate(layers)
    )


def _synchronize(pool: KVPool) -> None:
    """Wait until a GPU has written, because NIXL does not wait for its streams."""
    if pool.data.device.type == "cuda":
        torch.cuda.synchronize(pool.data.device)


def scratch_byte(incarnation: str, page: int, layer: int) -> int:
    """Compute the byte that fills one layer of a worker's constant page; never zero."""
    return 1 + zlib.crc32(f"{incarnation}/{page}/{layer}".encode()) % 255
