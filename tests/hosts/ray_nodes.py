"""A Ray cluster with one node on each host, and `kvrelay serve` in it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import grpc
import psutil

from kvrelay.v1 import inference_pb2_grpc
from tests.cluster.running import Cluster
from tests.hosts.host import Host

GCS_PORT = 6379
REDIS_PORT = 6380
HANGS_S = 600.0
"""What starts, ends or answers has done so by then, however busy the machine is, or it hangs."""
WHOLE_TEST_S = 1200
"""For a test, which starts a dozen such processes, some of them one after the other."""
TOKEN = "of-the-tests-" + "0123456789abcdef" * 2
OBJECT_STORE_BYTES = 80 << 20
_RAY = (str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats")
_COUNT_NODES = """
import sys, time
import ray
ray.init(sys.argv[1], log_to_driver=False)
give_up_at = time.monotonic() + float(sys.argv[3])
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[2]):
    assert time.monotonic() < give_up_at, ray.nodes()
    time.sleep(0.1)
"""
"""Of a Ray's address, how many nodes it is to have, and seconds for that."""
_SOCKETS = ("ss", "-H", "-tln", "sport", "=", f":{GCS_PORT}")


def environment(token: str = TOKEN) -> dict[str, str]:
    """Of processes that belong to the Ray, without what this process has of another one."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RAY_") and name not in ("UCX_NET_DEVICES", "TMPDIR")
    }
    rays = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_worker_niceness": "0"}
    return {**own, **rays, "OMP_NUM_THREADS": "1"}


class _Node(NamedTuple):
    """What runs on a host as long as that is a node."""

    host: Host
    words: tuple[str, ...]
    process: subprocess.Popen[str]


@dataclass
class RayHosts:
    """A Ray whose nodes are hosts; the first one is its head."""

    head: Host
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of Ray's processes, and of the workers, beside `environment`."""
    nodes: dict[str, Host] = field(default_factory=dict)
    _started: list[_Node] = field(default_factory=list)

    @property
    def address(self) -> str:
        """Of the head, as Ray has it."""
        return f"{self.head.address}:{GCS_PORT}"

    @classmethod
    def start(
        cls, head: Host, num_cpus: int = 0, variables: Mapping[str, str] | None = None
    ) -> RayHosts:
        """Start a Ray on its head alone, and wait until that listens."""
        ray = cls(head, variables or {})
        ray._start(head, num_cpus, {}, "--head", f"--port={GCS_PORT}", "--include-dashboard=false")
        give_up_at = time.monotonic() + HANGS_S
        while not head.run(*_SOCKETS):
            assert time.monotonic() < give_up_at, "Ray's head does not listen"
            time.sleep(0.05)
        return ray

    def add(self, host: Host, labels: Mapping[str, str], num_cpus: int = 1) -> None:
        """Let a host become a node; does not wait for it."""
        self._start(host, num_cpus, labels, f"--address={self.address}")

    def wait_for_nodes(self) -> None:
        """Return when every host has become a node."""
        count = (self.address, str(len(self.nodes)), str(HANGS_S))
        waiting = self.head.spawn(
            *(sys.executable, "-c", _COUNT_NODES, *count), environment=environment()
        )
        assert waiting.wait() == 0, "a host has not become a node"

    def kill_head(self) -> None:
        """End every process of the head's host but its first one, and Redis, and wait for it."""
        killed = []
        for process in self.head.processes():
            with contextlib.suppress(psutil.Error):  # it has ended
                if process.pid != self.head.pid and "redis" not in process.name():
                    process.kill()
                    killed.append(process)
        _, left = psutil.wait_procs(killed, timeout=HANGS_S)
        assert not left

    def restart_ended(self) -> None:
        """Start nodes again whose raylet has ended though their host is up, as KubeRay does.

        A raylet ends when it hears that its head takes it for dead.
        """
        for node in list(self._started):
            if node.process.poll() is not None and node.host.is_up:
                self._started.remove(node)
                self._spawn(node.host, node.words)

    def _start(self, host: Host, num_cpus: int, labels: Mapping[str, str], *words: str) -> None:
        self.nodes[host.name] = host
        more = (
            f"--node-ip-address={host.address}",
            f"--num-cpus={num_cpus}",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            "--labels=" + ",".join(f"{key}={value}" for key, value in labels.items()),
        )
        self._spawn(host, (*words, *more))

    def _spawn(self, host: Host, words: tuple[str, ...]) -> None:
        process = host.spawn(
            *_RAY,
            *words,
            environment={**environment(), **self.variables},
            stdout=subprocess.DEVNULL,
        )
        self._started.append(_Node(host, words, process))


