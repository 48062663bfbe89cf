"""Workers that send what a test tells them to.

They replace the worker only: gRPC, its servers and its channels are real.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeAlias

import grpc

from kvrelay.net.channels import bind, worker_server
from kvrelay.net.tls import TlsFiles
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import worker_pb2, worker_pb2_grpc
from kvrelay.wire.model_digest import NO_MODEL
from kvrelay.wire.version import VERSION
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole
from tests.ports import free_port
from tests.worker_infos import worker_info

SECONDS = 60.0
"""Until what is awaited must have happened, on a machine that does other things, too."""
END = worker_pb2.RequestEnd
HANDED_OVER = END(reason=END.REASON_HANDED_OVER)
LENGTH = END(reason=END.REASON_LENGTH)
RETRACTED = END(reason=END.REASON_RETRACTED)
COUNTED = [4, 5, 6, 7, 8, 9, 10, 11]
"""What the counting workers make of the prompt [1, 2, 3]."""


def broken(cause: Any = END.CAUSE_FAILED) -> worker_pb2.RequestEnd:
    """The end of an attempt that may be made again."""
    return END(reason=END.REASON_FAILED, error="pull: broken", cause=cause)


def load(*, waiting_tokens: int = 0, free: int = 64) -> pb.WorkerLoad:
    kv = pb.PoolState(pool="full", page_size=16, total=64, free=free, held=64 - free)
    return pb.WorkerLoad(waiting_tokens=waiting_tokens, pools=[kv])


Answer: TypeAlias = Callable[
    ["ScriptedWorker", worker_pb2.SubmitRequest], Coroutine[Any, Any, None]
]


class ScriptedWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Says what a test tells it to, and remembers what it was told.

    A cancelled attempt is ended at once, as a worker does. `on_submit` may
    answer submissions; without it the test sends every output itself. What a
    submission must not be is among the `faults`.
    """

    def __init__(self, name: str, role: WorkerRole, tls: TlsFiles | None = None) -> None:
        self.name = name
        self._tls = tls
        self.role = role
        self.computes_prompts = False
        """Though it is a decode worker."""
        self.incarnation = f"{name}-1"
        self.model = NO_MODEL
        self.version = VERSION
        self.locality = ""
        self.submits: list[worker_pb2.SubmitRequest] = []
        self.cancels: list[worker_pb2.CancelRequest] = []
        self.hellos: list[worker_pb2.AttachHello] = []
        self.forgotten: list[str] = []
        """The sessions that it was told to forget."""
        self.watched: list[bool] = []
        """Whether its requests are watched, each time that it was told."""
        self.asked_for: list[tuple[str, str]] = []
        """The histories that it was asked for, by owner and digest."""
        self.finds: dict[str, list[int]] | None = {}
        """What it says of an owner's history; None: it does not answer."""
        self.may_find = asyncio.Event()
        """It says so as soon as this is set, as it is at first."""
        self.may_find.set()
        self.told_anew = 0
        """So often it was asked to tell its prefixes anew."""
        self.on_submit: Answer | None = None
        self.first_load = load()
        self._outgoing: asyncio.Queue[worker_pb2.AttachResponse | None] = asyncio.Queue()
        self._answers: set[asyncio.Task[None]] = set()
        self.faults: list[str] = []
        self._choices: dict[tuple[str, int], range] = {}
        self._ended: set[tuple[str, int, int]] = set()
        self._port = free_port()
        """Kept while it is stopped."""
        self._server: grpc.aio.Server | None = None

    @property
    def endpoint(self) -> WorkerInfo:
        return worker_info(
            self.name,
            role=self.role,
            incarnation=self.incarnation,
            address=f"127.0.0.1:{self._port}",
            pool_tokens=1024,
            max_model_len=512,
            vocab_size=402,
            architecture="Counting",
            eos_token_ids=(400,),
            model=self.model,
            version=self.version,
            locality=self.locality,
        )

    async def start(self) -> None:
        self._server = worker_server()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self._port = bind(self._server, f"127.0.0.1:{self._port}", self._tls)
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            for answer in self._answers:
                answer.cancel()
            await self._server.stop(None)
            self._server = None

    async def FindHistory(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.asked_for.append((request.owner, request.digest))
        await self.may_find.wait()
        if self.finds is None:
            return await context.abort(grpc.StatusCode.UNAVAILABLE, "hangs")
        return worker_pb2.FindHistoryResponse(token_ids=self.finds.get(request.owner, ()))

    async def Attach(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        first = await anext(aiter(requests))
        self.hellos.append(first.hello)
        if first.hello.incarnation != self.incarnation:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another incarnation")
        self._outgoing = asyncio.Queue()
        reader = asyncio.create_task(self._read(requests))
        try:
            yield worker_pb2.AttachResponse(load=self.first_load)
            while (response := await self._outgoing.get()) is not None:
                yield response
        finally:
            reader.cancel()

    async def _read(self, requests: Any) -> None:
        async for message in requests:
            if message.HasField("submit"):
                self._take(message.submit)
                if self.on_submit is not None:
                    answer = asyncio.create_task(self.on_submit(self, message.submit))
                    self._answers.add(answer)
                    answer.add_done_callback(self._answers.discard)
            elif message.HasField("cancel"):
                self.cancels.append(message.cancel)
                key = (message.cancel.request_id, message.cancel.attempt)
                for choice in self._choices.get(key, ()):
                    self.say(message.cancel, choice=choice, end=END(reason=END.REASON_ABORTED))
            elif message.HasField("forget_session"):
                self.forgotten.append(message.forget_session.session)
            elif message.HasField("watch_requests"):
                self.watched.append(message.watch_requests.on)
            elif message.HasField("tell_prefixes"):
                self.told_anew += 1
        self.break_stream()

    def _take(self, submit: worker_pb2.SubmitRequest) -> None:
        self.submits.append(submit)
        key, emitted = (submit.request_id, submit.attempt), emitted_by(submit)
        self._choices[key] = choices_of(submit)
        if emitted and len(self._choices[key]) != 1:
            self.faults.append(f"{self.name}: {emitted} of several choices")
        needs_peer = self.role is WorkerRole.DECODE
        if submit.HasField("prefill") != needs_peer and not (needs_peer and self.computes_prompts):
            self.faults.append(f"{self.name}: told of {submit.prefill or 'no prefill'}")

    def say(
        self, request: Any, index: int = 0, token_ids: tuple[int, ...] = (), **fields: Any
    ) -> None:
        """Sends one output of the request's attempt, unless its choice has ended."""
        key = (request.request_id, request.attempt, fields.get("choice", 0))
        if key in self._ended:
            return
        if "end" in fields:
            self._ended.add(key)
        self.say_late(request, index, token_ids, **fields)

    def say_late(
        self, request: Any, index: int, token_ids: tuple[int, ...] = (), **fields: Any
    ) -> None:
        """Sends one output of the request's attempt, though its choice may have ended."""
        output = worker_pb2.RequestOutput(
            request_id=request.request_id,
            attempt=request.attempt,
            index=index,
            token_ids=token_ids,
            **fields,
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


def choices_of(submit: worker_pb2.SubmitRequest) -> range:
    return range(submit.first_choice, submit.first_choice + submit.sampling_params.n)


def emitted_by(submit: worker_pb2.SubmitRequest) -> list[int]:
    """What an earlier attempt has emitted."""
    return list(submit.input_ids[submit.num_prompt_tokens :])


def counted(submit: worker_pb2.SubmitRequest, position: int, choice: int = 0) -> int:
    """The token that the counting workers give: the prompt's last one, counted on.

    As a real one, it depends on prompt, choice and position, and not on the attempt.
    """
    last: int = submit.input_ids[submit.num_prompt_tokens - 1]
    return (last + 1 + position + 50 * choice) % 256


async def count_prefill(worker: ScriptedWorker, submit: worker_pb2.SubmitRequest) -> None:
    first = check_emitted(worker, submit)
    last = submit.sampling_params.max_tokens - 1
    reason = END.REASON_HANDED_OVER if first < last else END.REASON_LENGTH
    timings = pb.PhaseTimings(queue_seconds=1, prefill_seconds=2)
    for choice in choices_of(submit):
        token = counted(submit, first, choice)
        end = END(reason=reason)
        worker.say(submit, first, (token,), choice=choice, end=end, timings=timings)


async def count_decode(worker: ScriptedWorker, submit: worker_pb2.SubmitRequest) -> None:
    await _count_from(check_emitted(worker, submit) + submit.HasField("prefill"), worker, submit)


async def count_aggregated(worker: ScriptedWorker, submit: worker_pb2.SubmitRequest) -> None:
    await _count_from(check_emitted(worker, submit), worker, submit)


async def _count_from(first: int, worker: ScriptedWorker, submit: worker_pb2.SubmitRequest) -> None:
    for position in range(first, submit.sampling_params.max_tokens):
        await asyncio.sleep(0.001)
        for choice in choices_of(submit):
            say_counted(worker, submit, position, choice)


def retract_after(*tokens: int, choice: int = 0) -> Answer:
    """A decode worker that retracts a choice after so many tokens, once for each number."""
    left = list(tokens)

    async def on_submit(worker: ScriptedWorker, submit: worker_pb2.SubmitRequest) -> None:
        if choice not in choices_of(submit) or not left:
            return await count_decode(worker, submit)
        first = check_emitted(worker, submit) + 1
        stop, number = first + left.pop(0), submit.sampling_params.max_tokens
        for position in range(first, number):
            for one in choices_of(submit):
                if one == choice and position == stop:
                    worker.say(submit, position, choice=one, end=RETRACTED)
                else:  # not said of one that has ended
                    say_counted(worker, submit, position, one)
            await asyncio.sleep(0.001)
        return None

    return on_submit


async def tokens_then_silence(worker: ScriptedWorker, submit: worker_pb2.SubmitRequest) -> None:
    """A decode worker that is going to be lost."""
    first = check_emitted(worker, submit) + 1
    for position in (first, first + 1):
        for choice in choices_of(submit):
            say_counted(worker, submit, position, choice)


def say_counted(
    worker: ScriptedWorker, submit: worker_pb2.SubmitRequest, position: int, choice: int = 0
) -> None:
    """The token at this position; with it the end, if it is the last."""
    fields: dict[str, Any] = {"choice": choice}
    if position == submit.sampling_params.max_tokens - 1:
        fields["end"] = LENGTH
        fields["timings"] = pb.PhaseTimings(transfer_seconds=3, decode_seconds=4)
    worker.say(submit, position, (counted(submit, position, choice),), **fields)


def check_emitted(worker: ScriptedWorker, submit: worker_pb2.SubmitRequest) -> int:
    """How much was emitted; it must be what the counting workers say."""
    emitted = emitted_by(submit)
    expected = [counted(submit, p, submit.first_choice) for p in range(len(emitted))]
    if emitted != expected:
        worker.faults.append(f"{worker.name}: {emitted} is not {expected}")
    return len(emitted)


async def until(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
