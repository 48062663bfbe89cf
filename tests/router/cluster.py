"""A real router in front of scripted workers, and what its client sees."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import Tokenizer

from kvrelay.router.config import PlacementMode, RouterConfig
from kvrelay.router.discovery import StaticDiscovery
from kvrelay.router.router import Router
from kvrelay.text.tokenizer import load_tokenizer
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc, worker_pb2
from kvrelay.wire.worker_info import WorkerRole

from .scripted_worker import (
    SECONDS,
    ScriptedWorker,
    count_aggregated,
    count_decode,
    count_prefill,
    until,
)

_COUNTING = {
    WorkerRole.PREFILL: count_prefill,
    WorkerRole.DECODE: count_decode,
    WorkerRole.AGGREGATED: count_aggregated,
}


_NOWHERE: Mapping[str, str] = {}


@dataclasses.dataclass
class Cluster:
    """A router in front of scripted workers, and a client of it."""

    router: Router
    discovery: StaticDiscovery
    workers: list[ScriptedWorker]
    channel: grpc.aio.Channel
    stub: inference_pb2_grpc.InferenceServiceStub

    @property
    def prefill(self) -> ScriptedWorker:
        """The first one."""
        return next(w for w in self.workers if w.role is WorkerRole.PREFILL)

    @property
    def decode(self) -> ScriptedWorker:
        """The first one."""
        return next(w for w in self.workers if w.role is WorkerRole.DECODE)

    def count(self) -> None:
        """From now on the workers answer by themselves, by counting."""
        for worker in self.workers:
            worker.on_submit = _COUNTING[worker.role]

    def list_workers(self) -> None:
        """Discovery has the workers as they are now."""
        self.discovery.replace([worker.endpoint for worker in self.workers])

    def generate(self, *, request_id: str = "", **fields: Any) -> Any:
        """Starts a request; prompt [1, 2, 3] and 8 tokens unless told otherwise."""
        params = pb.SamplingParams(**{"max_tokens": 8, **fields})
        return self.stub.Generate(
            pb.GenerateRequest(
                request_id=request_id,
                input_ids=pb.TokenIds(ids=[1, 2, 3]),
                sampling_params=params,
            )
        )

    async def report(self, worker: ScriptedWorker, said: pb.WorkerLoad) -> None:
        """The worker says its load, and the router has heard."""
        worker.send(worker_pb2.AttachResponse(load=said))
        await self.until_heard(worker, lambda load: load == said)

    async def until_heard(
        self, worker: ScriptedWorker, condition: Callable[[pb.WorkerLoad], bool]
    ) -> None:
        """Returns once what the router has heard of the worker's load is so."""
        async with asyncio.timeout(SECONDS):
            while True:
                loads = await self.stub.GetLoads(pb.GetLoadsRequest())
                [heard] = [one.load for one in loads.workers if one.worker == worker.name]
                if condition(heard):
                    return
                await asyncio.sleep(0.005)

    async def until_lost(self, name: str) -> None:
        """Returns once the router has seen that this worker is gone."""
        async with asyncio.timeout(SECONDS):
            while True:
                loads = await self.stub.GetLoads(pb.GetLoadsRequest())
                if not any(worker.ready for worker in loads.workers if worker.worker == name):
                    return

    async def until_status(self, wanted: Any) -> None:
        """Returns once every service is as healthy as that."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        async with asyncio.timeout(SECONDS):
            for service in ("", "kvrelay.v1.InferenceService"):
                while True:
                    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
                    if answer.status == wanted:
                        break
                    await asyncio.sleep(0.01)

    async def until_waiting(self, number: int) -> None:
        """Returns once so many requests wait for workers."""
        async with asyncio.timeout(SECONDS):
            while await self.metric("kvrelay_requests_waiting_for_workers{") != number:
                await asyncio.sleep(0.01)

    async def server_info(self) -> pb.GetServerInfoResponse:
        info: pb.GetServerInfoResponse = await self.stub.GetServerInfo(pb.GetServerInfoRequest())
        return info

    async def metric(self, line: str) -> float:
        """The sum of the values of the metrics lines that begin with `line`."""
        host, port = self.router.metrics_address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
            text = (await reader.read()).decode()
        finally:
            writer.close()
        await writer.wait_closed()
        return sum(float(row.rsplit(" ", 1)[1]) for row in text.split("\n") if row.startswith(line))

    async def resubmitted(self, reason: str = "") -> float:
        """Attempts after a request's first, of whatever reason if none is given."""
        ending = f'{reason}"' if reason else ""
        return await self.metric(f'kvrelay_resubmissions_total{{model="counter",reason="{ending}')


