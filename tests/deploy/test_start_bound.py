from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.deploy.controller.supervision.supervisor import SLOWEST_BYTES_PER_SECOND, start_seconds
from kvrelay.engine.config import WorkerConfig
from kvrelay.wire.worker_info import WorkerRole


def test_a_worker_may_take_longer_the_more_weights_it_reads(tmp_path: Path):
    model, draft = tmp_path / "model", tmp_path / "draft"
    for folder, sizes in ((model, (3_000_000, 1_000_000)), (draft, (500_000,))):
        folder.mkdir()
        for number, size in enumerate(sizes):
            (folder / f"{number}.safetensors").write_bytes(bytes(size))
        (folder / "tokenizer.json").write_bytes(bytes(1000))
    config = WorkerConfig("d", WorkerRole.DECODE, model, "m", start_timeout=20)
    assert start_seconds(config) == pytest.approx(20 + 4_000_000 / SLOWEST_BYTES_PER_SECOND)
    config = WorkerConfig(
        "d", WorkerRole.DECODE, model, "m", draft_model_path=draft, start_timeout=20
    )
    assert start_seconds(config) == pytest.approx(20 + 4_500_000 / SLOWEST_BYTES_PER_SECOND)
