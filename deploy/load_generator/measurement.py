"""The measurement of one server: its model, then for each workload a warm-up and a run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

import aiohttp
import click
import grpc
from rich import progress as bars
from rich.console import Console

from kvrelay.deploy.load_generator.load_client import LoadClient, RequestRecord, RunClock
from kvrelay.deploy.load_generator.load_report import LoadReport, Slo, summarise
from kvrelay.deploy.load_generator.openai_client import (
    CompletionsClient,
    ResponseError,
    describe_model,
)
from kvrelay.deploy.load_generator.workload import ClosedLoop, Job, Prompts, Workload, check_lengths
from kvrelay.deploy.reach.grpc_target import OPEN, CommandAccess
from kvrelay.deploy.reach.http_target import HttpTarget
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc as rpc


class Sender(Protocol):
    """A client that sends jobs to one server, over either protocol."""

    async def send(self, job: Job) -> RequestRecord:
        """Send one job and read its stream to the end; a failure is in the record."""
        ...


MakeSender = Callable[[Prompts, RunClock], Sender]

JSON_SCHEMA = "kvrelay.serve_load/1"

# The server is asked what it is before it is loaded, so a short wait is enough.
_INFO_SECONDS = 10.0


class ServerError(RuntimeError):
    """The server cannot be reached, or cannot do even the warm-up."""


@dataclass(frozen=True)
class RunBounds:
    """The limits of a run, which ends at the latest after the sum of the two times.

    The two times limit the warm-up before it as well.
    """

    max_seconds: float  # no request is sent after that
    deadline_s: float  # of each request
    warmup: int  # requests


@dataclass(frozen=True)
class Run:
    """One measured run."""

    report: LoadReport
    records: list[RequestRecord]


@dataclass(frozen=True)
class Results:
    """The runs of one invocation, and the server that they were measured on."""

    target: str
    started: datetime
    server: dict[str, Any]
    runs: list[Run]

    def to_json(self, with_requests: bool) -> dict[str, Any]:
        """Return the document that `--json` writes."""
        return {
            "schema": JSON_SCHEMA,
            "started": self.started.isoformat(timespec="seconds"),
            "target": self.target,
            "server": self.server,
            "runs": [_run_json(run, with_requests) for run in self.runs],
        }


def _run_json(run: Run, with_requests: bool) -> dict[str, Any]:
    document = asdict(run.report)
    if with_requests:
        document["records"] = [asdict(record) for record in run.records]
    return document


async def bench(
    target: str,
    workloads: Sequence[Workload],
    bounds: RunBounds,
    slo: Slo,
    access: CommandAccess = OPEN,
) -> Results:
    """Run the workloads one after another against the gRPC server at ``target``.

    Raises ``ServerError`` and ``WorkloadError``; a request that fails is a
    record, not an error.
    """
    started = datetime.now(UTC)
    with_token = {"metadata": access.metadata, "timeout": _INFO_SECONDS}
    async with _channel(target, access) as channel:
        stub = rpc.InferenceServiceStub(channel)
        try:
            model = await stub.GetModelInfo(pb.GetModelInfoRequest(), **with_token)
            server = await stub.GetServerInfo(pb.GetServerInfoRequest(), **with_token)
        except grpc.aio.AioRpcError as error:
            raise ServerError(f"{target}: {error.code().name}: {error.details()}") from error
        client = partial(LoadClient, stub, deadline_s=bounds.deadline_s, metadata=access.metadata)
        limits = ServerLimits(model.vocab_size, model.max_model_len)
        runs = await measure_all(client, limits, workloads, bounds, slo)
    return Results(target, started, _describe(model, server), runs)


async def bench_http(
    target: HttpTarget,
    vocab_size: int,
    workloads: Sequence[Workload],
    bounds: RunBounds,
    slo: Slo,
    access: CommandAccess = OPEN,
) -> Results:
    """Run the workloads against any server of OpenAI's completions API.

    ``vocab_size``: prompts have token ids below this, as such a server does not tell its
        vocabulary's size.
    """
    started = datetime.now(UTC)
    async with target.session(access) as session:
        try:
            async with asyncio.timeout(_INFO_SECONDS):
                model = await describe_model(session, target.url)
            name = model["id"]
        except (aiohttp.ClientError, ResponseError, TimeoutError, ValueError, KeyError) as error:
            what = str(error) or type(error).__name__
            raise ServerError(f"{target}: it does not tell its models: {what}") from error
        client = partial(CompletionsClient, session, target.url, name, deadline_s=bounds.deadline_s)
        limits = ServerLimits(vocab_size, model.get("max_model_len"))
        runs = await measure_all(client, limits, workloads, bounds, slo)
    return Results(str(target), started, {"model": model["id"], "vocab_size": vocab_size}, runs)


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The limits of the prompts that a server can take."""

    vocab_size: int
    max_model_len: int | None
    """The model's longest sequence in tokens; None: the server does not tell it."""


async def measure_all(
    make_client: MakeSender,
    limits: ServerLimits,
    workloads: Sequence[Workload],
    bounds: RunBounds,
    slo: Slo,
) -> list[Run]:
    """Run the workloads one after another; raises ``WorkloadError`` before the first one."""
    for workload in workloads:
        if limits.max_model_len is not None:
            check_lengths(workload, limits.max_model_len)
    runs = []
    for workload in workloads:
        click.echo(_announcement(workload), err=True)
        with RunProgress(len(workload.jobs)) as progress:
            follow = partial(_followed, make_client, progress)
            runs.append(await measure(follow, limits.vocab_size, workload, bounds, slo))
    return runs


