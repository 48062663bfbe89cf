"""A real router in front of scripted workers, and what its client sees."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import grpc
import pytest

from kvrelay.router.discovery import StaticDiscovery
from kvrelay.router.router import Router
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc

from .scripted_worker import ScriptedWorker, count_decode, count_prefill


@dataclasses.dataclass
class Cluster:
    """A router in front of scripted workers, and a client of it."""

    router: Router
    discovery: StaticDiscovery
    prefill: ScriptedWorker
    decode: ScriptedWorker
    channel: grpc.aio.Channel
    stub: inference_pb2_grpc.InferenceServiceStub

    def count(self) -> None:
        """From now on the workers answer by themselves, by counting."""
        self.prefill.on_submit = count_prefill
        self.decode.on_submit = count_decode

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

    async def metric(self, line: str) -> float:
        """The value of the metrics line that begins with `line`; 0 if there is none."""
        host, port = self.router.metrics_address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
        values = [row.rsplit(" ", 1)[1] for row in text.splitlines() if row.startswith(line)]
        return float(values[0]) if values else 0.0


@dataclasses.dataclass
class Streamed:
    """What a client got."""

    token_ids: list[int]
    text: str
    complete: pb.GenerateComplete | None
    deltas: list[pb.GenerateDelta]


async def collect(call: Any) -> Streamed:
    """Reads a Generate stream to its end."""
    streamed = Streamed([], "", None, [])
    async with asyncio.timeout(5):
        async for response in call:
            if response.HasField("complete"):
                assert streamed.complete is None
                streamed.complete = response.complete
                continue
            assert streamed.complete is None
            assert response.delta.index == len(streamed.token_ids)
            streamed.deltas.append(response.delta)
            streamed.token_ids += response.delta.token_ids
            streamed.text += response.delta.text
    return streamed


async def status_of(call: Any) -> grpc.aio.AioRpcError:
    """The error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return caught.value
