"""What a streamed token costs a router, over gRPC and over HTTP, by its threads.

python -m benchmarks.router_tokens

The router, the workers and the client are processes of their own, and gRPC and HTTP are real; the
workers compute nothing. A prefill worker answers after a while, a decode worker gives all its
requests a token a step, in one message. So many clients at a time send a prompt and read the
whole output. The figures are CPU time of the router's process, which the rest of the machine
hardly changes, and the times between a client's tokens, which it does; ``--loop uvloop`` needs that
library.

To see where the time goes, give its process id, which is printed, to a profiler, such as
``py-spy record --pid``.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import multiprocessing
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
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
from kvrelay.router.config import PlacementMode, RouterConfig
from kvrelay.router.discovery import StaticDiscovery
from kvrelay.router.router import Router
from kvrelay.text.tokenizer import load_tokenizer
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from kvrelay.wire.model_digest import ModelDigest
from kvrelay.wire.version import VERSION
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole

PREFILL_SECONDS = 0.01
VOCAB = 40_000
END = worker_pb2.RequestEnd


@dataclass(frozen=True)
class Figure:
    """What the router has used."""

    tokens: int
    seconds: float
    cpu_us_a_token: float
    main_thread_us_a_token: float
    """Of it, the thread of the event loop, which runs all Python code but tokenizing."""
    itl_p50_ms: float
    """Between two tokens of a request, as the client's process sees them."""
    itl_p99_ms: float

    @property
    def tokens_per_second(self) -> float:
        """Of all clients together."""
        return self.tokens / self.seconds

    @property
    def cores(self) -> float:
        """That the router's process keeps busy."""
        return self.cpu_us_a_token * self.tokens_per_second / 1e6


@dataclass
class Received:
    """What a client has got."""

    tokens: int = 0
    gaps_seconds: list[float] = field(default_factory=list)
    """Between messages with tokens of one request, since it was last asked."""
    _latest: float | None = None

    def begins(self) -> None:
        """A request is sent."""
        self._latest = None

    def came(self, tokens: int) -> None:
        """A message has come, with so many tokens."""
        now = time.perf_counter()
        self.tokens += tokens
        if tokens and self._latest is not None:
            self.gaps_seconds.append(now - self._latest)
        if tokens:
            self._latest = now

    def taken(self) -> tuple[int, list[float]]:
        """All tokens, and the gaps, which are forgotten."""
        gaps, self.gaps_seconds = self.gaps_seconds, []
        return self.tokens, gaps


class SteppingWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Answers every submission, of either role."""

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self._prefills: asyncio.Queue[worker_pb2.AttachResponse] = asyncio.Queue()
        self._decoding: dict[str, tuple[worker_pb2.SubmitRequest, int]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether outputs are still to be sent."""
        return bool(self._decoding) or not self._prefills.empty()

    async def Attach(  # noqa: N802
        self, requests: Any, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.AttachResponse]:
        """Serves one router; one worker is asked for prefill alone, or for decode alone."""
        reading = asyncio.create_task(self._read(requests))
        try:
            pool = pb.PoolState(pool="full", page_size=16, total=1 << 20, free=1 << 20)
            yield worker_pb2.AttachResponse(load=pb.WorkerLoad(pools=[pool]))
            due = time.monotonic()
            while True:
                due = max(due + self._step_seconds, time.monotonic())
                await asyncio.sleep(due - time.monotonic())
                while not self._prefills.empty():
                    yield self._prefills.get_nowait()
                if self._decoding:
                    yield self._step()
        finally:
            reading.cancel()

    def _step(self) -> worker_pb2.AttachResponse:
        message = worker_pb2.AttachResponse()
        for request_id, (submit, index) in list(self._decoding.items()):
            if index == submit.sampling_params.max_tokens - 1:
                message.outputs.append(_output(submit, index, END.REASON_LENGTH))
                del self._decoding[request_id]
            else:
                message.next_tokens.attempts.append(submit.attempt)
                message.next_tokens.choices.append(0)
                message.next_tokens.indexes.append(index)
                message.next_tokens.token_ids.append(_token_id(index))
                self._decoding[request_id] = submit, index + 1
        return message

    async def _read(self, requests: Any) -> None:
        async for message in requests:
            if not message.HasField("submit"):
                continue
            submit = message.submit
            if submit.HasField("prefill"):
                self._decoding[submit.request_id] = submit, 1
            else:
                first = _output(submit, 0, END.REASON_HANDED_OVER)
                self._prefills.put_nowait(worker_pb2.AttachResponse(outputs=[first]))


