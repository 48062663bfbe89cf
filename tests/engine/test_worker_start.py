"""What keeps a worker from starting is said at once, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.engine.config import Role, WorkerConfig
from kvrelay.engine.worker import Worker, WorkerParts
from kvrelay.text.tokenizer import TokenizerError


def never(parts: WorkerParts) -> None:
    raise AssertionError


async def test_missing_tokenizer_is_found_before_the_weights_are_read(tmp_path: Path):
    # There is no config.json either, which reading the weights would find first.
    worker = Worker(WorkerConfig("p0", Role.PREFILL, tmp_path, "none"), never)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: cannot load the tokenizer: No"):
        await worker.start()
