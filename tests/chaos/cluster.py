"""A real cluster of two prefill and two decode workers, whose router is a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvrelay.deploy.controller.cluster import Cluster
from kvrelay.deploy.deployment import worker_configs
from kvrelay.deploy.nodes.local_ray import ray
from kvrelay.deploy.nodes.models import ModelFolder
from kvrelay.deploy.options.listen_address import Address
from kvrelay.deploy.options.serve_options import ServeOptions
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.faults import Fault
from kvrelay.net.tls import TlsFiles
from kvrelay.router.config import PlacementMode
from kvrelay.v1 import inference_pb2, inference_pb2_grpc
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole
from tests.arming import arm, faults_fired
from tests.chaos.load import Case, Expected, ask
from tests.chaos.router_process import to_line
from tests.ports import free_port

ANY_PORT = Address("127.0.0.1", 0)
START_S = 120.0
REST_S = 60.0


def make_configs(
    model: Path, timeout: float, dtype: str, retract_every: int, kv_memory: int, **more: Any
) -> list[WorkerConfig]:
    """Two workers of each role, if not told otherwise.

    The second has a fixed port, so a restart keeps its address.
    """
    options = ServeOptions(
        model=str(model),
        grpc=ANY_PORT,
        http=ANY_PORT,
        admin=ANY_PORT,
        metrics=ANY_PORT,
        page_size=4,
        chunk_tokens=32,
        kv_memory=kv_memory,
        threads=1,
        audit_pages=True,
        worker_timeout=timeout,
        step_timeout=timeout - 1,
        step_timeout_per_token=0,
        **{"prefill": 2, "decode": 2, **more},
    )
    return [
        replace(
            config,
            dtype=dtype,
            batch_invariant=dtype == "bfloat16",  # or its tokens would depend on the batch
            faults=(),
            debug_retract_every=retract_every if config.role == "decode" else 0,
            grpc_port=free_port() if config.name.endswith("-1") else 0,
        )
        for config in worker_configs(options, ModelFolder("tiny", model))
    ]


def bound_of(worker_timeout: float) -> float:
    """Seconds within which every request is to have its end."""
    return 6 * worker_timeout + 20


class RouterProcess:
    """A router that can be harmed, and replaced."""

    def __init__(
        self, model: Path, cluster: Cluster, placement: PlacementMode, tls: TlsFiles | None
    ) -> None:
        self._model = model
        self._tls = tls
        self._cluster = cluster
        self._placement = placement
        self._process: asyncio.subprocess.Process | None = None
        self._feeding: asyncio.Task[None] | None = None
        self._channels: list[grpc.aio.Channel] = []
        self._up = asyncio.Event()
        self.address = self.metrics_address = self.http_address = ""
        self.stub: inference_pb2_grpc.InferenceServiceStub

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, address: str = "") -> None:
        """Start the process and return once it can serve; at a port of its own if none is given."""
        address = address or f"127.0.0.1:{free_port()}"
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.chaos.router_process", str(self._model), address, self._placement),
            *(("--tls", self._tls.cert, self._tls.key) if self._tls is not None else ()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self._feeding = asyncio.create_task(self._feed(self._process))
        assert self._process.stdout is not None
        async with asyncio.timeout(START_S):
            said = (await self._process.stdout.readline()).decode().split()
        assert said, "the router did not start"
        self.address, self.metrics_address, self.http_address = said
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        if self._tls is None:
            channel = grpc.aio.insecure_channel(self.address, options)
        else:
            assert self._tls.ca is not None
            known = grpc.ssl_channel_credentials(self._tls.ca.read_bytes())
            channel = grpc.aio.secure_channel(self.address, known, options)
        self._channels.append(channel)
        self.stub = inference_pb2_grpc.InferenceServiceStub(self._channels[-1])
        self._up.set()

    async def current(self) -> inference_pb2_grpc.InferenceServiceStub:
        """A stub of the running router; waits while there is none."""
        await self._up.wait()
        return self.stub

    async def close(self) -> None:
        """End the process and close the channels."""
        await self.end()
        for channel in self._channels:
            await channel.close()

    async def end(self) -> None:
        """Kill the process, running or stopped. Calls to it then fail by themselves."""
        self._up.clear()
        if self._feeding is not None:
            self._feeding.cancel()
            await asyncio.gather(self._feeding, return_exceptions=True)
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _feed(self, process: asyncio.subprocess.Process) -> None:
        """Write the list of workers to the process, now and whenever it changes."""
        assert process.stdin is not None
        while True:
            changed = asyncio.create_task(self._cluster.discovery.changed())
            await asyncio.sleep(0)  # it is registered now
            try:
                process.stdin.write(to_line(self._cluster.discovery))
                await changed
            finally:
                changed.cancel()


class ChaosCluster:
    """The workers, the router, and what tests do to them."""

    def __init__(
        self,
        model: Path,
        cluster: Cluster,
        timeout: float,
        placement: PlacementMode,
        router_tls: TlsFiles | None,
    ) -> None:
        self.cluster = cluster
        self.router = RouterProcess(model, cluster, placement, router_tls)
        self._num_workers = len(cluster.workers)
        self.timeout = timeout
        self.bound = bound_of(timeout)
        """Seconds within which every request is to have its end."""

    async def learn(self, cases: Sequence[Case]) -> Expected:
        """Each case's tokens in a run without faults."""
        expected = {}
        for case in cases:
            outcome = await ask(self.router.stub, case, self.bound)
            assert outcome.completed, outcome
            expected[case] = outcome.tokens
        return expected

    def worker(self, name: str) -> WorkerInfo:
        return self.cluster.workers[name]

    async def arm(self, name: str, *faults: Fault) -> None:
        """Arm faults on a worker. One may happen before the worker has answered this call."""
        with suppress(ray.exceptions.RayActorError):
            await arm(self.cluster, name, faults)

    async def until_fired(self, observer: str, pids: Sequence[int]) -> None:
        """Wait until a fault armed on `observer` has happened, or one of the processes is down."""
        async with asyncio.timeout(START_S):
            while not any(map(is_down, pids)):
                with suppress(TimeoutError, ray.exceptions.RayError):
                    async with asyncio.timeout(1):
                        if await faults_fired(self.cluster, observer):
                            return
                await asyncio.sleep(0.01)

    async def until_replaced(self, before: WorkerInfo) -> WorkerInfo:
        """Wait until another incarnation of the worker serves; returns its information."""
        async with asyncio.timeout(self.timeout + START_S):
            while (info := self.cluster.workers.get(before.name, before)) == before:
                await asyncio.sleep(0.05)
            while not await self._serves(info):
                await asyncio.sleep(0.05)
        return info

    async def _serves(self, info: WorkerInfo) -> bool:
        workers = await self.status()
        return any(one.incarnation == info.incarnation and one.ready for one in workers)

    async def status(self) -> list[inference_pb2.WorkerStatus]:
        request = inference_pb2.GetServerInfoRequest()
        return list((await self.router.stub.GetServerInfo(request, timeout=10)).workers)

    async def replace_router(self, *, same_address: bool) -> None:
        """End the router, if it still runs, and start another."""
        address = self.router.address if same_address else ""
        await self.router.end()
        await self.router.start(address)

    async def until_at_rest(self) -> None:
        """Wait until each worker's pages and rows are free, or cached and evictable.

        The figures are read from the workers' metrics.
        """
        deadline = time.monotonic() + REST_S
        while True:
            workers = list(self.cluster.workers.values())
            problems = [problem for info in workers for problem in await unrest(info)]
            if len(self.cluster.workers) == self._num_workers and not problems:
                return
            assert time.monotonic() < deadline, f"not at rest: {problems}"
            await asyncio.sleep(0.05)


