"""Where a cluster's CPU time goes under load, by component, and what a generated token costs each.

python -m benchmarks.cpu_profile [options of kvrelay serve] -- [own options]

A cluster is started with the given options, loaded by so many clients, and looked at once it is
busy: first at what the kernel has counted for each thread, which is exact and costs nothing, then
by py-spy at what the threads do. The model is what the forward threads do in `model_runner/`, and
the threads that its kernels compute with besides, which may also wait; all the rest, Ray's own
processes included, is what serving costs. The load generator counts apart.

py-spy is a dependency of Ray's, and needs root, or the right to trace other processes.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import aiohttp
import click
import grpc
import psutil

from benchmarks.idle_cpu import is_ray_process, is_raylet
from benchmarks.threads import (
    NATIVE,
    ProfilerError,
    Stacks,
    Thread,
    cpu_seconds,
    sampled,
    threads_of,
)
from benchmarks.with_cluster import Started, split, started
from kvrelay.deploy.commands.bench import HTTP_VOCAB_SIZE
from kvrelay.deploy.errors import DeployError
from kvrelay.deploy.load_generator.load_client import LoadClient, RequestRecord, RunClock
from kvrelay.deploy.load_generator.measurement import Sender, closed_loop
from kvrelay.deploy.load_generator.openai_client import (
    CompletionsClient,
    ResponseError,
    served_model,
)
from kvrelay.deploy.load_generator.table import table
from kvrelay.deploy.load_generator.workload import Prompts, Shape, fixed_jobs
from kvrelay.deploy.reach.grpc_target import OPEN
from kvrelay.deploy.reach.http_target import HttpTarget
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc as rpc

_REQUEST_SECONDS = 300.0
_ENOUGH_REQUESTS = 100_000
_MOST_FUNCTIONS = 12
_CLIENT_ERRORS = (grpc.aio.AioRpcError, aiohttp.ClientError, ResponseError)
"""Before the first request; a request that fails is in its record."""


class Component(StrEnum):
    """What CPU time is spent for."""

    MODEL = "model: forward"
    SAMPLING = "model: sampling"
    STEPS = "forward threads: batches, outputs"
    ENGINE = "engine threads"
    WORKER_LOOP = "workers' event loops and gRPC"
    TRANSFER = "transfers (NIXL, host, storage)"
    ROUTER = "router"
    RAY_INSIDE = "Ray, inside of workers and router"
    RAY = "Ray's own processes"


MODEL = (Component.MODEL, Component.SAMPLING)
ROUTER, RAY = "router", "ray"
_GRPC_THREADS = ("Thread-1 (_poll_wrapper", "event_engine", "grpc", "timer_manager")
_ROUTER_THREADS = ("MainThread", "kvrelay-text", "asyncio", *_GRPC_THREADS)
_WORKER_THREADS = {
    # Those that kernels compute with besides the one that launches them; they have its name.
    f"forward{NATIVE}": Component.MODEL,
    "forward": Component.STEPS,
    "engine": Component.ENGINE,
    "grammar-masks": Component.SAMPLING,
    "kv-transfer": Component.TRANSFER,
    "copies": Component.TRANSFER,
    "storage": Component.TRANSFER,
    "AsyncIO Thread": Component.WORKER_LOOP,
    "asyncio": Component.WORKER_LOOP,
    "metrics": Component.WORKER_LOOP,
} | dict.fromkeys(_GRPC_THREADS, Component.WORKER_LOOP)


@dataclass(frozen=True)
class Usage:
    """What one thread, or all of Ray's processes of a kind, have used."""

    process: str
    thread: str
    component: Component
    seconds: float


@dataclass(frozen=True)
class Profile:
    """A busy cluster's CPU time."""

    tokens: int
    seconds: float
    client_cpu_seconds: float
    usages: tuple[Usage, ...]
    functions: Mapping[str, Mapping[str, float]]
    """For each thread the shares of its time by function."""

    @property
    def cpu_seconds(self) -> float:
        """Of all but the load generator."""
        return sum(usage.seconds for usage in self.usages)

    @property
    def by_component(self) -> dict[Component, float]:
        """CPU seconds."""
        seconds = dict.fromkeys(Component, 0.0)
        for usage in self.usages:
            seconds[usage.component] += usage.seconds
        return seconds

    @property
    def overhead(self) -> float:
        """The share of all that is not the model."""
        model = sum(self.by_component[component] for component in MODEL)
        return 1 - model / self.cpu_seconds


def component_of(process: str, thread: str) -> Component:
    """What a thread works for; of forward threads what is neither forward nor sampling."""
    if process == RAY:
        return Component.RAY
    if process == ROUTER:
        ours = thread.startswith(_ROUTER_THREADS)
        return Component.ROUTER if ours else Component.RAY_INSIDE
    for prefix, component in _WORKER_THREADS.items():
        if thread.startswith(prefix):
            return component
    return Component.RAY_INSIDE


