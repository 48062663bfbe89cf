"""Lists the owner of each page of a worker, as its allocator records it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from kvrelay.mem_cache.account import Owner
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager
from kvrelay.wire.page_owners import OwnedPages, PageOwners, PoolOwners


def page_owners(kv_cache: KVCacheManager) -> PageOwners:
    """Every page of every pool, in runs of one owner."""
    return PageOwners(
        tuple(
            PoolOwners(shape.name, tuple(_owned_runs(kv_cache.audit.owner_map(pool))))
            for pool, shape in enumerate(kv_cache.shape.pools)
        )
    )


def _owned_runs(owners: Iterable[tuple[Owner, str]]) -> Iterator[OwnedPages]:
    first = 0
    for (owner, holder), run in groupby(owners):
        count = sum(1 for _ in run)
        yield OwnedPages(first, count, owner.name.lower(), holder)
        first += count
