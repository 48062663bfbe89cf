"""A worker that cannot start reports why at once, in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.worker.assembly import WorkerParts
from kvrelay.engine.worker.worker import Worker
from kvrelay.text.tokenizer import TokenizerError
from kvrelay.wire.worker_info import WorkerRole


def never(parts: WorkerParts[Any, Any]) -> NoReturn:
    raise AssertionError


async def test_missing_tokenizer_is_found_before_the_weights_are_read(tmp_path: Path):
    # There is no config.json either, which reading the weights would find first.
    worker = Worker(WorkerConfig("p0", WorkerRole.PREFILL, tmp_path, "none"), never)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: cannot load the tokenizer: No"):
        await worker.start()
