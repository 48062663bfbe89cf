"""A cluster of four hosts under load: the controller, a router, a prefill and a decode worker."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from kvrelay.v1 import inference_pb2, inference_pb2_grpc
from tests.chaos.cluster import bound_of
from tests.chaos.load import Case, Expected, ask
from tests.checkpoints import make_checkpoint
from tests.hosts.host import Host
from tests.hosts.lan import Lan, lan
from tests.hosts.ray_nodes import RayHosts, environment, options_on, serving, until_ready

TIMEOUT_S = 4.0
LEASE_S = 12.0
REST_S = 150.0
"""For a worker to be believed dead, Ray to find it another node, and it to start there."""
DISK_BYTES = 1 << 30
KV_MEMORY = 640 << 10
"""Two requests fit, or three: whoever comes next takes the pages of one that has just gone."""
CONTROLLER_PORT = 7001
QUICK_RAY = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "5",
}
"""A node is dead after 30 s without an answer, in place of 65."""
_RELAY = """
import asyncio, sys
async def copy(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    writer.close()
async def relay(reader, writer):
    onward, back = await asyncio.open_connection("127.0.0.1", int(sys.argv[2]))
    await asyncio.gather(copy(reader, back), copy(onward, writer))
async def main():
    server = await asyncio.start_server(relay, "0.0.0.0", int(sys.argv[1]))
    print("ready", flush=True)
    await server.serve_forever()
asyncio.run(main())
"""
"""Lets a router on another host reach --admin, which stays on loopback where nobody has a token."""


@dataclass
class ServedHosts:
    """What tests do to the cluster, and ask of it, through the router on its own host."""

    network: Lan
    ray: RayHosts
    stub: inference_pb2_grpc.InferenceServiceStub
    log: list[str] = field(default_factory=list)
    """What `kvrelay serve` says."""
    bound: float = bound_of(TIMEOUT_S)
    """Seconds within which every request is to have its end, but for the length of the harm."""
    hosts: dict[str, Host] = field(default_factory=dict)
    """By role: `controller`, `router`, `P` and `D`."""
    _num_replaced: int = 0

    async def current(self) -> inference_pb2_grpc.InferenceServiceStub:
        return self.stub

    async def status(self) -> list[inference_pb2.WorkerStatus]:
        request = inference_pb2.GetServerInfoRequest()
        return list((await self.stub.GetServerInfo(request, timeout=10)).workers)

    async def incarnations(self) -> dict[str, str]:
        """By the worker's name."""
        return {worker.worker: worker.incarnation for worker in await self.status()}

    async def until_at_rest(self) -> None:
        """Wait until both workers serve, and all of their pages and rows are free or evictable."""
        give_up_at = time.monotonic() + REST_S
        while problems := await self._unrest():
            assert time.monotonic() < give_up_at, f"not at rest: {problems}"
            await asyncio.sleep(0.2)

    async def _unrest(self) -> list[str]:
        try:
            workers = await self.status()
        except grpc.aio.AioRpcError as error:
            return [str(error.code())]
        problems = [f"{worker.worker} is not ready" for worker in workers if not worker.ready]
        if len(workers) != 2:
            problems.append(f"{len(workers)} workers")
        for worker in workers:
            load = worker.load
            if load.waiting_requests or load.running_requests:
                problems.append(f"{worker.worker} has requests")
            problems += [
                f"{worker.worker}: {pool.total - pool.free - pool.cached_evictable} {pool.pool}"
                for pool in load.pools
                if pool.free + pool.cached_evictable != pool.total or pool.promised
            ]
        return problems

    def replace_host(self, role: str) -> None:
        """Start another host, which is a node of Ray like the one that is gone."""
        self._num_replaced += 1
        name = f"{role.lower()}{self._num_replaced}"
        self.network.add_hosts([name])
        self.hosts[role] = self.network.hosts[name]
        self.ray.add(self.hosts[role], {"rack": role.lower()})


async def learn(
    stub: inference_pb2_grpc.InferenceServiceStub, cases: Sequence[Case], bound: float
) -> Expected:
    """Each case's tokens in a run without faults."""
    expected = {}
    for case in cases:
        outcome = await ask(stub, case, bound)
        assert outcome.completed, outcome
        expected[case] = outcome.tokens
    return expected


@contextlib.contextmanager
def drained(process: subprocess.Popen[str], lines: list[str]) -> Iterator[None]:
    """Read all that a process says, which would wait else."""

    def read() -> None:
        assert process.stdout is not None
        with contextlib.suppress(ValueError):  # it is closed
            lines.extend(process.stdout)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    yield


def _start_relay(host: Host, said: str) -> None:
    found = re.search(r"admin +127\.0\.0\.1:(\d+)", said)
    assert found, said
    words = (sys.executable, "-c", _RELAY, str(CONTROLLER_PORT), found[1])
    relay = host.spawn(*words, stdout=subprocess.PIPE, text=True)
    assert relay.stdout is not None
    assert relay.stdout.readline() == "ready\n"


@asynccontextmanager
async def restarting_ended(ray: RayHosts) -> AsyncIterator[None]:
    """Start nodes again whose raylets end, at any time, as KubeRay does."""

    async def restart() -> None:
        while True:
            await asyncio.sleep(0.2)
            ray.restart_ended()

    restarting = asyncio.create_task(restart())
    try:
        yield
    finally:
        restarting.cancel()
        await asyncio.wait({restarting})
        if not restarting.cancelled():
            restarting.result()


@contextlib.contextmanager
def routing(host: Host, controller: Host, model: str) -> Iterator[subprocess.Popen[str]]:
    """Run `kvrelay router` on a host, for the cluster of a controller."""
    anywhere = f"{host.address}:0"
    words = (sys.executable, "-m", "kvrelay.deploy", "router", "--model", model, "--insecure")
    process = host.spawn(
        *words,
        *("--dtype", "float32", "--controller", f"{controller.address}:{CONTROLLER_PORT}"),
        *("--grpc", anywhere, "--http", anywhere, "--metrics", anywhere),
        *("--placement", "disaggregated"),
        environment=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def served_hosts() -> AsyncIterator[ServedHosts]:
    """Start it all; needs root."""
    names = {"controller": "head", "router": "front", "P": "p", "D": "d"}
    with lan([*names.values()], temp_bytes=DISK_BYTES) as network:
        hosts = {role: network.hosts[name] for role, name in names.items()}
        ray = RayHosts.start(hosts["controller"], variables=QUICK_RAY)
        for role in "PD":
            ray.add(hosts[role], {"rack": role.lower()})
        model = make_checkpoint(network.shared / "tiny")
        options = options_on(hosts["controller"], model)
        options += ["--ray-address", ray.address, "--placement", "disaggregated"]
        options += ["--prefill-on", "rack=p", "--decode-on", "rack=d", "--page-size", "4"]
        options += ["--kv-memory", str(KV_MEMORY), "--chunk-tokens", "32"]
        options += ["--worker-timeout", str(TIMEOUT_S), "--worker-lease", str(LEASE_S)]
        log: list[str] = []
        with serving(hosts["controller"], *options) as process:
            said = await asyncio.to_thread(until_ready, process)
            with drained(process, log):
                _start_relay(hosts["controller"], said)
                with routing(hosts["router"], hosts["controller"], str(model)) as router:
                    said = await asyncio.to_thread(until_ready, router)
                    found = re.search(r"gRPC +(\S+)", said)
                    assert found, said
                    with drained(router, log):
                        async with (
                            restarting_ended(ray),
                            grpc.aio.insecure_channel(
                                found[1], [("grpc.enable_http_proxy", 0)]
                            ) as channel,
                        ):
                            stub = inference_pb2_grpc.InferenceServiceStub(channel)
                            yield ServedHosts(network, ray, stub, log, hosts=hosts)
