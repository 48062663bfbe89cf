"""What is known of the bytes between two workers: compared, measured, refused.

Whole workers and a router over real gRPC and NIXL, in this process, without Ray.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from kvrelay.decode_worker.worker import build as build_decode
from kvrelay.engine.config import Role, WorkerConfig, WorkerInfo
from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.checksums import VerifyPages
from kvrelay.mem_cache.geometry import PageOrder
from kvrelay.mem_cache.pool import KVPool
from kvrelay.prefill_worker.worker import build as build_prefill
from kvrelay.router.config import RouterConfig
from kvrelay.router.discovery import StaticDiscovery, WorkerEndpoint, WorkerRole
from kvrelay.router.router import Router
from kvrelay.v1 import inference_pb2, inference_pb2_grpc
from tests.cluster.running import _scrape

PROMPT = [(13 * i) % 500 for i in range(61)]


def endpoint(info: WorkerInfo) -> WorkerEndpoint:
    return WorkerEndpoint(
        worker=info.name,
        role=WorkerRole(info.role.value),
        incarnation=info.incarnation,
        address=info.address,
        metrics_address=info.metrics_address,
        pool_tokens=info.pool_tokens,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        architecture=info.architecture,
        eos_token_ids=info.eos_token_ids,
    )


class Pair:
    """A prefill worker, a decode worker and a router."""

    def __init__(self, stub: Any, addresses: list[str]) -> None:
        self.stub = stub
        self._addresses = addresses

    async def generate(self) -> list[int]:
        request = inference_pb2.GenerateRequest()
        request.input_ids.ids.extend(PROMPT)
        sampling = inference_pb2.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        request.sampling_params.CopyFrom(sampling)
        tokens: list[int] = []
        async for response in self.stub.Generate(request):
            tokens += response.delta.token_ids
        return tokens

    def metric(self, name: str, label: str = "") -> float:
        """The sum of its samples, everywhere."""
        lines = [line for one in self._addresses for line in _scrape(one).splitlines()]
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith(f"{name}{{") and label in line
        )

    async def peers(self) -> list[Any]:
        info = await self.stub.GetServerInfo(inference_pb2.GetServerInfoRequest())
        return [peer for worker in info.workers for peer in worker.load.peers]


@asynccontextmanager
async def pair(path: Path, *, strict: bool = False, **options: Any) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        infos = []
        for role, build in ((Role.PREFILL, build_prefill), (Role.DECODE, build_decode)):
            config = WorkerConfig(
                f"{role}-0",
                role,
                path,
                "tiny",
                dtype="float32",
                page_size=4,
                chunk_tokens=16,
                kv_memory=2 << 20,
                audit_pages=True,
                **options,
            )
            worker = build(config)
            infos.append(await worker.start())
            stack.push_async_callback(worker.stop)
        anywhere = "127.0.0.1:0"
        config = RouterConfig("tiny", path, "float32", anywhere, anywhere, strict=strict)
        router = Router(config, StaticDiscovery([endpoint(info) for info in infos]))
        await router.start()
        stack.push_async_callback(router.stop)
        await router.wait_ready()
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(router.grpc_address))
        addresses = [*(info.metrics_address for info in infos), router.metrics_address]
        yield Pair(inference_pb2_grpc.InferenceServiceStub(channel), addresses)


@pytest.fixture
async def expected(tiny: Path) -> list[int]:
    async with pair(tiny) as plain:
        return await plain.generate()


@pytest.fixture
def corrupt(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Reads, by number, that flip a bit of the last page that they bring."""
    victims: list[int] = []
    pools: dict[TransferAgent, KVPool] = {}
    reads: list[None] = []
    make, pull = TransferAgent.__init__, TransferAgent.pull

    def remember(agent: TransferAgent, incarnation: str, own: Any, on_failure: Any) -> None:
        pools[agent] = own[0]
        make(agent, incarnation, own, on_failure)

    def tamper(agent: TransferAgent, *args: Any) -> Any:
        *order, on_end = args
        number = len(reads)
        reads.append(None)

        def ended(read: Any) -> None:
            if number in victims:
                page = pools[agent].layer(1)[int(read.local_pages[0][-1])]
                page.view(torch.uint8)[1, 0, 0, 5] ^= 4
            on_end(read)

        return pull(agent, *order, ended)

    monkeypatch.setattr(TransferAgent, "__init__", remember)
    monkeypatch.setattr(TransferAgent, "pull", tamper)
    return victims


@pytest.mark.parametrize("order", list(PageOrder))
async def test_a_flipped_bit_is_found_and_the_request_computed_again(
    tiny: Path, expected: list[int], corrupt: list[int], order: PageOrder
):
    corrupt += [1, 4]
    async with pair(tiny, page_order=order, verify_pages=VerifyPages.ALL) as cluster:
        assert await cluster.generate() == expected
        assert cluster.metric("kvrelay_page_mismatches_total") == 2
        assert cluster.metric("kvrelay_verified_pages_total") == 3 * 16
        assert cluster.metric("kvrelay_resubmissions_total", 'reason="page_mismatch"') == 2
        assert cluster.metric("kvrelay_resubmissions_total") == 2


async def test_strict_says_so_instead(tiny: Path, corrupt: list[int]):
    corrupt.append(0)
    async with pair(tiny, strict=True, verify_pages=VerifyPages.ALL) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await cluster.generate()
        assert lost.value.code() is grpc.StatusCode.DATA_LOSS
        assert lost.value.details().startswith("page_mismatch: decode-0: 1 pages are not")
        assert cluster.metric("kvrelay_strict_failures_total") == 1


async def test_a_pair_is_attested_and_compares_nothing_by_default(tiny: Path):
    async with pair(tiny) as cluster:
        await cluster.generate()
        (peer,) = await cluster.peers()
        assert (peer.backend, peer.refused) == ("UCX", False)
        assert cluster.metric("kvrelay_transfer_attested_gbps") == pytest.approx(peer.gbps)
        assert cluster.metric("kvrelay_verified_pages_total") == 0


async def test_a_pair_that_is_too_slow_serves_nothing_and_says_why(tiny: Path):
    async with pair(tiny, strict=True, min_transfer_gbps=1e6) as cluster:
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await cluster.generate()
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert refused.value.details().startswith("transfer_refused: decode-0: ")
            assert "1e+06 GB/s are asked for" in refused.value.details()
        assert cluster.metric("kvrelay_transfer_refusals_total") == 1
        assert [peer.refused for peer in await cluster.peers()] == [True]
