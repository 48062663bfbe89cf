"""A worker that cannot start reports why at once, in one line."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from kvrelay.aggregated_worker.worker import build
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.worker import worker as worker_module
from kvrelay.engine.worker.assembly import WorkerParts
from kvrelay.engine.worker.loading import LoadedModel, load_model
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


async def test_the_thread_that_loads_the_model_ends_and_its_team_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    loaded_by: list[threading.Thread] = []

    def load(*args: Any) -> LoadedModel:
        loaded_by.append(threading.current_thread())
        return load_model(*args)

    monkeypatch.setattr(worker_module, "load_model", load)
    path = make_checkpoint(tmp_path / "llama")
    worker = build(WorkerConfig("a0", WorkerRole.AGGREGATED, path, "tiny", kv_memory=1 << 20))
    await worker.start()
    (thread,) = loaded_by
    await asyncio.to_thread(thread.join, 30)
    assert not thread.is_alive()
    await worker.stop()