def _output(submit: worker_pb2.SubmitRequest, index: int, end: Any) -> worker_pb2.RequestOutput:
    return worker_pb2.RequestOutput(
        request_id=submit.request_id,
        attempt=submit.attempt,
        index=index,
        token_ids=[_token_id(index)],
        end=END(reason=end),
    )


def _token_id(index: int) -> int:
    return 1000 + (7919 * index) % 30_000


async def run_workers(parent: Connection, step_seconds: float) -> None:
    """A prefill and a decode worker, until the process is ended; tells their addresses."""
    addresses, servers = [], []
    for seconds in (PREFILL_SECONDS, step_seconds):
        server = worker_server()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(SteppingWorker(seconds), server)
        addresses.append(f"127.0.0.1:{bind(server, '127.0.0.1:0', None)}")
        servers.append(server)
        await server.start()
    parent.send(addresses)
    await asyncio.gather(*(server.wait_for_termination() for server in servers))


async def run_router(parent: Connection, model_path: Path, addresses: list[str]) -> None:
    """Serves until the process is ended; tells its address, then its CPU times when asked."""
    tokenizer = load_tokenizer(model_path).sha256
    workers = [
        WorkerInfo(
            name=f"{role}-0",
            role=role,
            incarnation=f"{role}-0-1",
            address=address,
            metrics_address="",
            pool_tokens=1 << 24,
            max_model_len=8192,
            vocab_size=VOCAB,
            architecture="Scripted",
            eos_token_ids=(),
            model=ModelDigest("", "", tokenizer, "", "", ""),
            version=VERSION,
        )
        for role, address in zip((WorkerRole.PREFILL, WorkerRole.DECODE), addresses, strict=True)
    ]
    config = RouterConfig(
        model_name="scripted",
        model_path=model_path,
        dtype="none",
        grpc_address="127.0.0.1:0",
        metrics_address="127.0.0.1:0",
        http_address="127.0.0.1:0",
        placement=PlacementMode.DISAGGREGATED,  # a worker does one part
    )
    router = Router(config, StaticDiscovery(workers))
    await router.start()
    await router.wait_ready()
    parent.send(({"grpc": router.grpc_address, "http": router.http_address}, os.getpid()))
    await answer_all(parent, lambda: (time.process_time(), _main_thread_seconds()))


async def answer_all(parent: Connection, answer: Callable[[], Any]) -> None:
    """Answers whenever the parent asks, until cancelled.

    No thread waits for it: a process that fails would wait for that thread, and the parent for it.
    """
    loop, asked = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(parent.fileno(), asked.set)
    try:
        while True:
            await asked.wait()
            asked.clear()
            while parent.poll():
                parent.recv()
                parent.send(answer())
    finally:
        loop.remove_reader(parent.fileno())


def _main_thread_seconds() -> float:
    """CPU seconds of the process's first thread."""
    pid = os.getpid()
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def run_client(
    parent: Connection,
    door: str,
    address: str,
    concurrency: int,
    input_tokens: int,
    output_tokens: int,
) -> None:
    """Keeps so many requests going; tells what each client has got when asked."""
    received = [Received() for _ in range(concurrency)]
    rng = random.Random(0)

    def prompt() -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(input_tokens)]

    send = functools.partial(SENDERS[door], address, prompt, output_tokens)
    telling = answer_all(parent, lambda: [one.taken() for one in received])
    await asyncio.gather(telling, *(send(one) for one in received))


async def send_by_grpc(
    address: str, prompt: Callable[[], list[int]], output_tokens: int, received: Received
) -> None:
    """Sends one request after the other, and counts tokens. Raises ValueError at wrong ones."""
    expected = [_token_id(index) for index in range(output_tokens)]
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        while True:
            message = pb.GenerateRequest()
            message.input_ids.ids.extend(prompt())
            message.sampling_params.max_tokens = output_tokens
            token_ids: list[int] = []
            received.begins()
            async for response in stub.Generate(message):
                token_ids += response.delta.token_ids
                received.came(len(response.delta.token_ids))
            if token_ids != expected:
                raise ValueError(f"the tokens are {token_ids}, not {expected}")


