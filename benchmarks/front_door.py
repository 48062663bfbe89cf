"""What long prompts do to a router's event loop, and to another client's stream.

python -m benchmarks.front_door

One client streams from a worker that sends a token every 25 ms, while others send long
prompts as fast as the router answers them. The worker computes nothing. Router, worker,
the client that streams and those that disturb it are processes of their own. Each figure
stands beside the undisturbed one of the same run:

- stall: the longest time between two turns of the router's event loop, which has a timer
  of a millisecond;
- own stall: the longest, where a turn counts no longer than the router computed in it. On a
  busy machine that leaves out what others took;
- ITL: of the client that streams.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import grpc
import numpy as np

from kvrelay.deploy.load_generator.table import table
from kvrelay.deploy.nodes.models import resolve_model, users_models
from kvrelay.deploy.options.serve_options import DEFAULT_MODEL
from kvrelay.net.channels import bind, worker_server
from kvrelay.router.config import RouterConfig
from kvrelay.router.discovery import StaticDiscovery
from kvrelay.router.router import Router
from kvrelay.text.tokenizer import load_tokenizer
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from kvrelay.wire.model_digest import ModelDigest
from kvrelay.wire.version import VERSION
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole

TOKEN_SECONDS = 0.025
MAX_MODEL_LEN = 128 << 10
STREAMED_TOKENS = 100_000  # more than the client waits for
LONG_PROMPT_TOKENS = 1000
"""The worker answers a longer prompt with one token."""
SENTENCE = "The quick brown fox jumps over the lazy dog, again and again. "
END = worker_pb2.RequestEnd


class PacedWorker(worker_pb2_grpc.WorkerServiceServicer):
    """An aggregated worker without a model: sends a token at a time, at a steady pace."""

    async def Attach(  # noqa: N802
        self, requests: Any, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.AttachResponse]:
        """Answers one router."""
        outgoing: asyncio.Queue[worker_pb2.RequestOutput] = asyncio.Queue()
        reading = asyncio.create_task(self._read(requests, outgoing))
        try:
            pool = pb.PoolState(pool="full", page_size=16, total=1 << 20, free=1 << 20)
            yield worker_pb2.AttachResponse(load=pb.WorkerLoad(pools=[pool]))
            while True:
                yield worker_pb2.AttachResponse(outputs=[await outgoing.get()])
        finally:
            reading.cancel()

    async def _read(self, requests: Any, outgoing: asyncio.Queue[Any]) -> None:
        running: dict[int, asyncio.Task[None]] = {}
        async for message in requests:
            if message.HasField("submit"):
                work = self._answer(message.submit, outgoing)
                running[message.submit.attempt] = asyncio.create_task(work)
            elif message.HasField("cancel") and message.cancel.attempt in running:
                running.pop(message.cancel.attempt).cancel()

    async def _answer(self, submit: worker_pb2.SubmitRequest, outgoing: asyncio.Queue[Any]) -> None:
        is_long = len(submit.input_ids) > LONG_PROMPT_TOKENS
        due = time.monotonic()
        for index in range(1 if is_long else STREAMED_TOKENS):
            end = END(reason=END.REASON_LENGTH) if is_long else None
            outgoing.put_nowait(
                worker_pb2.RequestOutput(
                    request_id=submit.request_id,
                    attempt=submit.attempt,
                    index=index,
                    token_ids=[1000 + index % 1000],
                    end=end,
                )
            )
            due += TOKEN_SECONDS
            await asyncio.sleep(due - time.monotonic())


async def run_worker(parent: Connection) -> None:
    """Serves until the process is ended; tells its address."""
    server = worker_server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(PacedWorker(), server)
    port = bind(server, "127.0.0.1:0", None)
    await server.start()
    parent.send(f"127.0.0.1:{port}")
    await server.wait_for_termination()


async def run_router(parent: Connection, model_path: Path, worker_address: str) -> None:
    """Serves until the process is ended; tells its address, then each stall it is asked for."""
    worker = WorkerInfo(
        name="aggregated-0",
        role=WorkerRole.AGGREGATED,
        incarnation="paced",
        address=worker_address,
        metrics_address="",
        pool_tokens=MAX_MODEL_LEN,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=49_152,
        architecture="Paced",
        eos_token_ids=(),
        model=ModelDigest("", "", load_tokenizer(model_path).sha256, "", "", ""),
        version=VERSION,
    )
    config = RouterConfig(
        model_name="paced",
        model_path=model_path,
        dtype="none",
        grpc_address="127.0.0.1:0",
        metrics_address="127.0.0.1:0",
    )
    router = Router(config, StaticDiscovery([worker]))
    await router.start()
    await router.wait_ready()
    parent.send(router.grpc_address)
    await watch_loop(parent)


async def watch_loop(parent: Connection) -> None:
    """Sends the loop's stall and its own stall, in seconds, since it was last asked."""
    stall = own = 0.0
    last, last_cpu = time.perf_counter(), time.process_time()
    while True:
        await asyncio.sleep(0.001)
        now, now_cpu = time.perf_counter(), time.process_time()
        stall = max(stall, now - last)
        own = max(own, min(now - last, now_cpu - last_cpu))
        last, last_cpu = now, now_cpu
        if parent.poll():
            parent.recv()
            parent.send((stall, own))
            stall = own = 0.0
            last, last_cpu = time.perf_counter(), time.process_time()


