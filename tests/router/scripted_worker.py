"""Workers whose every word is scripted.

Doubles of the *worker* only: gRPC, its servers and its channels are real.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from kvrelay.router.discovery import WorkerEndpoint, WorkerRole
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import worker_pb2, worker_pb2_grpc

END = worker_pb2.RequestEnd


def load(*, waiting_tokens: int = 0, free: int = 64) -> pb.WorkerLoad:
    kv = pb.PoolState(pool="full", page_size=16, total=64, free=free, held=64 - free)
    return pb.WorkerLoad(waiting_tokens=waiting_tokens, pools=[kv])


class ScriptedWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Says what a test tells it to, and remembers what it was told.

    A cancelled attempt is ended at once, as a worker does. `on_submit` may
    answer submissions; without it the test sends every output itself.
    """

    def __init__(self, name: str, role: WorkerRole) -> None:
        self.name = name
        self.role = role
        self.incarnation = f"{name}-1"
        self.submits: list[worker_pb2.SubmitRequest] = []
        self.cancels: list[worker_pb2.CancelRequest] = []
        self.hellos: list[worker_pb2.AttachHello] = []
        self.on_submit: Callable[[ScriptedWorker, worker_pb2.SubmitRequest], Awaitable[None]] | None
        self.on_submit = None
        self._outgoing: asyncio.Queue[worker_pb2.AttachResponse | None] = asyncio.Queue()
        self._answers: set[asyncio.Task[None]] = set()
        self._ended: set[tuple[str, int]] = set()
        self._port = 0
        self._server: grpc.aio.Server | None = None

    @property
    def endpoint(self) -> WorkerEndpoint:
        return WorkerEndpoint(
            worker=self.name,
            role=self.role,
            incarnation=self.incarnation,
            address=f"127.0.0.1:{self._port}",
            metrics_address="127.0.0.1:0",
            pool_tokens=1024,
            max_model_len=512,
            vocab_size=402,
            architecture="Counting",
            eos_token_ids=(400,),
        )

    async def start(self) -> None:
        self._server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port(f"127.0.0.1:{self._port}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            for answer in self._answers:
                answer.cancel()
            await self._server.stop(None)
            self._server = None

    async def Attach(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        first = await anext(aiter(requests))
        self.hellos.append(first.hello)
        if first.hello.incarnation != self.incarnation:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another incarnation")
        self._outgoing = asyncio.Queue()
        reader = asyncio.create_task(self._read(requests))
        try:
            yield worker_pb2.AttachResponse(load=load())
            while (response := await self._outgoing.get()) is not None:
                yield response
        finally:
            reader.cancel()

    async def _read(self, requests: Any) -> None:
        async for message in requests:
            if message.HasField("submit"):
                self.submits.append(message.submit)
                if self.on_submit is not None:
                    answer = asyncio.create_task(self.on_submit(self, message.submit))
                    self._answers.add(answer)
                    answer.add_done_callback(self._answers.discard)
            elif message.HasField("cancel"):
                self.cancels.append(message.cancel)
                if (message.cancel.request_id, message.cancel.attempt) not in self._ended:
                    self.say(message.cancel, end=END(reason=END.REASON_ABORTED))
        self.break_stream()

    def say(
        self, request: Any, index: int = 0, token_ids: tuple[int, ...] = (), **fields: Any
    ) -> None:
        """Sends one output of the request's attempt."""
        key = (request.request_id, request.attempt)
        if key in self._ended:
            return
        if "end" in fields:
            self._ended.add(key)
        output = worker_pb2.RequestOutput(
            request_id=key[0], attempt=key[1], index=index, token_ids=token_ids, **fields
        )
        self.send(worker_pb2.AttachResponse(outputs=[output]))

    def send(self, response: worker_pb2.AttachResponse) -> None:
        self._outgoing.put_nowait(response)

    def break_stream(self) -> None:
        """Ends the Attach stream; the server stays."""
        self._outgoing.put_nowait(None)

    async def submitted(self, number: int = 1) -> worker_pb2.SubmitRequest:
        """The `number`-th submission, once it is here."""
        await until(lambda: len(self.submits) >= number)
        return self.submits[number - 1]


def counted(submit: worker_pb2.SubmitRequest, position: int) -> int:
    """The token that the counting workers give: the prompt's last one, counted on."""
    return (submit.input_ids[-1] + 1 + position) % 256


async def count_prefill(worker: ScriptedWorker, submit: worker_pb2.SubmitRequest) -> None:
    more = submit.sampling_params.max_tokens > 1
    reason = END.REASON_HANDED_OVER if more else END.REASON_LENGTH
    timings = pb.PhaseTimings(queue_seconds=1, prefill_seconds=2)
    worker.say(submit, 0, (counted(submit, 0),), end=END(reason=reason), timings=timings)


async def count_decode(worker: ScriptedWorker, submit: worker_pb2.SubmitRequest) -> None:
    last = submit.sampling_params.max_tokens - 1
    for position in range(1, last):
        await asyncio.sleep(0.001)
        worker.say(submit, position, (counted(submit, position),))
    if last > 0:
        timings = pb.PhaseTimings(transfer_seconds=3, decode_seconds=4)
        end = END(reason=END.REASON_LENGTH)
        worker.say(submit, last, (counted(submit, last),), end=end, timings=timings)


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
