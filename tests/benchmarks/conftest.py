from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from kvrelay.deploy.load_generator.load_client import RequestRecord
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc as rpc

VOCAB_SIZE = 100
MAX_MODEL_LEN = 64


@dataclass
class ScriptedService(rpc.InferenceServiceServicer):
    """Answers every request with the tokens asked for, unless ``faults`` has one for its turn.

    Faults: ``reject``, ``abort`` (finish reason), ``short`` (a token too few),
    ``gap`` (a token index left out), ``cut`` (no completion), ``hang``.
    """

    tokens_per_delta: int = 1
    pause_s: float = 0.0
    faults: dict[int, str] = field(default_factory=dict)
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    authorizations: list[object] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    busy: asyncio.Event = field(default_factory=asyncio.Event)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    address: str = ""

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        self._take_authorization(context)
        return pb.GetModelInfoResponse(
            model="scripted", vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, dtype="none"
        )

    async def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        self._take_authorization(context)
        roles = (pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_DECODE, pb.WORKER_ROLE_DECODE)
        return pb.GetServerInfoResponse(
            version="0", workers=[pb.WorkerStatus(role=role) for role in roles]
        )

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        fault = self.faults.get(len(self.requests), "")
        self.requests.append(request)
        self._take_authorization(context)
        self.running += 1
        self.busy.set()
        self.idle.clear()
        self.most_running = max(self.most_running, self.running)
        try:
            async for response in self._stream(request, context, fault):
                yield response
        finally:
            self.running -= 1
            if not self.running:
                self.idle.set()
                self.busy.clear()

    def _take_authorization(self, context: grpc.aio.ServicerContext) -> None:
        self.authorizations.append(dict(context.invocation_metadata()).get("authorization"))

    async def _stream(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext, fault: str
    ) -> AsyncIterator[pb.GenerateResponse]:
        if fault == "reject":
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy")
        if fault == "hang":
            await asyncio.sleep(60)
        wanted = request.sampling_params.max_tokens - (fault == "short")
        for index in range(0, wanted, self.tokens_per_delta):
            await asyncio.sleep(self.pause_s)
            ids = range(index, min(index + self.tokens_per_delta, wanted))
            shown = index + (fault == "gap")
            yield pb.GenerateResponse(delta=pb.GenerateDelta(index=shown, token_ids=ids))
        if fault != "cut":
            yield _completion(request, fault)


def _completion(request: pb.GenerateRequest, fault: str) -> pb.GenerateResponse:
    reason = pb.FINISH_REASON_ABORT if fault == "abort" else pb.FINISH_REASON_LENGTH
    return pb.GenerateResponse(
        complete=pb.GenerateComplete(
            finish_reason=reason,
            usage=pb.Usage(prompt_tokens=len(request.input_ids.ids), cached_tokens=1),
            timings=pb.PhaseTimings(queue_seconds=0.001, decode_seconds=0.002),
        )
    )


@pytest.fixture
async def service() -> AsyncIterator[ScriptedService]:
    """A scripted service on a port of its own. No stream may be left running at the end."""
    service = ScriptedService()
    server = grpc.aio.server()
    rpc.add_InferenceServiceServicer_to_server(service, server)
    service.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield service
    await server.stop(grace=5)
    assert service.running == 0


@pytest.fixture
def record() -> Callable[..., RequestRecord]:
    """Makes a completed record: sent at 0, first token at ``first``, then one every ``gap``."""

    def make(
        first: float = 0.1, gap: float = 0.01, tokens: int = 11, index: int = 0, **changes: Any
    ) -> RequestRecord:
        times = tuple(first + gap * i for i in range(tokens))
        fields: dict[str, Any] = {
            "index": index,
            "input_len": 5,
            "output_len": tokens,
            "due": None,
            "sent": 0.0,
            "ended": times[-1],
            "token_times": times,
            "token_counts": (1,) * tokens,
        }
        return RequestRecord(**{**fields, **changes})

    return make