async def disturb(address: str, what: str, callers: int) -> None:
    """Sends one kind of request, several at a time, until the process is ended."""
    options = [("grpc.max_send_message_length", 32 << 20)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        send = DISTURBANCES[what](stub)

        async def caller() -> None:
            while True:
                try:
                    await send()
                except grpc.aio.AioRpcError as error:
                    refused = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
                    if error.code() not in refused:
                        raise

        await asyncio.gather(*(caller() for _ in range(callers)))


Send = Callable[[], Coroutine[Any, Any, None]]


def generating(
    make: Callable[[], pb.GenerateRequest],
) -> Callable[[inference_pb2_grpc.InferenceServiceStub], Send]:
    """Generate with this message, read to its end."""

    def prepared(stub: inference_pb2_grpc.InferenceServiceStub) -> Send:
        message = make()

        async def send() -> None:
            async for _ in stub.Generate(message):
                pass

        return send

    return prepared


def of_text(num_bytes: int) -> pb.GenerateRequest:
    """English of so many bytes."""
    return pb.GenerateRequest(text=(SENTENCE * (num_bytes // len(SENTENCE) + 1))[:num_bytes])


def of_token_ids(count: int) -> pb.GenerateRequest:
    """The same token again and again."""
    return pb.GenerateRequest(input_ids=pb.TokenIds(ids=[30_000] * count))


DISTURBANCES: dict[str, Callable[[inference_pb2_grpc.InferenceServiceStub], Send]] = {
    "text of 16 MB, too long by its size": generating(lambda: of_text(16_700_000)),
    "text of 8 MB, too long by its tokens": generating(lambda: of_text(8_000_000)),
    "text of 512 KiB, which is served": generating(lambda: of_text(512 << 10)),
    "16 MB of token ids": generating(lambda: of_token_ids(5_500_000)),
}


async def read_tokens(address: str, seconds: float, gaps: list[float]) -> None:
    """Reads a stream for so long; adds the seconds between its tokens."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        params = pb.SamplingParams(max_tokens=STREAMED_TOKENS)
        prompt = pb.TokenIds(ids=[1, 2, 3])
        call = stub.Generate(pb.GenerateRequest(input_ids=prompt, sampling_params=params))
        await call.read()
        times = [time.perf_counter()]
        while times[-1] - times[0] < seconds:
            await call.read()
            times.append(time.perf_counter())
        call.cancel()
        gaps += [after - before for before, after in itertools.pairwise(times)]


@dataclass(frozen=True)
class Figures:
    """Of one phase, in seconds."""

    stall: float
    own_stall: float
    itl_p50: float
    itl_p99: float
    itl_max: float

    def row(self, name: str, undisturbed: Figures) -> list[str]:
        """A line of the table."""
        values = (self.stall, self.own_stall, self.itl_p50, self.itl_p99, self.itl_max)
        ratio = self.itl_p99 / undisturbed.itl_p99
        return [name, *(f"{1e3 * value:.1f}" for value in values), f"{ratio:.2f}"]


class Bench:
    """The processes of one run."""

    def __init__(self, model_path: Path) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        worker = self._start(run_worker).recv()
        self._router = self._start(run_router, model_path, worker)
        self.address: str = self._router.recv()

    def measure(self, seconds: float, what: str | None, callers: int) -> Figures:
        """Figures of one phase, disturbed by `what`."""
        disturbing = None if what is None else self._spawn(disturb, self.address, what, callers)
        if disturbing is not None:
            time.sleep(2.0)  # until it sends
        self._router.send(None)
        self._router.recv()
        gaps: list[float] = []
        asyncio.run(read_tokens(self.address, seconds, gaps))
        self._router.send(None)
        stall, own_stall = self._router.recv()
        if disturbing is not None:
            assert disturbing.is_alive(), "nothing has disturbed the stream"
            disturbing.terminate()
            disturbing.join()
        p50, p99 = np.percentile(gaps, [50, 99])
        return Figures(stall, own_stall, float(p50), float(p99), max(gaps))

    def close(self) -> None:
        """Ends all processes."""
        for process in self._processes:
            process.terminate()
            process.join()

    def _start(self, work: Callable[..., Coroutine[Any, Any, None]], *args: object) -> Connection:
        ours, theirs = self._context.Pipe()
        self._spawn(work, theirs, *args)
        return ours

    def _spawn(self, work: Callable[..., Coroutine[Any, Any, None]], *args: object) -> Any:
        process = self._context.Process(target=run_async, args=(work, *args), daemon=True)
        process.start()
        self._processes.append(process)
        return process


def run_async(work: Callable[..., Coroutine[Any, Any, None]], *args: object) -> None:
    """The whole of a process."""
    asyncio.run(work(*args))


@click.command()
@click.option("--model", default=DEFAULT_MODEL, show_default=True, help="Whose tokenizer is used.")
@click.option("--seconds", default=15.0, show_default=True, help="Of each phase.")
@click.option("--callers", default=2, show_default=True, help="Long prompts at a time.")
def main(model: str, seconds: float, callers: int) -> None:
    """Print a table: one line undisturbed, one for each kind of long prompt."""
    bench = Bench(resolve_model(model, "bfloat16", users_models(), lambda _: None).path)
    try:
        undisturbed = bench.measure(seconds, None, callers)
        rows = [undisturbed.row("undisturbed", undisturbed)]
        rows += [
            bench.measure(seconds, what, callers).row(what, undisturbed) for what in DISTURBANCES
        ]
    finally:
        bench.close()
    header = ["prompts", "stall ms", "own stall", "ITL p50", "ITL p99", "ITL max", "p99 ratio"]
    click.echo(table(header, rows))


if __name__ == "__main__":
    main()
