"""`kvrelay leave`: the workers of a node drain before the node is shut down."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import stat
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

import click

from kvrelay.deploy.command_errors import with_clear_errors
from kvrelay.deploy.errors import DeployError
from kvrelay.deploy.nodes.worker_process import ProcessIdentity
from kvrelay.deploy.options.environment import allow_many_machines
from kvrelay.deploy.options.machine_options import MachineOptions
from kvrelay.deploy.options.option_flags import declared_options
from kvrelay.deploy.start_progress import StartProgress

if TYPE_CHECKING:
    from kvrelay.deploy.nodes.node_workers import NodeWorker

_PROCESS_TITLE: Final = b"ray::"
"""The beginning of the command line of each process of Ray's actors."""


@click.command(context_settings={"show_default": True})
@declared_options(MachineOptions, {"ray_address"})
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    help="Seconds to wait for the workers to end: longer than --drain-grace of their cluster.",
)
@with_clear_errors
def leave(*, debug: bool, ray_address: str | None, timeout: float) -> None:
    """Drain all workers of the Ray node that this machine is, before it is shut down.

    Ray places nothing more on this node. The workers take no more requests, finish their own or
    give them to others, and end; others take their places elsewhere. Run it on the node, in the
    container of its workers: as a preStop hook in Kubernetes, say. Workers of all clusters that
    share this Ray drain. The node itself goes on until you stop it.
    """
    allow_many_machines()
    from kvrelay.deploy.nodes.node_workers import leave_node

    progress = StartProgress(sys.stdout)
    workers = leave_node(ray_address or "auto", timeout)
    progress.line(f"Ray places nothing more here; {len(workers)} workers drain.")
    left = asyncio.run(drained(workers, timeout, progress))
    if left:
        raise DeployError(f"{', '.join(left)} still ran after {timeout:g} s (--timeout)")


async def drained(workers: list[NodeWorker], seconds: float, progress: StartProgress) -> list[str]:
    """Let the workers drain; return the names of those whose processes then still run."""
    give_up_at = time.monotonic() + seconds
    ending = [_end_of(worker, give_up_at, progress) for worker in workers]
    return [name for name in await asyncio.gather(*ending) if name]


async def _end_of(worker: NodeWorker, give_up_at: float, progress: StartProgress) -> str | None:
    """Ask a worker to drain and wait for its end; return its name if that does not come in time."""
    try:
        pidfd = os.pidfd_open(worker.pid)
    except ProcessLookupError:
        return None
    try:
        if not _is_actor(worker.pid):
            return None  # it has ended, and another program has its pid
        _drain_once(worker.pid, pidfd)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, ended.set)
        try:
            async with asyncio.timeout_at(_on_loop(give_up_at)):
                await ended.wait()
        except TimeoutError:
            return worker.name
        finally:
            asyncio.get_running_loop().remove_reader(pidfd)
    except ProcessLookupError:
        return None
    finally:
        os.close(pidfd)
    progress.line(f"{worker.name} has left.")
    return None


def _drain_once(pid: int, pidfd: int) -> None:
    """Send SIGTERM, unless an earlier call on this machine has: a second one ends it at once."""
    try:
        mark = _mark_of(pid)
    except OSError:  # rather a second one than none
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        return
    with mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        if os.fstat(mark.fileno()).st_size == 0:
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            with contextlib.suppress(OSError):  # a later call would send it again
                os.write(mark.fileno(), b"SIGTERM\n")


def _mark_of(pid: int) -> TextIO:
    """Open the file that all calls for one process share; empty until SIGTERM was sent."""
    folder = Path(tempfile.gettempdir()) / f"kvrelay-leave-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is somebody else's")  # whose links it could follow
    who = ProcessIdentity.of(pid)
    return (folder / f"{who.boot_id}-{pid}-{who.start_ticks}").open("a")


def _is_actor(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(_PROCESS_TITLE)
    except OSError:
        return False


def _on_loop(at: float) -> float:
    """Convert a time of CLOCK_MONOTONIC to the running loop's clock."""
    return asyncio.get_running_loop().time() + at - time.monotonic()
