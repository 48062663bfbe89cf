"""A real worker with memory that stays in quarantine: it drains when it is told to, not before."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvrelay.aggregated_worker.worker import build
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.scheduler.metrics import WorkerMetrics
from kvrelay.wire.worker_info import WorkerRole

LIMIT_SECONDS = 0.2


async def test_a_worker_with_old_quarantine_drains_only_in_its_turn(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
):
    age = 0.0
    monkeypatch.setattr(WorkerMetrics, "quarantine_age", property(lambda _: age))
    config = WorkerConfig(
        "aggregated-0",
        WorkerRole.AGGREGATED,
        tiny,
        "tiny",
        dtype="float32",
        kv_memory=1 << 20,
        quarantine_limit=LIMIT_SECONDS,
    )
    worker = build(config)
    await worker.start()
    try:
        too_old = asyncio.create_task(worker.quarantine_too_old())
        draining = asyncio.create_task(worker.draining())
        await asyncio.wait({too_old}, timeout=2 * LIMIT_SECONDS)
        assert not too_old.done()
        age = 2 * LIMIT_SECONDS
        await asyncio.wait_for(too_old, 30)
        assert not draining.done(), "others may drain now"
        age = 0.0
        assert not await worker.drain_if_quarantine_too_old()
        assert not draining.done(), "the memory has come back"
        age = 2 * LIMIT_SECONDS
        assert await worker.drain_if_quarantine_too_old()
        await asyncio.wait_for(draining, 30)
        await asyncio.wait_for(worker.drained(), 30)
    finally:
        await worker.stop()
