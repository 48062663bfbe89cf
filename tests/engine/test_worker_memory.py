"""How a worker divides its KV memory among the pools."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.worker.memory import divide_memory
from kvrelay.mem_cache.geometry import KVGeometry
from kvrelay.wire.worker_info import WorkerRole

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
