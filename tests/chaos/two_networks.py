"""Two network namespaces with a slow link between them, and KV that goes over it by TCP.

On one host UCX reads another process's memory by itself, and a read is over before
anything can happen to it. Over this link bytes are on their way for a long time: they
arrive after their request has been aborted, and after the process that sent them has
died. Prefill workers have their NIXL agents in one namespace, decode workers in the
other; gRPC, Ray and the metrics stay on the host's loopback.

Linux, root, and the tools ip and tc of iproute2 are needed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from kvrelay.deploy.worker_host import HOSTS, DecodeWorker, PrefillWorker, Worker, WorkerHost
from kvrelay.engine.config import Role, WorkerConfig
from kvrelay.kv_transfer.agent import TransferAgent

RATE = "16mbit"
"""Of the link: a prompt of 250 tokens of the tiny model takes a tenth of a second."""
BURST = "16kb"
QUEUE = "2s"
"""What the link holds at most; more is dropped, and sent again by TCP."""
SLOW_LINK = (
    f"KV goes by TCP between two network namespaces, over a link of {RATE} (`tc tbf`): bytes "
    "are on their way for a long time."
)
DEVICE = "kv0"
PLACES = {Role.PREFILL: "10.213.0.1/24", Role.DECODE: "10.213.0.2/24"}

_libc = ctypes.CDLL(None, use_errno=True)
_NEW_MOUNTS, _NEW_NETWORK = 0x00020000, 0x40000000
_PRIVATE = 0x4000 | 0x40000


def why_not() -> str:
    """What is missing here; empty if nothing is."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (iproute2)"
    probe = f"kvrelay-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False)
    if made.returncode:
        return f"ip netns add: {made.stderr.decode().strip()}"
    _ip("netns", "delete", probe)
    return ""


@contextmanager
def two_networks(rate: str = RATE) -> Iterator[None]:
    """Clusters that start in here have their prefill and decode workers' NIXL agents apart."""
    names = {role: f"kvrelay-{os.getpid()}-{role}" for role in PLACES}
    try:
        for name in names.values():
            _ip("netns", "add", name)
        here, there = names.values()
        _ip("-n", here, "link", "add", DEVICE, "type", "veth", "peer", DEVICE, "netns", there)
        for role, address in PLACES.items():
            _ip("-n", names[role], "address", "add", address, "dev", DEVICE)
            for device in ("lo", DEVICE):
                _ip("-n", names[role], "link", "set", device, "up")
            shape = ["root", "tbf", "rate", rate, "burst", BURST, "latency", QUEUE]
            _run("tc", "-n", names[role], "qdisc", "add", "dev", DEVICE, *shape)
        hosts = {
            Role.PREFILL: _apart(PrefillWorker, names[Role.PREFILL]),
            Role.DECODE: _apart(DecodeWorker, names[Role.DECODE]),
        }
        with mock.patch.dict(HOSTS, hosts):
            yield
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "delete", name], check=False)


def _apart(host: type[WorkerHost], namespace: str) -> type[WorkerHost]:
    return type(host.__name__, (_Apart, host), {"namespace": namespace})


class _Apart(WorkerHost):
    """A worker whose NIXL agent is in a network namespace of its own, and speaks TCP."""

    namespace: ClassVar[str]

    def _build(self, config: WorkerConfig) -> Worker:
        os.environ["UCX_TLS"] = "tcp"
        os.environ["UCX_NET_DEVICES"] = DEVICE
        make, namespace = TransferAgent.__init__, self.namespace

        def make_there(agent: TransferAgent, *args: Any) -> None:
            _in_a_thread(lambda: (enter(namespace), make(agent, *args)))

        TransferAgent.__init__ = make_there  # type: ignore[method-assign]
        return super()._build(config)


def enter(namespace: str) -> None:
    """Bring this thread, and those that it will start, into a network namespace.

    With a /sys of that network's: there UCX looks for its devices.
    """
    _check(_libc.unshare(_NEW_MOUNTS))
    _check(_libc.mount(b"none", b"/", None, _PRIVATE, None))
    with Path("/run/netns", namespace).open() as there:
        _check(_libc.setns(there.fileno(), _NEW_NETWORK))
    _check(_libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None))


def _in_a_thread(work: Callable[[], object]) -> None:
    """As no thread can leave what it has entered."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for failure in failures:
        raise failure


def _check(result: int) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    subprocess.run(words, check=True)
