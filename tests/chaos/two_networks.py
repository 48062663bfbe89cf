"""Two network namespaces with a slow link between them, and KV that goes over it by TCP.

On one host UCX copies from another process's memory directly, and a read ends before a fault
can happen to it. Over this link bytes take long: some arrive after their request was aborted,
or after the process that sent them has died. Prefill workers have their NIXL agents in one
namespace, decode workers in the other; gRPC, Ray and the metrics stay on the host's loopback.

Linux, root, and the tools ip, tc and ss of iproute2 are needed.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from kvrelay.deploy.nodes.worker_host import BUILDERS, BuildWorker, HostedWorker
from kvrelay.engine.config import WorkerConfig
from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.wire.worker_info import WorkerRole
from tests.hosts.commands import ABORT_CONNECTIONS, ip, run, shape

RATE = "16mbit"
"""The link's speed: 250 tokens of the tiny model take a tenth of a second."""
SLOW_LINK = (
    f"KV goes by TCP between two network namespaces, over a link of {RATE} (`tc tbf`): bytes "
    "are on their way for a long time."
)
DEVICE = "kv0"
PLACES = {WorkerRole.PREFILL: "10.213.0.1/24", WorkerRole.DECODE: "10.213.0.2/24"}

_libc = ctypes.CDLL(None, use_errno=True)
_NEW_MOUNTS, _NEW_NETWORK = 0x00020000, 0x40000000
_PRIVATE = 0x4000 | 0x40000


@dataclass(frozen=True)
class Link:
    """The two ends of the slow link, by namespace."""

    namespaces: tuple[str, ...]

    def cut(self) -> int:
        """Break all TCP connections at both ends; returns how many sockets those were.

        New ones can be made at once.
        """
        return sum(map(_cut, self.namespaces))


@contextmanager
def two_networks(rate: str = RATE) -> Iterator[Link]:
    """Put the NIXL agents of clusters started inside into two networks, one for each role."""
    names = {role: f"kvrelay-{os.getpid()}-{role}" for role in PLACES}
    try:
        for name in names.values():
            ip("netns", "add", name)
        here, there = names.values()
        ip("-n", here, "link", "add", DEVICE, "type", "veth", "peer", DEVICE, "netns", there)
        for role, address in PLACES.items():
            ip("-n", names[role], "address", "add", address, "dev", DEVICE)
            for device in ("lo", DEVICE):
                ip("-n", names[role], "link", "set", device, "up")
            run("tc", "-n", names[role], "qdisc", "add", "dev", DEVICE, *shape(rate))
        apart = {
            role: functools.partial(_build_apart, name, BUILDERS[role])
            for role, name in names.items()
        }
        with mock.patch.dict(BUILDERS, apart):
            yield Link(tuple(names.values()))
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "delete", name], check=False)


def _build_apart(namespace: str, build: BuildWorker, config: WorkerConfig) -> HostedWorker:
    """A worker whose NIXL agent is in a network namespace of its own, and speaks TCP."""
    os.environ["UCX_TLS"] = "tcp"
    os.environ["UCX_NET_DEVICES"] = DEVICE
    make = TransferAgent.__init__

    def make_there(agent: TransferAgent, *args: Any) -> None:
        def build_there() -> None:
            enter(namespace)
            make(agent, *args)

        _in_a_thread(build_there)

    TransferAgent.__init__ = make_there  # type: ignore[method-assign,assignment]
    return build(config)


def enter(namespace: str) -> None:
    """Move this thread, and those that it will start, into a network namespace.

    It gets a /sys of that network, because UCX looks for its devices there.
    """
    _check(_libc.unshare(_NEW_MOUNTS))
    _check(_libc.mount(b"none", b"/", None, _PRIVATE, None))
    with Path("/run/netns", namespace).open() as there:
        _check(_libc.setns(there.fileno(), _NEW_NETWORK))
    _check(_libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None))


def _in_a_thread(work: Callable[[], object]) -> None:
    """Run `work` in a thread of its own, because a thread cannot leave a namespace again."""
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


def _cut(namespace: str) -> int:
    """Abort the namespace's connections; each line that ss prints is one."""
    return len(run("ip", "netns", "exec", namespace, *ABORT_CONNECTIONS).splitlines())


def _check(result: int) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
