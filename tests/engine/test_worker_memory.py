"""How a worker divides its KV memory among the pools."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.engine.config import PrefixIndexKind, Speculation, WorkerConfig
from kvrelay.engine.worker import loading
from kvrelay.engine.worker.loading import draft_graph_options, graph_options
from kvrelay.engine.worker.memory import (
    check_tiers,
    divide_memory,
    make_host_pools,
    make_kv_cache,
    make_store,
    pin_host_pools,
)
from kvrelay.mem_cache.geometry import KVGeometry
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.config.cuda_graphs import CudaGraphs, GraphOptions
from kvrelay.wire.model_digest import NO_MODEL
from kvrelay.wire.worker_info import WorkerRole
from tests.checkpoints import make_checkpoint
from tests.mem_cache.pinning_double import LimitedPinning

RUNNING = 8


@pytest.mark.parametrize(("window", "pages", "with_chunks"), [(128, 10, 73), (1024, 66, 129)])
def test_windows_have_room_for_chunks_only_where_prompts_are_computed(
    window: int, pages: int, with_chunks: int
) -> None:
    """In pages a request, of a pool for windows; the rest is for full attention."""
    geometries = [KVGeometry(1, 1, 64, torch.bfloat16, 16, window=one) for one in (None, window)]
    for computes_prompts, expected in ((False, pages), (True, with_chunks)):
        config = WorkerConfig(
            "d",
            WorkerRole.DECODE,
            Path(),
            "m",
            kv_memory=64 << 20,
            max_running=RUNNING,
            chunk_tokens=512,
            computes_prompts=computes_prompts,
        )
        full, windowed = divide_memory(config, geometries)
        assert windowed == RUNNING * expected
        assert full == (64 << 20) // geometries[0].page_bytes - windowed


def config_of(**options: Any) -> WorkerConfig:
    return WorkerConfig("p", WorkerRole.PREFILL, Path(), "m", **options)


def test_reserved_pages_are_no_requests() -> None:
    """They are of the memory that was asked for, and a pool for windows has them besides."""
    geometries = [KVGeometry(1, 1, 64, torch.bfloat16, 16, window=one) for one in (None, 128)]
    config = config_of(kv_memory=8 << 20, max_running=RUNNING)
    plain, totals = (divide_memory(config, geometries, reserved) for reserved in (0, 1))
    assert sum(plain) == sum(totals) == (8 << 20) // geometries[0].page_bytes
    assert totals[1] == plain[1] + 1
    pools = [
        KVPool(geometry, pages, torch.device("cpu"), reserved_pages=1)
        for geometry, pages in zip(geometries, totals, strict=True)
    ]
    kv_cache = make_kv_cache(config, pools, max_model_len=256)
    assert [pool.total for pool in kv_cache.audit.page_counts()] == [pages - 1 for pages in totals]


def test_memory_for_reserved_pages_alone_is_too_little() -> None:
    geometry = KVGeometry(1, 1, 64, torch.bfloat16, 16)
    config = config_of(kv_memory=geometry.page_bytes)
    assert divide_memory(config, [geometry]) == [1]
    with pytest.raises(ValueError, match="kv_memory: "):
        divide_memory(config, [geometry], reserved_pages=1)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, None),
        ({"cuda_graphs": CudaGraphs.DECODE, "max_running": 6}, (1, 2, 4, 8)),
        ({"cuda_graphs": CudaGraphs.DECODE, "cuda_graph_sizes": "3,1"}, (1, 3)),
        (
            {
                "cuda_graphs": CudaGraphs.DECODE,
                "cuda_graph_sizes": "1,4,64,128",
                "max_running": 6,
            },
            (1, 4, 64),
        ),
        ({"cuda_graph_sizes": "3,1"}, None),
    ],
)
def test_sizes_of_graphs(options: dict[str, Any], sizes: tuple[int, ...] | None) -> None:
    found = graph_options(config_of(page_size=8, **options))
    assert (None if found is None else found.sizes.sizes) == sizes
    assert found is None or found.page_size == 8


def test_a_gpu_has_graphs_unless_they_are_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    by_itself = graph_options(config_of(device="cuda", max_running=2))
    assert by_itself == GraphOptions(by_itself.sizes, page_size=16, required=False)  # type: ignore[union-attr]
    asked = graph_options(config_of(device="cuda", cuda_graphs=CudaGraphs.DECODE))
    assert asked is not None
    assert asked.required
    assert graph_options(config_of(device="cuda", cuda_graphs=CudaGraphs.OFF)) is None
    assert graph_options(config_of()) is None, "a CPU"


def test_graphs_follow_the_draft_length() -> None:
    options: dict[str, Any] = {"cuda_graphs": CudaGraphs.DECODE, "num_draft_tokens": 3}
    found = []
    for speculation in (Speculation.NONE, Speculation.NGRAM):
        config = config_of(speculation=speculation, **options)
        both = (graph_options(config), draft_graph_options(config))
        found.append([None if one is None else one.most_each for one in both])
    assert found == [[1, 2], [4, 2]]


def test_sizes_that_are_none_are_named() -> None:
    config = config_of(cuda_graphs=CudaGraphs.DECODE, cuda_graph_sizes="many")
    with pytest.raises(ValueError, match="cuda_graph_sizes: must be numbers"):
        graph_options(config)
    assert graph_options(replace(config, cuda_graphs=CudaGraphs.AUTO)) is None, "a CPU"


@pytest.mark.parametrize(
    ("folder", "size", "said"),
    [
        ("/kv", 5000, "kv_storage_size: 5000 bytes do not hold one page"),
        ("kv", 1 << 20, "kv_storage: kv cannot be used: the path must be absolute"),
        ("/dev/null", 1 << 20, "kv_storage: /dev/null cannot be used"),
        ("mooncake://host", 1 << 20, "kv_storage: mooncake://host cannot be used"),
    ],
)
def test_storage_that_cannot_be_had_is_refused(folder: str, size: int, said: str) -> None:
    config = WorkerConfig(
        "a",
        WorkerRole.AGGREGATED,
        Path(),
        "m",
        host_kv_memory=1 << 20,
        kv_storage=folder,
        kv_storage_size=size,
    )
    pool = KVPool(KVGeometry(1, 1, 64, torch.float32, 16), 4, torch.device("cpu"))
    with pytest.raises(ValueError, match=said):
        make_store(config, make_host_pools(config, [pool]), NO_MODEL)


def test_host_memory_that_cannot_be_pinned_is_refused_in_one_line() -> None:
    config = config_of(host_kv_memory=1 << 26)
    pool = KVPool(KVGeometry(1, 1, 64, torch.float32, 16), 4, torch.device("cpu"))
    said = (
        r"^host_kv_memory: 0.06 GiB of the host cannot be pinned for the GPU: out of memory \(2\)$"
    )
    with pytest.raises(ValueError, match=said):
        pin_host_pools(make_host_pools(config, [pool]), LimitedPinning(limit=1 << 20))


def pools_of(windows: list[int | None], pages: list[int]) -> list[KVPool]:
    cpu = torch.device("cpu")
    return [
        KVPool(KVGeometry(1, 1, 64, torch.float32, 16, window=window), total, cpu)
        for window, total in zip(windows, pages, strict=True)
    ]


def host_pages(pools: list[KVPool], nbytes: int) -> list[int]:
    config = config_of(host_kv_memory=nbytes)
    return [pool.total_pages for pool in make_host_pools(config, pools)]


def test_windows_have_the_share_of_the_host_that_they_have_of_the_device() -> None:
    page = KVGeometry(1, 1, 64, torch.float32, 16).page_bytes
    assert host_pages(pools_of([None, 33], [60, 20]), 160 * page) == [120, 40]
    assert host_pages(pools_of([None, 33, None], [30, 20, 30]), 160 * page) == [60, 40, 60]
    assert host_pages(pools_of([33], [20]), 10 * page) == [10]
    assert host_pages(pools_of([None, None], [20, 20]), 10 * page) == [5, 5]


def test_the_host_holds_one_prompt_s_window_or_is_refused() -> None:
    pools, page = pools_of([None, 129], [90, 10]), 8192
    assert host_pages(pools, 12 * page) == [4, 8]
    with pytest.raises(ValueError, match="do not hold one page of 8192 and windows of"):
        host_pages(pools, 8 * page)


@pytest.mark.parametrize(
    ("options", "window", "said"),
    [
        ({"kv_storage": "/kv"}, None, "kv_storage: pages go there by way of --host-kv-memory"),
        (
            {"kv_storage": "/kv", "host_kv_memory": 1 << 20},
            33,
            "kv_storage: not for models with sliding windows",
        ),
        (
            {"host_kv_memory": 1 << 20},
            1,
            "host_kv_memory: not for models with windows of one token",
        ),
        (
            {"host_kv_memory": 1 << 20, "prefix_index": PrefixIndexKind.NONE},
            None,
            "host_kv_memory: there is no prefix index",
        ),
    ],
)
def test_tiers_that_a_model_cannot_have_are_refused(
    options: dict[str, Any], window: int | None, said: str
) -> None:
    geometries = [KVGeometry(1, 1, 64, torch.float32, 16, window=one) for one in (None, window)]
    with pytest.raises(ValueError, match=f"^{said}"):
        check_tiers(config_of(**options), geometries)


def test_storage_of_windows_is_refused_before_memory_is_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved = list[str]()
    for name in ("KVPool", "make_host_pools", "pin_host_pools"):
        monkeypatch.setattr(loading, name, lambda *_, name=name: reserved.append(name))
    config = WorkerConfig(
        "a",
        WorkerRole.AGGREGATED,
        make_checkpoint(tmp_path / "gemma3", "gemma3"),
        "m",
        kv_memory=1 << 20,
        host_kv_memory=1 << 20,
        kv_storage=str(tmp_path / "storage"),
    )
    with pytest.raises(ValueError, match=r"^kv_storage: not for models with sliding windows"):
        loading.load_model(config)
    assert not reserved
    assert not (tmp_path / "storage").exists()
