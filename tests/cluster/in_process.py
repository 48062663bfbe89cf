"""Whole workers and a router in the test's own process, over real gRPC and NIXL, without Ray."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import grpc

from kvrelay.aggregated_worker.worker import build as build_aggregated
from kvrelay.decode_worker.worker import build as build_decode
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.worker.worker import Worker
from kvrelay.prefill_worker.worker import build as build_prefill
from kvrelay.router.config import PlacementMode, RouterConfig, RouterOptions
from kvrelay.router.discovery import StaticDiscovery
from kvrelay.router.router import Router
from kvrelay.v1 import inference_pb2_grpc
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole
from tests.cluster.running import Cluster

_BUILD = {
    WorkerRole.PREFILL: build_prefill,
    WorkerRole.DECODE: build_decode,
    WorkerRole.AGGREGATED: build_aggregated,
}
ANYWHERE = "127.0.0.1:0"
_WORKERS = {one.name for one in fields(WorkerConfig)}
_ROUTERS = {one.name for one in fields(RouterOptions)} - _WORKERS
"""Options."""


@dataclass
class InProcess(Cluster):
    """Workers that nobody supervises."""

    workers: list[WorkerInfo]
    hosted: list[Worker]
    """The same workers, themselves."""
    router: Router
    discovery: StaticDiscovery

    @property
    def metrics_addresses(self) -> list[str]:
        workers = [worker.metrics_address for worker in self.workers]
        return [*workers, self.router.metrics_address]


@asynccontextmanager
async def in_process(
    path: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    aggregated: int = 0,
    **options: Any,
) -> AsyncIterator[InProcess]:
    """Run a checkpoint, in float32 unless told, with every page audited at every step.

    Args:
        path: of the checkpoint.
        prefill: workers.
        decode: workers.
        aggregated: workers; then there are no others.
        options: of every worker, or of the router.
    """
    # So that short prompts are handed over, too.
    of_router: dict[str, Any] = {"placement": PlacementMode.DISAGGREGATED}
    of_router |= {name: options.pop(name) for name in _ROUTERS & options.keys()}
    options = {"dtype": "float32", **options}
    counts = {WorkerRole.PREFILL: prefill, WorkerRole.DECODE: decode}
    if aggregated:
        counts = {WorkerRole.AGGREGATED: aggregated}
    async with AsyncExitStack() as stack:
        infos, hosted = [], []
        for role, number in [(role, one) for role, count in counts.items() for one in range(count)]:
            config = WorkerConfig(
                f"{role}-{number}", role, path, "tiny", audit_pages=True, **options
            )
            worker = _BUILD[role](config)
            infos.append(await worker.start())
            stack.push_async_callback(worker.stop)
            hosted.append(worker)
        router_config = RouterConfig(
            "tiny",
            path,
            options["dtype"],
            ANYWHERE,
            ANYWHERE,
            http_address=ANYWHERE,
            worker_tls=options.get("tls"),
            **of_router,
        )
        discovery = StaticDiscovery(infos)
        router = Router(router_config, discovery)
        await router.start()
        stack.push_async_callback(router.stop)
        await router.wait_ready()
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(router.grpc_address))
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        yield InProcess(stub, infos, hosted, router, discovery)