def _followed(
    make_client: MakeSender, progress: RunProgress, prompts: Prompts, clock: RunClock
) -> Sender:
    """Return a client whose requests the progress counts, except those of the warm-up."""
    client = make_client(prompts, clock)
    return client if prompts.warm_up else Followed(client, progress)


def _channel(target: str, access: CommandAccess) -> grpc.aio.Channel:
    credentials = access.credentials()
    if credentials is None:
        return grpc.aio.insecure_channel(target)
    return grpc.aio.secure_channel(target, credentials)


async def measure(
    make_client: MakeSender,
    vocab_size: int,
    workload: Workload,
    bounds: RunBounds,
    slo: Slo,
) -> Run:
    """Warm up, run the workload and report on it. Raises ``ServerError`` if a warm-up fails."""
    await warm_up(make_client, vocab_size, workload, bounds)
    clock = RunClock()
    client = make_client(Prompts(vocab_size, workload.seed), clock)
    cpu = time.process_time()
    records = await drive(workload, client.send, clock, bounds.max_seconds)
    records.sort(key=lambda record: record.index)
    return Run(summarise(workload, records, slo, time.process_time() - cpu), records)


async def warm_up(
    make_client: MakeSender,
    vocab_size: int,
    workload: Workload,
    bounds: RunBounds,
) -> None:
    """Send requests like the workload's first ones, with other prompts.

    Raises ``ServerError`` if one fails.
    """
    jobs = [replace(job, due=None, blocks=()) for job in workload.jobs[: bounds.warmup]]
    slots = workload.load.concurrency if isinstance(workload.load, ClosedLoop) else 1
    clock = RunClock()
    prompts = Prompts(vocab_size, workload.seed, warm_up=True)
    client = make_client(prompts, clock)
    for record in await closed_loop(jobs, client.send, slots, clock, bounds.max_seconds):
        if not record.completed:
            raise ServerError(f"a warm-up request failed: {record.status}: {record.detail}")


def _announcement(workload: Workload) -> str:
    return f"{workload.name}, {workload.load}: {len(workload.jobs)} requests"


def _describe(model: pb.GetModelInfoResponse, server: pb.GetServerInfoResponse) -> dict[str, Any]:
    roles = [worker.role for worker in server.workers]
    return {
        "version": server.version,
        "prefill_workers": roles.count(pb.WORKER_ROLE_PREFILL),
        "decode_workers": roles.count(pb.WORKER_ROLE_DECODE),
        "model": model.model,
        "architecture": model.architecture,
        "dtype": model.dtype,
        "vocab_size": model.vocab_size,
        "max_model_len": model.max_model_len,
    }


Send = Callable[[Job], Awaitable[RequestRecord]]


async def drive(
    workload: Workload, send: Send, clock: RunClock, max_seconds: float
) -> list[RequestRecord]:
    """Send the workload's jobs, and wait for all that were sent.

    After ``max_seconds`` no more are sent. Those that run then are waited for:
    to drop them would drop the slowest and flatter the server.
    """
    if isinstance(workload.load, ClosedLoop):
        slots = workload.load.concurrency
        return await closed_loop(workload.jobs, send, slots, clock, max_seconds)
    return await open_loop(workload.jobs, send, clock, max_seconds)


async def closed_loop(
    jobs: Sequence[Job], send: Send, concurrency: int, clock: RunClock, max_seconds: float
) -> list[RequestRecord]:
    """Keep ``concurrency`` requests running until the jobs or the time run out."""
    records: list[RequestRecord] = []
    waiting = iter(jobs)

    async def slot() -> None:
        while clock.now() < max_seconds and (job := next(waiting, None)) is not None:
            records.append(await send(job))

    async with asyncio.TaskGroup() as slots:
        for _ in range(min(concurrency, len(jobs))):
            slots.create_task(slot())
    return records


async def open_loop(
    jobs: Sequence[Job], send: Send, clock: RunClock, max_seconds: float
) -> list[RequestRecord]:
    """Send each job at its due time, even if earlier ones still run."""
    tasks: list[asyncio.Task[RequestRecord]] = []

    async def run(job: Job) -> RequestRecord:
        return await send(job)

    async with asyncio.TaskGroup() as group:
        for job in jobs:
            due = job.due or 0.0
            if max(due, clock.now()) >= max_seconds:
                break
            await asyncio.sleep(due - clock.now())
            tasks.append(group.create_task(run(job)))
    return [task.result() for task in tasks]


class RunProgress:
    """A context that shows the number of a run's ended requests, on a terminal only."""

    def __init__(self, requests: int) -> None:
        console = Console(stderr=True)
        self._bars = bars.Progress(
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[failed]} failed"),
            bars.TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal or console.is_dumb_terminal,
            refresh_per_second=2,  # what it costs is taken from the load
        )
        self._task = self._bars.add_task("", total=requests, failed=0)
        self.ended = 0
        self.failed = 0

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def take(self, record: RequestRecord) -> None:
        """Count one more request that has ended."""
        self.ended += 1
        self.failed += not record.completed
        self._bars.update(self._task, completed=self.ended, failed=self.failed)


class Followed:
    """A client whose requests a `RunProgress` counts."""

    def __init__(self, client: Sender, progress: RunProgress) -> None:
        self._client = client
        self._progress = progress

    async def send(self, job: Job) -> RequestRecord:
        """Send one job and read its stream to the end."""
        record = await self._client.send(job)
        self._progress.take(record)
        return record