def processes_of(serve_pid: int) -> dict[int, str]:
    """`kvrelay serve` and all its descendants: the router, the workers' titles, or Ray's."""
    serve = psutil.Process(serve_pid)
    names = {serve_pid: ROUTER}
    for process in serve.children(recursive=True):
        try:
            arguments = process.cmdline()
        except psutil.NoSuchProcess:
            continue
        rays = is_ray_process(arguments) or is_raylet(arguments)
        names[process.pid] = RAY if rays or not arguments else arguments[0].removeprefix("ray::")
    return names


def usages_of(
    seconds: Mapping[tuple[int, int], float],
    processes: Mapping[int, str],
    threads: Iterable[Thread],
    stacks: Mapping[int, Stacks],
) -> list[Usage]:
    """What each thread has used, the most first; forward threads are split by their stacks."""
    names = {(thread.pid, thread.tid): thread.name for thread in threads}
    sums: defaultdict[tuple[str, str, Component], float] = defaultdict(float)
    for (pid, tid), used in seconds.items():
        process, thread = processes[pid], names.get((pid, tid), "(ended)")
        component = component_of(process, thread)
        if component is not Component.STEPS:
            sums[process, thread, component] += used
            continue
        for part, share in _shares_of_forward(stacks.get(pid, Counter())).items():
            sums[process, thread, part] += used * share
    found = [Usage(*where, used) for where, used in sums.items()]
    return sorted(found, key=lambda usage: -usage.seconds)


def _shares_of_forward(stacks: Stacks) -> dict[Component, float]:
    """How a forward thread's time is spent."""
    counts: Counter[Component] = Counter()
    for (thread, *frames), count in stacks.items():
        if not _name(thread).startswith("forward"):
            continue
        if any("/model_runner/sampling/" in frame for frame in frames):
            counts[Component.SAMPLING] += count
        elif any("/model_runner/" in frame for frame in frames):
            counts[Component.MODEL] += count
        else:
            counts[Component.STEPS] += count
    total = counts.total()
    return {part: count / total for part, count in counts.items()} or {Component.MODEL: 1.0}


def functions_of(stacks: Stacks) -> dict[str, dict[str, float]]:
    """For each thread, the shares of the innermost functions of kvrelay, or else of others."""
    counts: dict[str, Counter[str]] = {}
    for (thread, *frames), count in stacks.items():
        ours = [frame for frame in frames if "/kvrelay/" in frame or "/src/" in frame]
        innermost = (ours or frames or ["?"])[-1].rpartition(":")[0] + ")"
        counts.setdefault(_name(thread), Counter())[innermost] += count
    return {
        thread: {function: n / found.total() for function, n in found.most_common(_MOST_FUNCTIONS)}
        for thread, found in counts.items()
    }


def _name(thread: str) -> str:
    """From ``thread (4711): name``, as py-spy has it."""
    return thread.partition(": ")[2]


@dataclass(frozen=True)
class Load:
    """What the cluster is to do, and when it is looked at."""

    door: str
    """Of `DOORS`."""
    shape: Shape
    concurrency: int
    settle_seconds: float
    """Before the first look."""
    seconds: float
    """That CPU time is counted for."""
    stack_seconds: float
    """That stacks are sampled for, after that."""

    @property
    def total_seconds(self) -> float:
        """From the first request on, until no more are sent."""
        return self.settle_seconds + self.seconds + self.stack_seconds


@asynccontextmanager
async def _over_grpc(cluster: Started, clock: RunClock) -> AsyncIterator[Sender]:
    async with grpc.aio.insecure_channel(cluster.target) as channel:
        stub = rpc.InferenceServiceStub(channel)
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        prompts = Prompts(info.vocab_size, [time.time_ns()])
        yield LoadClient(stub, prompts, clock, _REQUEST_SECONDS)


@asynccontextmanager
async def _over_http(cluster: Started, clock: RunClock) -> AsyncIterator[Sender]:
    target = HttpTarget.parse(cluster.url)
    async with target.session(OPEN) as session:
        model = await served_model(session, target.url)
        prompts = Prompts(HTTP_VOCAB_SIZE, [time.time_ns()])
        yield CompletionsClient(session, target.url, model, prompts, clock, _REQUEST_SECONDS)


DOORS = {"grpc": _over_grpc, "http": _over_http}


