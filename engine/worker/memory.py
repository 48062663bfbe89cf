"""A worker's KV memory, made from its options: pools, page tables, prefix index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvrelay.engine.config import PrefixIndexKind, Speculation, WorkerConfig
from kvrelay.mem_cache.geometry import KVGeometry, PageOrder
from kvrelay.mem_cache.host_tier import HostTier
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager
from kvrelay.mem_cache.pool import KVPool
from kvrelay.mem_cache.prefix_index import PrefixIndex
from kvrelay.mem_cache.prefix_log import PageListener, PrefixLog
from kvrelay.mem_cache.radix_tree import RadixTree
from kvrelay.mem_cache.shape import PoolShape, window_pages
from kvrelay.mem_cache.tier_copies import CopyStream
from kvrelay.mem_cache.tier_speed import TierSpeed
from kvrelay.wire.model_digest import NO_MODEL, ModelDigest
from kvrelay.wire.page_hash import PageHashes
from kvrelay.wire.worker_info import WorkerRole


def divide_memory(config: WorkerConfig, geometries: Sequence[KVGeometry]) -> list[int]:
    """Pages of each pool: together they fill `config.kv_memory`.

    A pool for windows gets what `max_running` requests need there at most; the
    rest goes to full attention, as many pages to each pool if there are several.

    Raises:
        ValueError: it does not hold one page of each.
    """
    page_bytes = sum(geometry.page_bytes for geometry in geometries)
    equal = config.kv_memory // page_bytes
    if equal < 1:
        raise ValueError(
            f"kv_memory: {config.kv_memory} bytes do not hold one page of "
            f"{page_bytes} bytes ({config.page_size} tokens)"
        )
    full_bytes = sum(geometry.page_bytes for geometry in geometries if geometry.window is None)
    if not full_bytes:
        return [equal] * len(geometries)
    windowed = {
        geometry: min(equal, config.max_running * _window_pages(config, geometry.window))
        for geometry in geometries
        if geometry.window is not None
    }
    rest = config.kv_memory - sum(pages * one.page_bytes for one, pages in windowed.items())
    return [windowed.get(geometry, rest // full_bytes) for geometry in geometries]


def _window_pages(config: WorkerConfig, window: int) -> int:
    return window_pages(window, config.page_size, tokens_ahead(config))


def make_host_pools(config: WorkerConfig, pools: Sequence[KVPool]) -> list[KVPool]:
    """The host's pools beside the device's `pools`, as many pages in each; none if not wanted.

    Raises:
        ValueError: they cannot be had; the message begins with the option's name.
    """
    if not config.host_kv_memory:
        return []
    if config.prefix_index is PrefixIndexKind.NONE:
        raise ValueError("host_kv_memory: there is no prefix index to keep pages of")
    if any(pool.geometry.window is not None for pool in pools):
        raise ValueError("host_kv_memory: not for models with sliding windows")
    page_bytes = sum(pool.geometry.page_bytes for pool in pools)
    pages = config.host_kv_memory // page_bytes
    if not pages:
        raise ValueError(
            f"host_kv_memory: {config.host_kv_memory} bytes do not hold one page of {page_bytes}"
        )
    return [
        KVPool(replace(pool.geometry, order=PageOrder.PAGE_FIRST), pages, torch.device("cpu"))
        for pool in pools
    ]


def make_host_tier(
    kv_cache: KVCacheManager,
    host_pools: Sequence[KVPool],
    stream: CopyStream,
    bytes_per_second: float,
) -> HostTier:
    """The tier that keeps pages of `kv_cache` in `host_pools`."""
    index = kv_cache.index
    assert isinstance(index, RadixTree), "only the radix tree tells what it publishes"
    assert index.log is not None, "and only to its log"
    page_bytes = sum(pool.geometry.page_bytes for pool in host_pools)
    total, speed = host_pools[0].total_pages, TierSpeed(bytes_per_second)
    return HostTier(kv_cache, index.log, total, page_bytes, stream, speed)


def make_kv_cache(
    config: WorkerConfig,
    pools: Sequence[KVPool],
    max_model_len: int,
    model: ModelDigest = NO_MODEL,
    listener: PageListener | None = None,
) -> KVCacheManager:
    """The account of `pools`, for requests of `max_model_len` tokens and less.

    `model` is what computes their KV: routers know prefixes by hashes that it is part of.
    `listener` hears which pages the prefix index has.
    """
    return KVCacheManager(
        [
            PoolShape(pool.geometry.pool_name, pool.total_pages, pool.geometry.window)
            for pool in pools
        ],
        page_size=config.page_size,
        total_rows=config.max_running,
        max_row_tokens=max_model_len,
        ahead=tokens_ahead(config),
        index=_make_index(config, [pool.geometry.window for pool in pools], model, listener),
    )


def _make_index(
    config: WorkerConfig,
    windows: Sequence[int | None],
    model: ModelDigest,
    listener: PageListener | None,
) -> PrefixIndex | None:
    match config.prefix_index:
        case PrefixIndexKind.RADIX:
            log = PrefixLog(PageHashes(model, config.page_size), listener=listener)
            return RadixTree(config.page_size, windows, log=log)
        case PrefixIndexKind.NONE:
            return None


def tokens_ahead(config: WorkerConfig) -> int:
    """Tokens that a request may be allocated beyond those that are written."""
    # With drafts the window is kept for a token before: a draft model may look back from there.
    generated = 1 + config.drafts_for(True) + (config.speculation is not Speculation.NONE)
    takes_over_only = config.role is WorkerRole.DECODE and not config.computes_prompts
    step = generated if takes_over_only else max(config.chunk_tokens, generated)
    return 2 * step if config.overlap else step
