"""A checkpoint that is replaced in place, under a cluster that serves it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from kvrelay.model_runner import runner
from kvrelay.router.errors import StartError
from kvrelay.v1 import inference_pb2
from tests.checkpoints import make_checkpoint
from tests.cluster.commands import kvrelay
from tests.cluster.in_process import in_process
from tests.cluster.running import RunningCluster, running

PROMPT = [(13 * i) % 500 for i in range(61)]
RESTART_S = 60
WEIGHTS = "model.safetensors"
OPTIONS: dict[str, Any] = {"dtype": "float32", "page_size": 4, "kv_memory": 2 << 20}

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture
def checkpoint(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, to be replaced."""
    return shutil.copytree(tiny, tmp_path / "served")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture and tokenizer, and other weights."""
    return make_checkpoint(tmp_path_factory.mktemp("trained") / "llama", seed=7)


def replace_in_place(checkpoint: Path, other: Path) -> None:
    """Write into the very file that was loaded, as `cp` does."""
    with (checkpoint / WEIGHTS).open("r+b") as file:
        file.write((other / WEIGHTS).read_bytes())


async def say(cluster: RunningCluster) -> list[int]:
    answer = await cluster.generate(PROMPT, temperature=0, max_tokens=12, ignore_eos=True)
    return answer.tokens


async def restart(cluster: RunningCluster, worker: str) -> Any:
    """Kill a worker; the status of its successor, once that is attached."""
    before = cluster.deployment.cluster.workers[worker]
    os.kill(before.pid, signal.SIGKILL)
    async with asyncio.timeout(RESTART_S):
        while True:
            for one in await cluster.status():
                if one.worker == worker and one.ready and one.incarnation != before.incarnation:
                    return one
            await asyncio.sleep(0.05)


async def served(cluster: RunningCluster) -> str:
    info = await cluster.stub.GetServerInfo(inference_pb2.GetServerInfoRequest())
    return str(info.model_digest)


@pytest.mark.slow  # `tests/router/test_served_model.py` has workers with other digests
async def test_a_worker_that_restarts_with_other_weights_gets_no_requests(
    ray: None,
    checkpoint: Path,
    trained: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(checkpoint, prefill=1, decode=2, **OPTIONS) as cluster:
        expected = await say(cluster)
        before = await served(cluster)
        replace_in_place(checkpoint, trained)
        assert await say(cluster) == expected, "what is loaded stays what it was"

        odd = await restart(cluster, "decode-0")
        assert odd.model_digest != before == await served(cluster)
        assert odd.refusal.startswith(
            f"{odd.incarnation} has loaded model {odd.model_digest}, not {before}, which is "
            "served: weights ("
        )
        assert f"{odd.refusal}. It gets no requests" in caplog.text
        answers = await asyncio.gather(*(say(cluster) for _ in range(8)))
        assert all(tokens == expected for tokens in answers)
        for worker in await cluster.status():
            if worker.worker == "decode-0":
                assert not worker.load.peers, "it has met no prefill worker"
        await shows_both(cluster, odd)
        await cluster.assert_at_baseline()


async def shows_both(cluster: RunningCluster, odd: Any) -> None:
    """`kvrelay status` names the served model and the refused one."""
    address = cluster.deployment.router.grpc_address
    text = (await kvrelay("status", "--server", address)).stdout
    digest = await served(cluster)
    assert text.startswith(f"served (digest {digest}), kvrelay ")
    assert f"\nREFUSED decode-0: {odd.refusal}\n" in text
    report = json.loads((await kvrelay("status", "--json", "--server", address)).stdout)
    assert report["model_digest"] == digest
    shown = {one["worker"]: (one["model_digest"], one["refusal"]) for one in report["workers"]}
    assert shown == {
        "prefill-0": (digest, ""),
        "decode-0": (odd.model_digest, odd.refusal),
        "decode-1": (digest, ""),
    }


@pytest.mark.slow
async def test_a_checkpoint_is_replaced_worker_by_worker(
    ray: None, checkpoint: Path, trained: Path
) -> None:
    async with running(trained, prefill=1, decode=1, **OPTIONS) as other:
        wanted, digest = await say(other), await served(other)
    async with running(checkpoint, prefill=1, decode=2, **OPTIONS) as cluster:
        expected = await say(cluster)
        replace_in_place(checkpoint, trained)
        assert (await restart(cluster, "decode-0")).refusal
        assert await say(cluster) == expected
        assert (await restart(cluster, "prefill-0")).refusal, "decode-1 still has the old one"
        assert not (await restart(cluster, "decode-1")).refusal
        assert await served(cluster) == digest
        assert [worker.refusal for worker in await cluster.status()] == [""] * 3
        answers = await asyncio.gather(*(say(cluster) for _ in range(8)))
        assert all(tokens == wanted for tokens in answers)
        assert wanted != expected
        await cluster.assert_at_baseline()


async def test_workers_whose_processors_compute_float32_otherwise_do_not_start_together(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = iter(["AVX512", "AVX2"])
    monkeypatch.setattr(runner, "describe_arithmetic", lambda: next(ways))
    why = r"^decode-0-\w+ has loaded model .*: arithmetic \(AVX2, not AVX512\)"
    with pytest.raises(StartError, match=why):
        async with in_process(tiny, kv_memory=1 << 20):
            pass
