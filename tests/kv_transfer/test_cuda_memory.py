"""Pools are allocated outside of expandable segments, whatever the user has told torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.worker import loading
from kvrelay.kv_transfer import scratch_pages
from kvrelay.kv_transfer.cuda_memory import outside_expandable_segments
from kvrelay.mem_cache.pool import KVPool
from kvrelay.wire.worker_info import WorkerRole
from tests.checkpoints import make_checkpoint

EXPANDABLE = "max_split_size_mb:512, expandable_segments:True"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch's allocator is told."""
    settings: list[str] = []
    monkeypatch.setattr(
        torch._C, "_accelerator_setAllocatorSettings", settings.append, raising=True
    )
    return settings


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_users_settings_are_there_again_afterwards(variable: str, told: list[str]) -> None:
    def allocate() -> None:
        with outside_expandable_segments({variable: EXPANDABLE}):
            assert told == ["expandable_segments:False"]
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        allocate()
    assert told == ["expandable_segments:False", EXPANDABLE]


@pytest.mark.parametrize(
    "environment", [{}, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}], ids=str
)
def test_nothing_is_changed_where_segments_are_fixed(
    environment: Mapping[str, str], told: list[str]
) -> None:
    with outside_expandable_segments(environment):
        pass
    assert not told


def test_pages_that_are_registered_are_allocated_so(
    told: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A worker's pools, its scratch pages, and those that scratch pages are read into."""
    seen: list[str] = []

    class Pool(KVPool):
        def __init__(self, *args: Any) -> None:
            seen.append(told[-1])
            super().__init__(*args)

    for module in (scratch_pages, loading):
        monkeypatch.setattr(module, "KVPool", Pool)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", EXPANDABLE)
    path = make_checkpoint(tmp_path / "llama")
    config = WorkerConfig("a", WorkerRole.AGGREGATED, path, "tiny", kv_memory=1 << 20)
    model = loading.load_model(config)
    landing = scratch_pages.make_landing(scratch_pages.make_scratch(model.pools[0], "w"))
    assert isinstance(landing, Pool)
    assert seen == ["expandable_segments:False"] * 3
    assert told[-1] == EXPANDABLE