@dataclass
class ServedCluster(Cluster):
    """One that `kvrelay serve` runs on a host, as this machine reaches it."""

    said: str
    """What the command has printed."""
    process: subprocess.Popen[str]
    grpc_address: str

    @property
    def metrics_addresses(self) -> list[str]:
        return re.findall(r"http://(\S+)/metrics", self.said)


@contextmanager
def serving(
    host: Host,
    *options: str,
    command: str = "serve",
    variables: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Run `kvrelay serve`, or `kvrelay router`, on a host; it is told to end, and does."""
    words = (sys.executable, "-m", "kvrelay.deploy", command, *options)
    process = host.spawn(
        *words,
        environment=dict(environment() if variables is None else variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            process.communicate(timeout=HANGS_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def kvrelay(host: Host, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of kvrelay on a host until it ends."""
    process = host.spawn(
        *(sys.executable, "-m", "kvrelay.deploy", *words),
        environment=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    said, errors = process.communicate(timeout=HANGS_S)
    return subprocess.CompletedProcess(words, process.returncode, said, errors)


def start_redis(host: Host) -> str:
    """Let a host keep what Ray's head has to remember; gives the address."""
    port = ("--port", str(REDIS_PORT), "--bind", "0.0.0.0", "--protected-mode", "no")
    host.spawn("redis-server", *port, "--save", "", stdout=subprocess.DEVNULL)
    while not host.run("ss", "-H", "-tln", "sport", "=", f":{REDIS_PORT}"):
        time.sleep(0.05)
    return f"{host.address}:{REDIS_PORT}"


def until_ready(process: subprocess.Popen[str]) -> str:
    """All that `kvrelay serve` says until it is ready."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if "Ctrl-C stops it" in line:
            return said
    raise AssertionError(f"kvrelay serve has ended:\n{said}")


def refusal(host: Host, *options: str, variables: Mapping[str, str] | None = None) -> str:
    """What `kvrelay serve` says when it does not start, on a host."""
    with serving(host, *options, variables=variables) as process:
        said, _ = process.communicate(timeout=HANGS_S)
    assert process.returncode in (1, 2), said
    return said


def options_on(host: Host, model: Path) -> list[str]:
    """Of `kvrelay serve` on a host: every port is any free one, and this machine reaches it."""
    anywhere = f"{host.address}:0"
    words = ["--model", str(model), "--dtype", "float32", "--kv-memory", "4MiB"]
    words += ["--grpc", anywhere, "--http", anywhere, "--metrics", anywhere]
    return [*words, "--admin", "127.0.0.1:0", "--audit-pages", "--insecure"]


async def connected(process: subprocess.Popen[str], ca: bytes | None = None) -> ServedCluster:
    """The cluster that a command serves, once it is ready; by TLS if there is an authority."""
    said = await asyncio.to_thread(until_ready, process)
    found = re.search(r"gRPC +(\S+)", said)
    assert found, said
    options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    if ca is None:
        channel = grpc.aio.insecure_channel(found[1], options)
    else:
        credentials = grpc.ssl_channel_credentials(ca)
        channel = grpc.aio.secure_channel(found[1], credentials, options)
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    return ServedCluster(stub, said, process, found[1])


def status(host: Host, server: str, *options: str) -> Sequence[dict[str, object]]:
    """Every worker, as `kvrelay status` on a host says."""
    words = (sys.executable, "-m", "kvrelay.deploy", "status", "--json", "--server", server)
    workers: list[dict[str, object]] = json.loads(host.run(*words, *options))["workers"]
    return workers
