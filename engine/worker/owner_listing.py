"""The owner of each page of a worker, as its allocator records it."""

from __future__ import annotations

from kvrelay.mem_cache.kv_cache_manager import KVCacheManager
from kvrelay.wire.page_owners import OwnedPages, PageOwners, PoolOwners


def page_owners(kv_cache: KVCacheManager) -> PageOwners:
    """List every page of every pool, in runs of one owner."""
    return PageOwners(
        tuple(
            PoolOwners(shape.name, tuple(_owned_pages(kv_cache, pool)))
            for pool, shape in enumerate(kv_cache.shape.pools)
        )
    )


def _owned_pages(kv_cache: KVCacheManager, pool: int) -> list[OwnedPages]:
    return [
        OwnedPages(run.first_page, run.num_pages, run.owner.name.lower(), run.holder)
        for run in kv_cache.audit.owner_runs(pool)
    ]
