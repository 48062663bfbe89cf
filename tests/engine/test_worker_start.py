"""A worker that cannot start reports why at once, in one line."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from kvrelay.aggregated_worker.worker import build
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.worker.assembly import WorkerParts
from kvrelay.engine.worker.worker import Worker
from kvrelay.text.tokenizer import TokenizerError
from kvrelay.wire.worker_info import WorkerRole
from tests.checkpoints import make_checkpoint
from tests.cluster.listening import listening


def never(parts: WorkerParts[Any, Any]) -> NoReturn:
    raise AssertionError


async def test_missing_tokenizer_is_found_before_the_weights_are_read(tmp_path: Path):
    # There is no config.json either, which reading the weights would find first.
    worker = Worker(WorkerConfig("p0", WorkerRole.PREFILL, tmp_path, "none"), never)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: cannot load the tokenizer: No"):
        await worker.start()


async def test_an_aggregated_worker_has_no_nixl_agent_and_lives(tmp_path: Path):
    path = make_checkpoint(tmp_path / "llama")
    worker = build(WorkerConfig("a0", WorkerRole.AGGREGATED, path, "tiny", kv_memory=1 << 20))
    before = listening(psutil.Process())
    info = await worker.start()
    ports = {port for _, port in listening(psutil.Process()) - before}
    doors = {int(address.rpartition(":")[2]) for address in (info.address, info.metrics_address)}
    assert ports == doors
    await asyncio.wait_for(worker.heartbeat(), 30)
    await worker.stop()
