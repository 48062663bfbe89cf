"""Pages beside the pools, which belong to no request: peers probe the transport with them."""

from __future__ import annotations

import torch

from kvrelay.kv_transfer.checksums import settled_bytes
from kvrelay.kv_transfer.pull import Pull
from kvrelay.mem_cache.pool import KVPool

SCRATCH_BYTES = 8 << 20
MOST_PAGES = 64


def make_scratch(pool: KVPool) -> KVPool:
    """Some pages like those of `pool`; each page and layer has bytes of its own.

    They are the same on every worker.
    """
    pages = min(max(SCRATCH_BYTES // pool.geometry.page_bytes, 2), MOST_PAGES)
    scratch = KVPool(pool.geometry, pages, pool.data.device)
    for page in range(pages):
        for layer in range(pool.geometry.num_layers):
            scratch.layer(layer)[page].view(torch.uint8).fill_(_byte(scratch, page, layer))
    return scratch


def holds_scratch_of(scratch: KVPool, pull: Pull) -> bool:
    """Whether a read of a peer's scratch pages brought what every worker has there."""
    (local,), (remote,) = pull.local_pages, pull.remote_pages
    return all(map(lambda here, there: _is_page(scratch, int(here), int(there)), local, remote))


def _is_page(scratch: KVPool, page: int, source: int) -> bool:
    geometry = scratch.geometry
    layers = settled_bytes(scratch, page, geometry.page_size).reshape(geometry.num_layers, -1)
    return all(
        bool((row == _byte(scratch, source, layer)).all()) for layer, row in enumerate(layers)
    )


def _byte(pool: KVPool, page: int, layer: int) -> int:
    """Never zero, so that one that was not written shows."""
    return 1 + (page * pool.geometry.num_layers + layer) % 255