async def send_by_http(
    address: str, prompt: Callable[[], list[int]], output_tokens: int, received: Received
) -> None:
    """Sends one request after the other on a connection, and counts their chunks with tokens."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
    while True:
        body = {"prompt": prompt(), "max_tokens": output_tokens, "stream": True}
        sent = json.dumps(body).encode()
        writer.write(head % len(sent) + sent)
        received.begins()
        while (line := await reader.readline()) != b"0\r\n":
            if not line:
                raise ConnectionError("the router has hung up")
            received.came(int(b'"finish_reason":null' in line))
        await reader.readline()


SENDERS: dict[str, Callable[..., Any]] = {"grpc": send_by_grpc, "http": send_by_http}


def _uvloop() -> Any:
    return importlib.import_module("uvloop").new_event_loop()  # of this benchmark alone


LOOPS: dict[str, Callable[[], Any]] = {"asyncio": asyncio.new_event_loop, "uvloop": _uvloop}


def _child(loop: str, work: Callable[..., Any], connection: Connection, *args: Any) -> None:
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(work(connection, *args))


class Processes:
    """The three processes."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._started: list[Any] = []

    def start(self, loop: str, work: Callable[..., Any], *args: Any) -> Connection:
        """Starts one; returns the connection to it."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=functools.partial(_child, loop, work, theirs, *args), daemon=True
        )
        process.start()
        theirs.close()  # so that whoever asks a process that has ended gets EOFError
        self._started.append(process)
        return ours

    def end(self) -> None:
        """Ends all of them."""
        for process in self._started:
            process.kill()
            process.join()


def ask(connection: Connection) -> Any:
    """What a process answers."""
    connection.send(None)
    return connection.recv()


def tokens_of(client: Connection) -> list[int]:
    """How many each client has got."""
    return [tokens for tokens, _ in ask(client)]


def measure(
    model_path: Path,
    loop: str,
    door: str,
    *,
    concurrency: int,
    input_tokens: int,
    output_tokens: int,
    settle_seconds: float,
    seconds: float,
    step_seconds: float,
) -> Figure:
    """One run."""
    processes = Processes()
    try:
        addresses = processes.start("asyncio", run_workers, step_seconds).recv()
        router = processes.start(loop, run_router, model_path, addresses)
        addresses, pid = router.recv()
        click.echo(f"the router's process is {pid}", err=True)
        client = processes.start(
            "asyncio",
            run_client,
            door,
            addresses[door],
            concurrency,
            input_tokens,
            output_tokens,
        )
        time.sleep(settle_seconds)
        cpu, main_thread = ask(router)
        begun, tokens = time.monotonic(), sum(tokens_of(client))
        time.sleep(seconds)
        cpu, main_thread = (
            later - earlier for later, earlier in zip(ask(router), (cpu, main_thread), strict=True)
        )
        took, got = time.monotonic() - begun, ask(client)
        tokens = sum(number for number, _ in got) - tokens
        gaps_ms = 1e3 * np.concatenate([gaps for _, gaps in got])
        p50, p99 = np.percentile(gaps_ms, (50, 99))
        each = 1e6 / tokens
        return Figure(tokens, took, each * cpu, each * main_thread, float(p50), float(p99))
    finally:
        processes.end()


@click.command(context_settings={"show_default": True})
@click.option("--model", default=DEFAULT_MODEL, help="Whose tokenizer is used.")
@click.option("--loop", "loops", type=click.Choice(list(LOOPS)), multiple=True, default=["asyncio"])
@click.option(
    "--door",
    "doors",
    type=click.Choice(list(SENDERS)),
    multiple=True,
    default=["grpc", "http"],
    help="By which requests come in.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=3, help="Of each, in turn.")
@click.option("--concurrency", default=32, help="Requests at a time.")
@click.option("--input-tokens", default=256)
@click.option("--output-tokens", default=128)
@click.option("--settle-seconds", default=2.0, help="Before each round is measured.")
@click.option("--seconds", default=10.0, help="That each round is measured.")
@click.option("--step-seconds", default=0.03, help="Of the decode worker.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    model: str,
    loops: tuple[str, ...],
    doors: tuple[str, ...],
    rounds: int,
    as_json: bool,
    **load: Any,
) -> None:
    """Print the router's CPU time a token."""
    path = resolve_model(model, "bfloat16", users_models(), lambda _: None).path
    kinds = [(loop, door) for _ in range(rounds) for loop in loops for door in doors]
    figures = [(loop, door, measure(path, loop, door, **load)) for loop, door in kinds]
    if as_json:
        told = [{"loop": loop, "door": door, **asdict(one)} for loop, door, one in figures]
        click.echo(json.dumps(told))
        return
    rows = [
        [
            loop,
            door,
            f"{one.tokens_per_second:.0f}",
            f"{one.cpu_us_a_token:.0f}",
            f"{one.main_thread_us_a_token:.0f}",
            f"{one.cores:.2f}",
            f"{one.itl_p50_ms:.1f}",
            f"{one.itl_p99_ms:.1f}",
        ]
        for loop, door, one in figures
    ]
    head = (
        "loop",
        "door",
        "tokens/s",
        "µs a token",
        "event loop's thread",
        "cores",
        "ITL p50",
        "p99",
    )
    click.echo(table(head, rows))


if __name__ == "__main__":
    main()
