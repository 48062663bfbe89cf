"""A worker's KV memory, made from its options: pools, page tables, prefix index."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.device.device_streams import Pinning
from kvrelay.engine.config import PrefixIndexKind, Speculation, WorkerConfig
from kvrelay.kv_transfer.mooncake_store import SCHEME, MooncakeAddress, MooncakeStore
from kvrelay.kv_transfer.nixl_files import NixlFiles
from kvrelay.mem_cache.geometry import KVGeometry, PageOrder
from kvrelay.mem_cache.host.host_tier import HostTier
from kvrelay.mem_cache.host.tier_copies import CopyStream
from kvrelay.mem_cache.host.tier_speed import TierSpeed
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager
from kvrelay.mem_cache.pinned_pools import PinnedPools
from kvrelay.mem_cache.pool import KVPool
from kvrelay.mem_cache.prefix.prefix_index import PrefixIndex
from kvrelay.mem_cache.prefix.prefix_log import PageListener, PrefixLog
from kvrelay.mem_cache.prefix.radix_tree import RadixTree
from kvrelay.mem_cache.prefix.retention import Retention
from kvrelay.mem_cache.shape import PoolShape, window_pages
from kvrelay.mem_cache.storage.storage_files import FileStore
from kvrelay.mem_cache.storage.storage_format import StorageFormat
from kvrelay.wire.model_digest import NO_MODEL, ModelDigest
from kvrelay.wire.page_hash import PageHashes
from kvrelay.wire.worker_info import WorkerRole


def divide_memory(
    config: WorkerConfig, geometries: Sequence[KVGeometry], reserved_pages: int = 0
) -> list[int]:
    """Compute the pages of each pool, which together fill `config.kv_memory`.

    A pool for windows gets the most that `max_running` requests need there. The rest goes to full
    attention, as many pages to each pool if there are several. Each pool has `reserved_pages` that
    no request uses.

    Raises:
        ValueError: it does not hold one page of requests of each.
    """
    assert isinstance(config.kv_memory, int), "a share is measured first"
    page_bytes = sum(geometry.page_bytes for geometry in geometries)
    equal = config.kv_memory // page_bytes
    if equal <= reserved_pages:
        raise ValueError(
            f"kv_memory: {config.kv_memory} bytes do not hold one page of "
            f"{page_bytes} bytes ({config.page_size} tokens)"
        )
    full_bytes = sum(geometry.page_bytes for geometry in geometries if geometry.window is None)
    if not full_bytes:
        return [equal] * len(geometries)
    windowed = {
        geometry: min(
            equal, config.max_running * _window_pages(config, geometry.window) + reserved_pages
        )
        for geometry in geometries
        if geometry.window is not None
    }
    rest = config.kv_memory - sum(pages * one.page_bytes for one, pages in windowed.items())
    return [windowed.get(geometry, rest // full_bytes) for geometry in geometries]


def _window_pages(config: WorkerConfig, window: int) -> int:
    return window_pages(window, config.page_size, tokens_ahead(config))


def check_tiers(config: WorkerConfig, geometries: Sequence[KVGeometry]) -> None:
    """Refuse tiers that a model cannot have, before memory is reserved or pinned for them.

    Raises:
        ValueError: the message begins with the option's name.
    """
    windows = [one.window for one in geometries if one.window is not None]
    if config.kv_storage and not config.host_kv_memory:
        raise ValueError("kv_storage: pages go there by way of --host-kv-memory, which is 0")
    if config.kv_storage and windows:
        raise ValueError("kv_storage: not for models with sliding windows")
    if config.host_kv_memory and config.prefix_index is PrefixIndexKind.NONE:
        raise ValueError("host_kv_memory: there is no prefix index to keep pages of")
    if config.host_kv_memory and 1 in windows:
        raise ValueError("host_kv_memory: not for models with windows of one token")


def make_host_pools(config: WorkerConfig, pools: Sequence[KVPool]) -> list[KVPool]:
    """Make the host's pools beside the device's `pools`; none if not wanted.

    `check_tiers` has passed. Pools without a window have as many pages each. A window's pool has
    the same share of the memory as on the device, and a prompt's window at least.

    Raises:
        ValueError: the memory is too small for them or not there; the message begins with the
            option's name.
    """
    if not config.host_kv_memory:
        return []
    totals = _divide_host_memory(config, pools)
    return [
        KVPool(replace(pool.geometry, order=PageOrder.PAGE_FIRST), pages, torch.device("cpu"))
        for pool, pages in zip(pools, totals, strict=True)
    ]


def _divide_host_memory(config: WorkerConfig, pools: Sequence[KVPool]) -> list[int]:
    """Compute the pages of the host's pool beside each of the device's."""
    device_bytes = sum(pool.total_pages * pool.geometry.page_bytes for pool in pools)
    full_bytes = sum(pool.geometry.page_bytes for pool in pools if pool.geometry.window is None)
    windowed: dict[int, int] = {}
    for number, pool in enumerate(pools):
        if (window := pool.geometry.window) is not None:
            share = pool.total_pages * config.host_kv_memory // device_bytes
            windowed[number] = max(share, -(-(window - 1) // config.page_size))
    used = sum(pages * pools[number].geometry.page_bytes for number, pages in windowed.items())
    rest = config.host_kv_memory - used
    if rest < full_bytes:
        least = [f"one page of {full_bytes}"] * bool(full_bytes)
        least += [f"windows of {used}"] * bool(used)
        text = " and ".join(least)
        raise ValueError(f"host_kv_memory: {config.host_kv_memory} bytes do not hold {text}")
    return [
        windowed[number] if number in windowed else rest // full_bytes
        for number in range(len(pools))
    ]


def pin_host_pools(host_pools: Sequence[KVPool], pinning: Pinning | None) -> PinnedPools:
    """Pin the host's pools for the device, if it is a GPU.

    Raises:
        ValueError: the system does not pin so much; the message begins with the option's name.
    """
    try:
        return PinnedPools(host_pools, pinning)
    except RuntimeError as error:
        gigabytes = sum(pool.nbytes for pool in host_pools) / (1 << 30)
        raise ValueError(
            f"host_kv_memory: {gigabytes:.2f} GiB of the host cannot be pinned for the GPU: {error}"
        ) from error


def make_host_tier(
    kv_cache: KVCacheManager,
    host_pools: Sequence[KVPool],
    stream: CopyStream,
    bytes_per_second: float,
) -> HostTier:
    """Make the tier that keeps pages of `kv_cache` in `host_pools`."""
    index = kv_cache.index
    assert isinstance(index, RadixTree), "only the radix tree tells what it publishes"
    assert index.log is not None, "and only to its log"
    page_bytes = [pool.geometry.page_bytes for pool in host_pools]
    totals, speed = [pool.total_pages for pool in host_pools], TierSpeed(bytes_per_second)
    return HostTier(kv_cache, index.log, totals, page_bytes, stream, speed)


def make_store(
    config: WorkerConfig, host_pools: Sequence[KVPool], model: ModelDigest
) -> FileStore | MooncakeStore | None:
    """Make the store that keeps pages of `host_pools` in `config.kv_storage`; None: not wanted.

    `check_tiers` has passed. The store is Mooncake Store for a ``mooncake://`` address, else files.

    Raises:
        ValueError: it cannot be opened; the message begins with the option's name.
    """
    if not config.kv_storage:
        return None
    page_bytes = sum(pool.geometry.page_bytes for pool in host_pools)
    layout = _storage_layout(host_pools, model)
    slots = StorageFormat(layout, 4 * config.page_size, page_bytes)
    if config.kv_storage_size < slots.slot_bytes:
        raise ValueError(
            f"kv_storage_size: {config.kv_storage_size} bytes do not hold one page of "
            f"{slots.slot_bytes} bytes"
        )
    memory, size = list(map(_bytes_of, host_pools)), config.kv_storage_size
    try:
        if config.kv_storage.startswith(f"{SCHEME}:"):
            address = MooncakeAddress.parse(config.kv_storage)
            return MooncakeStore(address, config.host, slots, size, memory)
        if not Path(config.kv_storage).is_absolute():
            raise ValueError("the path must be absolute: workers run where they are started")
        root = Path(config.kv_storage) / slots.name
        return FileStore(root, slots, size, config.page_size, memory, NixlFiles())
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"kv_storage: {config.kv_storage} cannot be used: {error}") from error


def _storage_layout(host_pools: Sequence[KVPool], model: ModelDigest) -> bytes:
    """Hash everything on which the bytes of a page of equal tokens depend."""
    geometries = [repr(pool.geometry) for pool in host_pools]
    parts = model.config, model.weights, model.dtype, model.layout, model.draft, sys.byteorder
    return hashlib.sha256("\n".join((*parts, *geometries)).encode()).digest()


def _bytes_of(pool: KVPool) -> npt.NDArray[np.uint8]:
    """View a host pool as ``[pages, bytes]``, as it lies in memory."""
    array: npt.NDArray[np.uint8] = pool.data.view(torch.uint8).view(pool.total_pages, -1).numpy()
    return array


def make_kv_cache(
    config: WorkerConfig,
    pools: Sequence[KVPool],
    max_model_len: int,
    model: ModelDigest = NO_MODEL,
    listener: PageListener | None = None,
) -> KVCacheManager:
    """Make the account of `pools`, for requests of at most `max_model_len` tokens.

    `model` is part of the page hashes by which routers know prefixes. `listener` hears which pages
    the prefix index has.
    """
    return KVCacheManager(
        [
            PoolShape(
                pool.geometry.pool_name,
                pool.total_pages - pool.reserved_pages,
                pool.geometry.window,
            )
            for pool in pools
        ],
        page_size=config.page_size,
        total_rows=config.max_running,
        max_row_tokens=max_model_len,
        ahead=tokens_ahead(config),
        index=_make_index(config, pools, model, listener),
    )


def _make_index(
    config: WorkerConfig,
    pools: Sequence[KVPool],
    model: ModelDigest,
    listener: PageListener | None,
) -> PrefixIndex | None:
    match config.prefix_index:
        case PrefixIndexKind.RADIX:
            log = PrefixLog(PageHashes(model, config.page_size), listener=listener)
            windows = [pool.geometry.window for pool in pools]
            tokens = [pool.total_pages * config.page_size for pool in pools]
            retention = Retention.of_share(config.retention_share, tokens, windows)
            return RadixTree(config.page_size, windows, retention=retention, log=log)
        case PrefixIndexKind.NONE:
            return None


def tokens_ahead(config: WorkerConfig) -> int:
    """Compute the tokens that a request may be allocated beyond those that are written."""
    # With drafts the window is kept for one token earlier, from where a draft model may look back.
    generated = 1 + config.drafts_for(True) + (config.speculation is not Speculation.NONE)
    takes_over_only = config.role is WorkerRole.DECODE and not config.computes_prompts
    step = generated if takes_over_only else max(config.chunk_tokens, generated)
    return 2 * step if config.overlap else step
