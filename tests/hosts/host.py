"""A host: namespaces of its own for network, processes, mounts, IPC and name, on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.hosts.commands import run

DEVICE = "eth0"
START_S = 60.0
ENDS_S = 30.0
_FIRST = """
hostname "$1"
exec 9<"$2"
size=$3
shift 3
fds=()
for folder; do exec {fd}<"$folder"; fds+=("$fd"); done
mount -t tmpfs -o size="$size",mode=1777 tmpfs /tmp
mount -t tmpfs -o size=1g,mode=1777 tmpfs /dev/shm
mount -t sysfs sysfs /sys
for folder; do
    fd=${fds[0]}
    fds=("${fds[@]:1}")
    mkdir -p "$folder"
    mount --no-canonicalize --bind "/proc/self/fd/$fd" "$folder"
    exec {fd}<&-
done
mount --no-canonicalize --bind /proc/self/fd/9 /etc/hosts
exec 9<&-
trap "" CHLD
echo ready
exec sleep infinity
"""
"""The first process. With SIGCHLD ignored, the kernel buries the orphans of its namespace."""


def _kept(shared: Path) -> list[Path]:
    """What of this machine's /tmp a host has, too: the code may lie there, and its environment."""
    kept = [shared]
    for folder in (Path.cwd(), Path(sys.prefix), Path(sys.base_prefix)):
        if folder.is_relative_to("/tmp") and not any(map(folder.is_relative_to, kept)):
            kept.append(folder)
    return kept


def bury(process: subprocess.Popen[Any]) -> None:
    """Wait for the end of a process that is killed, and close the pipes to it."""
    process.wait(ENDS_S)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def isolated(*words: str) -> subprocess.Popen[str]:
    """Run a first process that ends when this thread does, however that ends."""
    tied = ("setpriv", "--pdeathsig", "KILL", "unshare", "--fork", "--kill-child", *words)
    return subprocess.Popen(tied, stdout=subprocess.PIPE, text=True)


def first_child(process: subprocess.Popen[str]) -> psutil.Process:
    """The process that `unshare --fork` has made, once it says that it is ready."""
    assert process.stdout is not None
    said = process.stdout.readline().strip()
    assert said == "ready", f"the namespaces could not be made: {said or 'see above'}"
    return psutil.Process(process.pid).children()[0]


@dataclass(frozen=True)
class Addresses:
    """Of one host in the network that it shares with the others."""

    ipv4: str
    ipv6: str


class Host:
    """One host, up from when it is made until `kill`. The network is its `Lan`'s to connect.

    Args:
        name: of the host.
        addresses: its own.
        shared: a folder that this machine and all hosts have at the same path.
        names: a file like /etc/hosts, for this host.
        temp_bytes: the size of its disk, which is /tmp.
    """

    def __init__(
        self, name: str, addresses: Addresses, shared: Path, names: Path, temp_bytes: int
    ) -> None:
        self.name = name
        self.addresses = addresses
        self._outer = isolated(
            *("--net", "--pid", "--mount", "--ipc", "--uts", "--mount-proc"),
            *("bash", "-euc", _FIRST, "bash", name, str(names), str(temp_bytes)),
            *map(str, _kept(shared)),
        )
        try:
            self._first = first_child(self._outer)
        except BaseException:
            self._outer.kill()
            bury(self._outer)
            raise
        self._namespace = _pid_namespace(self._first.pid)
        self._spawned = [self._outer]

    @property
    def address(self) -> str:
        """Its IPv4 address."""
        return self.addresses.ipv4

    @property
    def pid(self) -> int:
        """Of its first process, as this machine has it."""
        return self._first.pid

    @property
    def is_up(self) -> bool:
        return self._outer.poll() is None

    def run(self, *words: str, check: bool = True) -> str:
        """Run a command there to its end; returns what it prints on standard output."""
        if check:
            return run(*self._inside(words))
        return subprocess.run(self._inside(words), capture_output=True, text=True).stdout

    def spawn(
        self, *words: str, environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command there, which ends with the host at the latest.

        Args:
            words: the command.
            environment: of the command, in place of this process's.
            options: of `subprocess.Popen`.
        """
        spawned = subprocess.Popen(self._inside(words), env=environment, **options)
        self._spawned.append(spawned)
        return spawned

    def processes(self) -> list[psutil.Process]:
        """All that run there, the first one included, as this machine has them."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if _pid_namespace(process.pid) == self._namespace:
                    found.append(process)
        return found

    def kill(self) -> None:
        """End every process at once, as a host does that loses its power; its memory is gone."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._first.kill()
        self.wake()
        for spawned in self._spawned:
            bury(spawned)

    def pause(self) -> None:
        """Stop every process, also those that begin meanwhile; the network stays as it is."""
        self._signal_until(signal.SIGSTOP, psutil.STATUS_STOPPED)

    def wake(self) -> None:
        """Let all that `pause` has stopped go on."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        for spawned in self._spawned:  # they stop when their child inside does
            spawned.send_signal(signal.SIGCONT)

    def fill_disk(self) -> Path:
        """Write to its /tmp until that is full; returns the file, which `free_disk` deletes."""
        path = Path("/tmp/fills-the-disk")
        self.run("sh", "-c", f"cat /dev/zero >{path}", check=False)
        return path

    def free_disk(self) -> None:
        self.run("rm", "-f", "/tmp/fills-the-disk")

    def _inside(self, words: Sequence[str]) -> tuple[str, ...]:
        spaces = ("--net", "--pid", "--mount", "--ipc", "--uts")
        return ("nsenter", "--target", str(self.pid), *spaces, "--wdns=" + str(Path.cwd()), *words)

    def _signal_until(self, which: signal.Signals, status: str) -> None:
        give_up_at = time.monotonic() + START_S
        while others := [one for one in self.processes() if _status(one) not in (status, None)]:
            assert time.monotonic() < give_up_at, f"{self.name}: {others} are not {status}"
            for process in others:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(which)
            time.sleep(0.01)


def _pid_namespace(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/pid")  # noqa: PTH115 (Path raises other errors)


def _status(process: psutil.Process) -> str | None:
    """Its status; None if it has ended."""
    try:
        status: str = process.status()
    except psutil.NoSuchProcess:
        return None
    return None if status == psutil.STATUS_ZOMBIE else status