@asynccontextmanager
async def running(
    config: RouterConfig, *names: str, localities: Mapping[str, str] = _NOWHERE
) -> AsyncIterator[Cluster]:
    """A router that is attached to scripted workers, called by role and number.

    Args:
        config: the router's.
        names: of the workers.
        localities: of workers that say where they are, by name.
    """
    async with AsyncExitStack() as stack:
        workers = [ScriptedWorker(name, WorkerRole(name.rpartition("-")[0])) for name in names]
        tokenizer = load_tokenizer(config.model_path).sha256
        for worker in workers:
            worker.model = dataclasses.replace(worker.model, tokenizer=tokenizer)
            worker.locality = localities.get(worker.name, "")
            worker.computes_prompts = config.placement is PlacementMode.ADAPTIVE
            await worker.start()
            stack.push_async_callback(worker.stop)
        discovery = StaticDiscovery([worker.endpoint for worker in workers])
        router = Router(config, discovery)
        await router.start()
        stack.push_async_callback(router.stop)
        await asyncio.wait_for(router.wait_ready(), SECONDS)
        options = [("grpc.use_local_subchannel_pool", 1)]
        channel = await stack.enter_async_context(
            grpc.aio.insecure_channel(router.grpc_address, options=options)
        )
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        cluster = Cluster(router, discovery, workers, channel, stub)
        await until(lambda: all(worker.hellos for worker in workers))
        await until(lambda: all(link.ready for link in router._fleet.links))
        yield cluster
        assert not [fault for worker in workers for fault in worker.faults]


@dataclasses.dataclass
class Streamed:
    """What a client got."""

    complete: pb.GenerateComplete | None = None
    deltas: list[pb.GenerateDelta] = dataclasses.field(default_factory=list)

    def token_ids_of(self, choice: int) -> list[int]:
        return [token for d in self.deltas if d.choice == choice for token in d.token_ids]

    @property
    def token_ids(self) -> list[int]:
        """Of the first choice."""
        return self.token_ids_of(0)

    @property
    def text(self) -> str:
        """Of the first choice."""
        return "".join(delta.text for delta in self.deltas if delta.choice == 0)


async def collect(call: Any) -> Streamed:
    """Reads a Generate stream to its end: in each choice no token twice, and none left out."""
    streamed = Streamed()
    async with asyncio.timeout(SECONDS):
        async for response in call:
            assert streamed.complete is None
            if response.HasField("complete"):
                streamed.complete = response.complete
                continue
            delta = response.delta
            assert delta.index == len(streamed.token_ids_of(delta.choice))
            streamed.deltas.append(delta)
    return streamed


async def read(call: Any, number: int | None = None) -> list[tuple[int, int]]:
    """So many tokens, or all that are to come, each with its choice."""
    tokens: list[tuple[int, int]] = []
    async with asyncio.timeout(SECONDS):
        while number is None or len(tokens) < number:
            response = await call.read()
            if response is grpc.aio.EOF:
                break
            delta = response.delta
            tokens += [(delta.choice, token_id) for token_id in delta.token_ids]
    return tokens


async def status_of(call: Any) -> grpc.aio.AioRpcError:
    """The error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return caught.value


class HeldEncoding:
    """Texts are tokenized, each to the same tokens, only once the test lets go of them."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.let_go = threading.Event()

    def encode(
        self, tokenizer: Tokenizer, text: str, most_tokens: int, *, add_special_tokens: bool = True
    ) -> Sequence[int]:
        self.texts.append(text)
        assert self.let_go.wait(60)
        return [1, 2, 3]
