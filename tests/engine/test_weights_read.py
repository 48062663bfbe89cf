"""A worker that loads says how much of its weights it has read."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.worker.loading import load_model
from kvrelay.engine.worker.weights_read import WeightsRead, weight_bytes
from kvrelay.wire.worker_info import WorkerRole
from tests.checkpoints import make_checkpoint


def test_all_weights_are_counted_as_they_are_read(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "llama")
    config = WorkerConfig("d", WorkerRole.DECODE, path, "tiny", kv_memory=1 << 20)
    read, shares = WeightsRead(weight_bytes(config)), []

    def on_read(nbytes: int) -> None:
        read.add(nbytes)
        shares.append(read.share)

    assert read.share == 0
    load_model(config, on_read=on_read)
    assert len(shares) > 10
    assert shares == sorted(set(shares)), "each read counts"
    assert read.share == pytest.approx(1, abs=0.1), "but for the files' headers"


def test_no_weights_are_no_progress() -> None:
    assert WeightsRead(0).share == 0
