"""What is known of the bytes between two workers: compared, measured, refused."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvrelay.decode_worker.request import DecodeRequest
from kvrelay.decode_worker.scheduler import DecodeMessage
from kvrelay.decode_worker.worker import DecodePlugin
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.faults import parse_faults
from kvrelay.engine.worker.assembly import WorkerParts
from kvrelay.engine.worker.worker import Worker
from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.verify_pages import VerifyPages
from kvrelay.mem_cache.geometry import PageOrder
from kvrelay.wire.worker_info import WorkerRole
from tests.cluster.in_process import InProcess, in_process

PROMPT = [(13 * i) % 500 for i in range(61)]
SMALL: dict[str, Any] = {"page_size": 4, "chunk_tokens": 16, "kv_memory": 2 << 20}


async def say(cluster: InProcess) -> list[int]:
    answer = await cluster.generate(PROMPT, temperature=0, max_tokens=8, ignore_eos=True)
    return answer.tokens


async def peers(cluster: InProcess) -> list[Any]:
    """What the router knows of the workers' peers, once it knows one."""
    async with asyncio.timeout(60):
        while True:
            if met := [peer for worker in await cluster.status() for peer in worker.load.peers]:
                return met
            await asyncio.sleep(0.02)


async def test_a_worker_whose_transfer_thread_hangs_gives_no_sign_of_life(tiny: Path):
    config = WorkerConfig(
        "decode-0", WorkerRole.DECODE, tiny, "tiny", dtype="float32", kv_memory=1 << 20
    )
    agents: list[TransferAgent] = []

    def plug_in(parts: WorkerParts[DecodeRequest, DecodeMessage]) -> DecodePlugin:
        agents.append(parts.agent)
        return DecodePlugin(parts)

    worker, goes_on = Worker(config, plug_in), threading.Event()
    await worker.start()
    await asyncio.wait_for(worker.heartbeat(), 30)
    agents[0].report_alive(goes_on.wait)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(worker.heartbeat(), 0.5)
    goes_on.set()
    await asyncio.wait_for(worker.heartbeat(), 30)
    await worker.stop()


@pytest.fixture
async def expected(tiny: Path) -> list[int]:
    async with in_process(tiny, **SMALL) as plain:
        return await say(plain)


@pytest.mark.parametrize("order", list(PageOrder))
async def test_a_flipped_bit_is_found_and_the_request_computed_again(
    tiny: Path, expected: list[int], order: PageOrder
):
    """The second read is of the first attempt, the fifth of the second."""
    faults = parse_faults("corrupt:pull:2,corrupt:pull:5")
    options: dict[str, Any] = {
        "page_order": order,
        "verify_pages": VerifyPages.ALL,
        "faults": faults,
    }
    async with in_process(tiny, **SMALL, **options) as cluster:
        assert await say(cluster) == expected
        assert await cluster.metric("kvrelay_page_mismatches_total") == 2
        assert await cluster.metric("kvrelay_verified_pages_total") == 3 * 16
        assert await cluster.metric("kvrelay_resubmissions_total", reason="page_mismatch") == 2
        assert await cluster.metric("kvrelay_resubmissions_total") == 2


async def test_strict_says_so_instead(tiny: Path):
    options: dict[str, Any] = {
        "verify_pages": VerifyPages.ALL,
        "faults": parse_faults("corrupt:pull"),
    }
    async with in_process(tiny, strict=True, **SMALL, **options) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await say(cluster)
        assert lost.value.code() is grpc.StatusCode.DATA_LOSS
        assert lost.value.details().startswith("page_mismatch: decode-0: 1 pages are not")
        assert await cluster.metric("kvrelay_strict_failures_total") == 1


async def test_a_pair_is_probed_and_compares_nothing_by_default(tiny: Path):
    async with in_process(tiny, **SMALL) as cluster:
        await say(cluster)
        (peer,) = await peers(cluster)
        assert (peer.backend, peer.refusal) == ("UCX", "")
        for direction, found in (
            ("read", peer.read_bytes_per_second),
            ("write", peer.write_bytes_per_second),
        ):
            told = await cluster.metric("kvrelay_transfer_bytes_per_second", direction=direction)
            assert told == pytest.approx(found)
            assert found > 0
        assert await cluster.metric("kvrelay_verified_pages_total") == 0


async def test_a_pair_that_is_too_slow_serves_nothing_and_says_why(tiny: Path):
    async with in_process(
        tiny, **SMALL, strict=True, min_transfer_gigabytes_per_second=1e6
    ) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as met:
            await say(cluster)
        assert met.value.code() is grpc.StatusCode.UNAVAILABLE
        assert met.value.details().startswith("transfer_refused: decode-0: ")
        assert "asks for 1e+06" in met.value.details()
        with pytest.raises(grpc.aio.AioRpcError) as later:
            await say(cluster)
        assert later.value.code() is grpc.StatusCode.UNAVAILABLE
        assert later.value.details().startswith("no decode worker")
        assert "asks for 1e+06" in later.value.details()
        assert await cluster.metric("kvrelay_transfer_refusals_total") == 1
        assert ["asks for 1e+06" in peer.refusal for peer in await peers(cluster)] == [True]