async def profile(cluster: Started, load: Load) -> Profile:
    """Load the cluster, and look where its CPU time goes."""
    clock = RunClock()
    async with DOORS[load.door](cluster, clock) as client:
        jobs = fixed_jobs(load.shape, _ENOUGH_REQUESTS)
        sending = asyncio.create_task(
            closed_loop(jobs, client.send, load.concurrency, clock, load.total_seconds)
        )
        await asyncio.sleep(load.settle_seconds)
        processes = processes_of(cluster.pid)
        everybody = [*processes, os.getpid()]
        before, begun = cpu_seconds(everybody), clock.now()
        await asyncio.sleep(load.seconds)
        after, ended = cpu_seconds(everybody), clock.now()
        threads, stacks = await asyncio.to_thread(_look_inside, processes, load.stack_seconds)
        tokens = _count_tokens(await sending, begun, ended)
    used = {one: seconds - before.get(one, 0.0) for one, seconds in after.items()}
    own = {one: used.pop(one) for one in list(used) if one[0] == os.getpid()}
    return Profile(
        tokens,
        ended - begun,
        sum(own.values()),
        tuple(usages_of(used, processes, threads, stacks)),
        {
            f"{processes[pid]}, {thread}": shares
            for pid, found in stacks.items()
            for thread, shares in functions_of(found).items()
        },
    )


def _look_inside(
    processes: Mapping[int, str], seconds: float
) -> tuple[list[Thread], dict[int, Stacks]]:
    """All threads, and stacks of those of kvrelay's own processes. Blocks."""
    ours = [pid for pid, name in processes.items() if name != RAY]
    threads = [one for pid in processes for one in threads_of(pid, python=pid in ours)]
    return threads, sampled(ours, seconds)


def _count_tokens(records: Sequence[RequestRecord], begun: float, ended: float) -> int:
    """The tokens that came between the two times. Raises `ClickException` if a request failed."""
    failed = [record for record in records if not record.completed]
    if failed:
        raise click.ClickException(f"a request failed: {failed[0].status}: {failed[0].detail}")
    return sum(
        count
        for record in records
        for at, count in zip(record.token_times, record.token_counts, strict=True)
        if begun <= at < ended
    )


def _print(found: Profile, *, threads: bool, functions: bool) -> None:
    total, tokens = found.cpu_seconds, found.tokens

    def figures(seconds: float) -> list[str]:
        share, micros = 100 * seconds / total, 1e6 * seconds / tokens
        return [f"{seconds:.2f}", f"{share:.2f}", f"{micros:.0f}"]

    rows = [[part, *figures(used)] for part, used in found.by_component.items()]
    rows.append(["all", *figures(total)])
    click.echo(table(("component", "CPU s", "%", "µs a token"), rows))
    if threads:
        rows = [[one.process, one.thread, *figures(one.seconds)] for one in found.usages]
        shown = [row for row in rows if float(row[-2]) >= 0.05]  # %
        click.echo(table(("process", "thread", "CPU s", "%", "µs a token"), shown))
    if functions:
        for thread, shares in found.functions.items():
            click.echo(f"\n{thread}")
            for function, share in shares.items():
                click.echo(f"  {100 * share:5.1f}%  {function}")
    click.echo(
        f"{tokens} tokens in {found.seconds:.1f} s, {tokens / found.seconds:.0f} a second; "
        f"{100 * found.overhead:.1f}% of the CPU time is not the model's, "
        f"{1e6 * found.overhead * total / tokens:.0f} µs a token; "
        f"the load generator used {found.client_cpu_seconds:.1f} s beside"
    )


def _to_json(found: Profile) -> dict[str, Any]:
    return asdict(found) | {"overhead": found.overhead, "components": found.by_component}


@click.command(context_settings={"show_default": True})
@click.option("--door", type=click.Choice(list(DOORS)), default="grpc", help="Of the clients.")
@click.option("--input-tokens", default=256)
@click.option("--output-tokens", default=128)
@click.option("--concurrency", default=32, help="Requests at a time.")
@click.option("--settle-seconds", default=15.0, help="Of load, before anything is counted.")
@click.option("--seconds", default=30.0, help="That CPU time is counted for.")
@click.option("--stack-seconds", default=10.0, help="That stacks are sampled for, after that.")
@click.option("--threads", is_flag=True, help="Print the threads, too.")
@click.option("--functions", is_flag=True, help="Print what each thread does, too.")
@click.option("--limit", type=float, help="Exit with 1 if more than these percent are overhead.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def main(
    serve_options: Sequence[str],
    door: str,
    input_tokens: int,
    output_tokens: int,
    concurrency: int,
    settle_seconds: float,
    seconds: float,
    stack_seconds: float,
    threads: bool,
    functions: bool,
    limit: float | None,
    as_json: bool,
) -> None:
    """Print where the CPU time of a cluster goes that is started for it."""
    shape = Shape(input_tokens, output_tokens)
    load = Load(door, shape, concurrency, settle_seconds, seconds, stack_seconds)
    try:
        with started(serve_options, echo_to=sys.stderr) as cluster:
            found = asyncio.run(profile(cluster, load))
    except (DeployError, ProfilerError, TimeoutError, *_CLIENT_ERRORS) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(_to_json(found), indent=2))
    else:
        _print(found, threads=threads, functions=functions)
    if limit is not None and 100 * found.overhead > limit:
        raise click.ClickException(f"{100 * found.overhead:.1f}% is above the limit of {limit:g}%")


if __name__ == "__main__":
    serve, own = split(sys.argv[1:])
    main(own, obj=serve)