def is_down(pid: int) -> bool:
    """Whether a process has ended, or is stopped."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wake(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


async def samples(info: WorkerInfo) -> list[Sample]:
    """A worker's metrics; none if it cannot be asked."""
    return await asyncio.to_thread(_scrape, info.metrics_address)


def _scrape(address: str) -> list[Sample]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        text = response.read().decode()
    return [one for family in text_string_to_metric_families(text) for one in family.samples]


async def unrest(info: WorkerInfo) -> list[str]:
    """The requests and pages of a worker that an idle one would not have."""
    try:
        found = await samples(info)
    except (urllib.error.URLError, OSError) as error:
        return [f"{info.name}: {error}"]
    problems = []
    for one in found:
        state = one.labels.get("state")
        if not one.value or state in ("free", "cached_evictable"):
            continue
        if one.name in ("kvrelay_requests", "kvrelay_pages"):
            what = one.labels.get("pool", "requests")
            problems.append(f"{info.name}: {one.value:g} {what} {state}")
        elif one.name == "kvrelay_audit_failures_total":
            problems.append(f"{info.name}: the account is wrong")
    return problems


@asynccontextmanager
async def chaos_cluster(
    model: Path,
    *,
    worker_timeout: float,
    dtype: str = "float32",
    retract_every: int = 150,
    kv_memory: int = 4 << 20,
    decodes_alone: bool = False,
    router_tls: TlsFiles | None = None,
    **options: Any,
) -> AsyncIterator[ChaosCluster]:
    """Run a cluster in the Ray that is initialised; perhaps of decode workers alone.

    `options` are further ones of every worker.
    """
    configs = make_configs(model, worker_timeout, dtype, retract_every, kv_memory, **options)
    placement = PlacementMode.DISAGGREGATED
    if decodes_alone:
        configs = [config for config in configs if config.role is WorkerRole.DECODE]
        placement = PlacementMode.ADAPTIVE
    async with Cluster(configs) as cluster:
        chaos = ChaosCluster(model, cluster, worker_timeout, placement, router_tls)
        try:
            await chaos.router.start()
            yield chaos
        finally:
            await chaos.router.close()
