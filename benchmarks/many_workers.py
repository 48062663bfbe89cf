"""What many workers cost their controller and router, on one machine.

python -m benchmarks.many_workers --workers 20

Ray, the controller with its supervisors, leases and heartbeats, the router and gRPC are real; the
workers compute nothing (`counting_worker.py`): one a process, half of them prefill, half decode.
They must all be starting at a time. Clients in a process of their own keep requests going while the
cluster is scaled up and down again and a worker is drained. One that fails, gets other tokens than
it should, or gets no more of them afterwards, ends the run. The figures are CPU time of this
process, as `kvrelay serve` has it, by threads: the router's loop, the controller's, and all others
(Ray's and gRPC's), in cores.
"""

from __future__ import annotations

import asyncio
import functools
import json
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import grpc

from benchmarks import counting_worker, router_tokens
from benchmarks.counting_worker import Begun, CountingWorker
from benchmarks.router_tokens import Processes, run_client
from kvrelay.deploy.controller.cluster_thread import ClusterThread
from kvrelay.deploy.nodes.local_ray import LocalRay, ray
from kvrelay.deploy.nodes.models import resolve_model, users_models
from kvrelay.deploy.nodes.worker_host import BUILDERS
from kvrelay.deploy.options.serve_options import DEFAULT_MODEL
from kvrelay.engine.config import WorkerConfig
from kvrelay.router.config import PlacementMode, RouterConfig
from kvrelay.router.router import Router
from kvrelay.text.tokenizer import load_tokenizer
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc
from kvrelay.wire.cluster_state import WorkerPhase
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole

ROLES = (WorkerRole.PREFILL, WorkerRole.DECODE)
_SETTLE_SECONDS = 2.0
_STALL_SECONDS = 30.0
"""A client that has got nothing for so long hangs."""


@dataclass(frozen=True)
class Cores:
    """CPU seconds a second of this process."""

    router: float
    """The thread of the router's event loop."""
    controller: float
    """That of the supervisors."""
    others: float
    """Ray's and gRPC's."""


@dataclass(frozen=True)
class Figures:
    """One run."""

    workers: int
    start_seconds: float
    """Until the last of them was ready."""
    listed: dict[str, int]
    """Workers that `kvrelay status` calls ready, and those that the controller calls live."""
    idle: Cores
    busy: Cores
    tokens_per_second: float
    scale_up_seconds: float
    """To half as many more."""
    scale_down_seconds: float
    """To the number before."""
    drain_seconds: float
    """Of one worker, its successor included."""
    failed: int
    """Changes that could not be made."""
    processes_left: int
    """Of workers that have left, and after the end."""


def cpu_seconds(native_id: int) -> float:
    """Of one thread of this process."""
    return int(Path(f"/proc/self/task/{native_id}/schedstat").read_text().split()[0]) / 1e9


async def cores_over(seconds: float) -> Cores:
    """What the threads of this process use meanwhile."""
    [controller] = [one for one in threading.enumerate() if one.name == "supervisors"]

    def now() -> tuple[float, float, float]:
        router = time.thread_time()
        supervisors = cpu_seconds(controller.native_id or 0)
        return router, supervisors, time.process_time() - router - supervisors

    begun, before = time.monotonic(), now()
    await asyncio.sleep(seconds)
    elapsed = time.monotonic() - begun
    return Cores(*((b - a) / elapsed for a, b in zip(before, now(), strict=True)))


