"""A worker that cannot start reports why at once, in one line."""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from kvrelay.aggregated_worker.worker import build
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.worker import assembly, loading
from kvrelay.engine.worker import worker as worker_module
from kvrelay.engine.worker.assembly import WorkerParts
from kvrelay.engine.worker.loading import LoadedModel, load_model
from kvrelay.engine.worker.worker import Worker
from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.prefill_worker.worker import build as build_prefill
from kvrelay.text.tokenizer import TokenizerError
from kvrelay.wire.worker_info import WorkerRole
from tests.checkpoints import make_checkpoint
from tests.cluster.listening import listening
from tests.mem_cache.pinning_double import LimitedPinning


def never(parts: WorkerParts[Any, Any]) -> NoReturn:
    raise AssertionError


async def test_missing_tokenizer_is_found_before_the_weights_are_read(tmp_path: Path):
    # There is no config.json either, which reading the weights would find first.
    worker = Worker(WorkerConfig("p0", WorkerRole.PREFILL, tmp_path, "none"), never)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: cannot load the tokenizer: No"):
        await worker.start()


async def test_an_aggregated_worker_has_no_nixl_agent_and_lives(tmp_path: Path):
    path = make_checkpoint(tmp_path / "llama")
    worker = build(
        WorkerConfig("a0", WorkerRole.AGGREGATED, path, "tiny", dtype="float32", kv_memory=1 << 20)
    )
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
    worker = build(
        WorkerConfig("a0", WorkerRole.AGGREGATED, path, "tiny", dtype="float32", kv_memory=1 << 20)
    )
    await worker.start()
    (thread,) = loaded_by
    await asyncio.to_thread(thread.join, 30)
    assert not thread.is_alive()
    await worker.stop()


async def test_the_host_is_pinned_before_nixl_registers_it_and_until_the_worker_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pinning, registered = LimitedPinning(), list[dict[int, int]]()

    class Agent(TransferAgent):
        def __init__(self, *arguments: Any) -> None:
            registered.append(dict(pinning.pinned))
            super().__init__(*arguments)

    monkeypatch.setattr(loading, "make_pinning", lambda _: pinning)
    monkeypatch.setattr(assembly, "TransferAgent", Agent)
    path, host = make_checkpoint(tmp_path / "llama"), 1 << 20
    config = WorkerConfig(
        "p0", WorkerRole.PREFILL, path, "tiny", kv_memory=1 << 20, host_kv_memory=host
    )
    worker = build_prefill(config)
    info = await worker.start()
    url = f"http://{info.metrics_address}/metrics"
    page = (await asyncio.to_thread(urllib.request.urlopen, url)).read().decode()
    (shown,) = (line for line in page.splitlines() if line.startswith("kvrelay_pinned_host_bytes{"))
    assert registered == [pinning.pinned]
    assert float(shown.split()[-1]) == sum(pinning.pinned.values())
    assert host // 2 < sum(pinning.pinned.values()) <= host
    await worker.stop()
    assert not pinning.pinned
