"""A pair on one machine: a prompt has the cores of a decode worker that generates nothing."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.engine.executor import prompt_threads
from kvrelay.engine.worker import machine_cores
from kvrelay.model_runner.layers.linear import PanelLinear
from kvrelay.model_runner.torch_options import parse_dtype
from tests.checkpoints import VOCAB_SIZE
from tests.cluster.in_process import in_process
from tests.cluster.running import Cluster

LENGTH = 200


def prompt(seed: int) -> list[int]:
    return [random.Random(seed).randrange(3, VOCAB_SIZE) for _ in range(LENGTH)]


async def widened(cluster: Cluster, worker: str) -> float:
    return await cluster.metric("kvrelay_widened_prompt_tokens_total", worker=worker)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_a_lone_prompt_has_both_cores_and_none_beside_a_request_that_generates(
    dtype: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_cores, "directory_of_user", lambda: tmp_path / "cores")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(prompt_threads, "_LATE_LAYERS", math.inf)  # whatever else runs here
    options: dict[str, Any] = {"dtype": dtype, "prompt_threads": 2, "kv_memory": 8 << 20}
    async with in_process(tiny, **options) as cluster:
        shares = PanelLinear.runs(torch.device("cpu"), parse_dtype(dtype))
        shared = LENGTH if shares else 0
        alone = await cluster.generate(prompt(1), temperature=0, max_tokens=2)
        assert await widened(cluster, "prefill-0") == shared
        stream = cluster.stream(prompt(2), temperature=0, max_tokens=3000, ignore_eos=True)
        async for response in stream:
            if response.delta.index >= 5:
                break
        assert await widened(cluster, "prefill-0") == 2 * shared
        await cluster.generate(prompt(3), temperature=0, max_tokens=2)
        assert await widened(cluster, "prefill-0") == 2 * shared
        async for response in stream:
            assert not response.HasField("complete"), "it did not generate all the time"
            break
        stream.cancel()
        await cluster.assert_at_baseline()
        again = await cluster.generate(prompt(4), temperature=0, max_tokens=2)
        assert await widened(cluster, "prefill-0") == 3 * shared
        assert len(again.tokens) == len(alone.tokens) == 2
        assert await widened(cluster, "decode-0") == 0
    assert not list((tmp_path / "cores").iterdir())
