"""A running cluster as tests see it: through its public service and its metrics."""

from __future__ import annotations

import asyncio
import io
import logging
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from kvrelay.deploy.deployment import Deployment, deployed
from kvrelay.deploy.nodes.models import ModelFolder
from kvrelay.deploy.options.listen_address import Address
from kvrelay.deploy.options.serve_options import ServeOptions
from kvrelay.deploy.start_progress import StartProgress
from kvrelay.engine.worker.load_reports import INTERVAL_SECONDS
from kvrelay.router.config import PlacementMode
from kvrelay.v1 import inference_pb2, inference_pb2_grpc

ANY_PORT = Address("127.0.0.1", 0)
REST_S = 60
"""For memory to come back once its requests are gone; it is awaited, not slept."""


@dataclass
class Answer:
    """What one request's stream said."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    complete: Any = None


@dataclass
class Cluster(ABC):
    """Workers and a router, through a client of theirs."""

    stub: inference_pb2_grpc.InferenceServiceStub

    @property
    @abstractmethod
    def metrics_addresses(self) -> list[str]:
        """Of the workers and the router."""

    async def generate(
        self, prompt: str | Iterable[int], *, request_id: str = "", **sampling: Any
    ) -> Answer:
        """One request from its start to its end."""
        answer = Answer()
        async for response in self.stream(prompt, request_id=request_id, **sampling):
            if response.HasField("complete"):
                answer.complete = response.complete
                continue
            assert response.delta.index == len(answer.tokens) or not response.delta.token_ids
            answer.tokens += response.delta.token_ids
            answer.text += response.delta.text
            answer.logprobs += response.delta.logprobs
        return answer

    def stream(self, prompt: str | Iterable[int], *, request_id: str = "", **sampling: Any) -> Any:
        """One request's call."""
        request = inference_pb2.GenerateRequest(request_id=request_id)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.input_ids.ids.extend(prompt)
        request.sampling_params.CopyFrom(inference_pb2.SamplingParams(**sampling))
        return self.stub.Generate(request)

    async def status(self) -> list[Any]:
        """Every worker's status."""
        return list((await self.stub.GetServerInfo(inference_pb2.GetServerInfoRequest())).workers)

    async def assert_at_baseline(self) -> None:
        """Every page and row of every worker comes back, and the sums hold."""
        await asyncio.sleep(2 * INTERVAL_SECONDS)  # until the router knows the loads as they are
        async with asyncio.timeout(REST_S):
            while not all(_at_rest(worker) for worker in await self.status()):
                await asyncio.sleep(0.02)

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples over the router and all workers."""
        return sum(
            sample.value
            for family in await self._families()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def metric_names(self) -> set[str]:
        """Of the counters (with `_total`), gauges and histograms of the router and all workers."""
        return {
            f"{family.name}_total" if family.type == "counter" else family.name
            for family in await self._families()
        }

    async def _families(self) -> list[Metric]:
        scrapes = (asyncio.to_thread(_scrape, address) for address in self.metrics_addresses)
        pages = await asyncio.gather(*scrapes)
        return [family for page in pages for family in text_string_to_metric_families(page)]


@dataclass
class RunningCluster(Cluster):
    """One that `kvrelay serve` would have."""

    deployment: Deployment

    @property
    def metrics_addresses(self) -> list[str]:
        workers = self.deployment.cluster.workers.values()
        router = self.deployment.router.metrics_address
        return [*(worker.metrics_address for worker in workers), router]


def _at_rest(worker: Any) -> bool:
    load = worker.load
    idle = load.waiting_requests == load.running_requests == 0
    return idle and all(
        pool.free + pool.cached_evictable == pool.total and not pool.promised for pool in load.pools
    )


def _scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics") as response:
        text: str = response.read().decode()
        return text


@asynccontextmanager
async def running(
    path: Path,
    credentials: grpc.ChannelCredentials | None = None,
    *,
    log_level: int = logging.WARNING,
    **options: Any,
) -> AsyncIterator[RunningCluster]:
    """Run a cluster of `path`'s model on free ports, with every page audited at every step.

    Args:
        path: of the checkpoint.
        credentials: of the client; None: plain text.
        log_level: of the workers.
        options: of `kvrelay serve`.
    """
    serve = ServeOptions(
        model=str(path),
        grpc=ANY_PORT,
        http=ANY_PORT,
        admin=ANY_PORT,
        metrics=ANY_PORT,
        audit_pages=True,
        # So that short prompts are handed over, too.
        **{"placement": PlacementMode.DISAGGREGATED, **options},
    )
    draft = options.get("draft_model")
    model = ModelFolder(path.name, path, draft_path=Path(draft) if draft else None)
    async with (
        deployed(serve, model, StartProgress(io.StringIO()), log_level=log_level) as deployment,
        _channel(deployment.router.grpc_address, credentials) as channel,
    ):
        yield RunningCluster(inference_pb2_grpc.InferenceServiceStub(channel), deployment)


def _channel(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    if credentials is None:
        return grpc.aio.insecure_channel(address)
    return grpc.aio.secure_channel(address, credentials)
