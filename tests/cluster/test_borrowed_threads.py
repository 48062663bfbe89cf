"""A pair on one machine: each has the cores of the other while that one computes nothing."""

from __future__ import annotations

import asyncio
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.engine.executor import borrowed_threads
from kvrelay.engine.worker import machine_cores
from kvrelay.model_runner.layers.linear import PanelLinear
from kvrelay.model_runner.torch_options import parse_dtype
from tests.checkpoints import VOCAB_SIZE
from tests.cluster.in_process import in_process
from tests.cluster.running import Cluster

LENGTH = 200


def prompt(seed: int, length: int = LENGTH) -> list[int]:
    return [random.Random(seed).randrange(3, VOCAB_SIZE) for _ in range(length)]


async def widened(cluster: Cluster, worker: str) -> float:
    return await cluster.metric("kvrelay_widened_prompt_tokens_total", worker=worker)


@pytest.mark.slow  # `tests/engine/test_borrowed_threads.py` says who may
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
async def test_a_lone_prompt_has_both_cores_and_none_beside_a_request_that_generates(
    dtype: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_cores, "directory_of_user", lambda: tmp_path / "cores")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(borrowed_threads, "_LATE_LAYERS", math.inf)  # whatever else runs here
    options: dict[str, Any] = {"dtype": dtype, "prompt_threads": 2, "kv_memory": 8 << 20}
    async with in_process(tiny, **options) as cluster:
        shares = PanelLinear.supports(torch.empty(16, 16, dtype=parse_dtype(dtype)))
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


@pytest.mark.slow  # `tests/model_runner/test_kernel_threads.py` has threads without a cluster
async def test_many_requests_generate_the_same_with_both_cores(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_cores, "directory_of_user", lambda: tmp_path / "cores")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(borrowed_threads, "_LATE_LAYERS", math.inf)
    prompts = [prompt(seed, 8) for seed in range(borrowed_threads.FEWEST_ROWS + 4)]
    found = []
    for most in (2, 1):
        options: dict[str, Any] = {"prompt_threads": most, "batch_invariant": True}
        async with in_process(tiny, dtype="bfloat16", kv_memory=8 << 20, **options) as cluster:
            asked = [
                cluster.generate(one, temperature=0, max_tokens=64, ignore_eos=True)
                for one in prompts
            ]
            found.append([list(done.tokens) for done in await asyncio.gather(*asked)])
            rows = await cluster.metric("kvrelay_widened_rows_total", worker="decode-0")
            shares = most > 1 and PanelLinear.supports(torch.empty(16, 16, dtype=torch.bfloat16))
            assert (rows > 0) == shares
            await cluster.assert_at_baseline()
    assert found[0] == found[1]
