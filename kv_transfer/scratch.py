"""Pages beside the pools, which belong to no request: peers probe the transport with them.

The first half of a worker's is read by peers and never changes, the second half is
where what is read arrives, and what peers write.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch

from kvrelay.kv_transfer.checksums import settled_bytes
from kvrelay.kv_transfer.pull import Pull
from kvrelay.mem_cache.geometry import Int64Array
from kvrelay.mem_cache.pool import KVPool

SCRATCH_BYTES = 16 << 20
MOST_PAGES = 1024


def make_scratch(pool: KVPool, incarnation: str) -> KVPool:
    """Some pages like those of `pool`; each page and layer has bytes of its own.

    They depend on the incarnation, too: late bytes of one peer are not taken for another's.
    """
    half = min(max(SCRATCH_BYTES // pool.geometry.page_bytes, 4), MOST_PAGES) // 2
    scratch = KVPool(pool.geometry, 2 * half, pool.data.device)
    for layer in range(pool.geometry.num_layers):
        values = [_byte(incarnation, page, layer) for page in range(half)]
        data = scratch.layer(layer)[:half].view(torch.uint8)
        data[:] = torch.tensor(values, dtype=torch.uint8).view(-1, 1, 1, 1, 1)
    _synchronize(scratch)
    return scratch


def constant_pages(scratch: KVPool) -> Int64Array:
    """Those that are read by peers."""
    return np.arange(scratch.total_pages // 2)


def landing_pages(scratch: KVPool) -> Int64Array:
    """Those that anything can be written to.

    Back to front, so that no two are neighbours here and where they come from or go to.
    """
    return np.arange(scratch.total_pages // 2, scratch.total_pages)[::-1]


def clear_landing(scratch: KVPool) -> None:
    """So that a page that is not written shows."""
    for layer in range(scratch.geometry.num_layers):
        scratch.layer(layer)[scratch.total_pages // 2 :] = 0
    _synchronize(scratch)


def holds_scratch_of(scratch: KVPool, pull: Pull) -> bool:
    """Whether a read of a peer's constant pages brought what that peer has there."""
    (local,), (remote,) = pull.local_pages, pull.remote_pages
    return all(
        _is_page(scratch, int(here), pull.peer, int(there))
        for here, there in zip(local, remote, strict=True)
    )


def _is_page(scratch: KVPool, page: int, peer: str, source: int) -> bool:
    geometry = scratch.geometry
    layers = settled_bytes(scratch, page, geometry.page_size).reshape(geometry.num_layers, -1)
    return all(bool((row == _byte(peer, source, layer)).all()) for layer, row in enumerate(layers))


def _synchronize(scratch: KVPool) -> None:
    """Wait for what a GPU has yet to do: NIXL knows nothing of its streams."""
    if scratch.data.device.type == "cuda":
        torch.cuda.synchronize(scratch.data.device)


def _byte(incarnation: str, page: int, layer: int) -> int:
    """Never zero."""
    return 1 + zlib.crc32(f"{incarnation}/{page}/{layer}".encode()) % 255