def configs_of(number: int, model: Path) -> list[WorkerConfig]:
    """So many workers, half of them of each role."""
    return [
        WorkerConfig(f"{role}-{n}", role, model, "counting")
        for role in ROLES
        for n in range(number // 2)
    ]


async def listed_by(cluster: ClusterThread, router: Router) -> dict[str, int]:
    """How many workers the router calls ready, and how many the controller calls live."""
    async with grpc.aio.insecure_channel(router.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        info = await stub.GetServerInfo(pb.GetServerInfoRequest())
    live = [one for one in (await cluster.state()).workers if one.phase is WorkerPhase.LIVE]
    return {"ready": sum(one.ready for one in info.workers), "live": len(live)}


@asynccontextmanager
async def serving(number: int, model: Path) -> AsyncIterator[tuple[ClusterThread, Router]]:
    """Workers and a router that is ready."""
    cluster = ClusterThread(configs_of(number, model))
    config = RouterConfig(
        model_name="counting",
        model_path=model,
        dtype="none",
        grpc_address="127.0.0.1:0",
        metrics_address="127.0.0.1:0",
        http_address="127.0.0.1:0",
        placement=PlacementMode.DISAGGREGATED,  # a counting worker does one part
    )
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(cluster)
        router = Router(config, cluster.discovery)
        stack.push_async_callback(router.stop)
        await router.start()
        await router.wait_ready()
        yield cluster, router


async def seconds_of(work: Awaitable[Any]) -> tuple[Any, float]:
    """The result, and how long it took."""
    begun = time.monotonic()
    return await work, time.monotonic() - begun


async def scaled(cluster: ClusterThread, each: int) -> int:
    """Change the number of workers of each role; how many of the changes failed."""
    wanted = dict.fromkeys(ROLES, each)
    return sum([step.phase == "failed" async for step in cluster.scale(wanted)])


async def drained(cluster: ClusterThread, name: str) -> None:
    """Drain a worker, and wait for its successor."""
    async for _ in cluster.drain(name, remove=False):
        pass


def running(workers: Sequence[WorkerInfo]) -> int:
    """How many of their processes run."""
    return sum(Path(f"/proc/{worker.pid}").exists() for worker in workers)


async def until_each_goes_on(client: Connection) -> None:
    """Wait until every client has got tokens. Raises TimeoutError if one gets none."""
    before = await asyncio.to_thread(router_tokens.tokens_of, client)
    give_up_at = time.monotonic() + _STALL_SECONDS
    while hang := [
        number
        for number, (now, then) in enumerate(
            zip(await asyncio.to_thread(router_tokens.tokens_of, client), before, strict=True)
        )
        if now == then
    ]:
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"no tokens in {_STALL_SECONDS:g} s for the clients {hang}")
        await asyncio.sleep(0.1)


async def run(
    number: int, model: Path, seconds: float, concurrency: int, output_tokens: int
) -> Figures:
    """Start, measure, change, end."""
    clients = Processes()
    begun = time.monotonic()
    try:
        async with serving(number, model) as (cluster, router):
            start_seconds = time.monotonic() - begun
            first = list(cluster.workers.values())
            assert len(first) == number
            await asyncio.sleep(_SETTLE_SECONDS)
            listed = await listed_by(cluster, router)
            idle = await cores_over(seconds)
            client = clients.start(
                "asyncio", run_client, "grpc", router.grpc_address, concurrency, 64, output_tokens
            )
            await until_each_goes_on(client)
            await asyncio.sleep(_SETTLE_SECONDS)
            before = await asyncio.to_thread(router_tokens.tokens_of, client)
            busy, elapsed = await seconds_of(cores_over(seconds))
            after = await asyncio.to_thread(router_tokens.tokens_of, client)
            failed, up = await seconds_of(scaled(cluster, number * 3 // 4))
            more = list(cluster.workers.values())
            failed_too, down = await seconds_of(scaled(cluster, number // 2))
            _, drain = await seconds_of(drained(cluster, "decode-0"))
            await until_each_goes_on(client)
            now = {worker.incarnation for worker in cluster.workers.values()}
            assert len(now) == number
            gone = [worker for worker in more if worker.incarnation not in now]
            left = running(gone)
            ended = list(cluster.workers.values())
            clients.end()  # or they would say that the router has ended
    finally:
        clients.end()
    return Figures(
        workers=number,
        start_seconds=start_seconds,
        listed=listed,
        idle=idle,
        busy=busy,
        tokens_per_second=(sum(after) - sum(before)) / elapsed,
        scale_up_seconds=up,
        scale_down_seconds=down,
        drain_seconds=drain,
        failed=failed + failed_too,
        processes_left=left + running(ended),
    )


@click.command(context_settings={"show_default": True})
@click.option("--model", default=DEFAULT_MODEL, help="Whose tokenizer the router has.")
@click.option("--workers", type=click.IntRange(min=4), default=20)
@click.option("--seconds", default=10.0, help="That each state is measured.")
@click.option("--concurrency", default=40, help="Requests at a time.")
@click.option("--output-tokens", default=64)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    model: str,
    workers: int,
    seconds: float,
    concurrency: int,
    output_tokens: int,
    as_json: bool,
) -> None:
    """Print what the cluster has used."""
    path = resolve_model(model, "bfloat16", users_models(), lambda _: None).path
    for module in (router_tokens, counting_worker):
        ray.cloudpickle.register_pickle_by_value(module)
    multiprocessing.set_start_method("spawn")
    with (
        redirect_stdout(sys.stderr),  # Ray prints warnings to both
        tempfile.TemporaryDirectory() as folder,
        LocalRay(workers),
    ):
        begun = Begun(Path(folder), workers)
        build: Callable[[WorkerConfig], Any] = functools.partial(
            CountingWorker, load_tokenizer(path).sha256, begun
        )
        BUILDERS.update(dict.fromkeys(ROLES, build))
        figures = asyncio.run(run(workers, path, seconds, concurrency, output_tokens))
    if as_json:
        click.echo(json.dumps(asdict(figures)))
        return
    for name, value in asdict(figures).items():
        click.echo(f"{name:<20}{value}")


if __name__ == "__main__":
    main()
