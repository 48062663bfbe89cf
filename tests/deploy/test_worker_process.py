"""The proof that a process has ended: of real processes, killed and stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvrelay.deploy.nodes.worker_process import ProcessIdentity, WorkerProcess

TELL = (
    "import os, time\n"
    "from kvrelay.deploy.nodes.worker_process import ProcessIdentity\n"
    "print(ProcessIdentity.of(os.getpid()).start_ticks, flush=True)\n"
    "time.sleep(600)"
)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", TELL], stdout=subprocess.PIPE, text=True) as child:
        yield child
        child.kill()


def identity_of(child: subprocess.Popen[str]) -> ProcessIdentity:
    assert child.stdout is not None
    start_ticks = int(child.stdout.readline())
    return replace(ProcessIdentity.of(os.getpid()), pid=child.pid, start_ticks=start_ticks)


async def ends(process: WorkerProcess, *, within: float) -> bool:
    try:
        async with asyncio.timeout(within):
            await process.ended()
    except TimeoutError:
        return False
    return True


async def test_the_end_of_a_process_is_noticed_before_its_parent_asks(
    child: subprocess.Popen[str],
) -> None:
    process = WorkerProcess.find(identity_of(child))
    assert process is not None
    assert not await ends(process, within=0.05)
    child.kill()
    assert await ends(process, within=30)
    assert child.returncode is None
    process.kill()  # changes nothing


async def test_a_process_that_is_stopped_has_not_ended_but_can_be_killed(
    child: subprocess.Popen[str],
) -> None:
    process = WorkerProcess.find(identity_of(child))
    assert process is not None
    os.kill(child.pid, signal.SIGSTOP)
    assert not await ends(process, within=0.2)
    process.kill()
    assert await ends(process, within=30)


async def test_a_process_that_was_reaped_is_killed_without_an_error(
    child: subprocess.Popen[str],
) -> None:
    process = WorkerProcess.find(identity_of(child))
    assert process is not None
    child.kill()
    child.wait()
    process.kill()  # before the loop has noticed the end
    assert await ends(process, within=30)


async def test_a_process_that_has_ended_before_is_found_to(child: subprocess.Popen[str]) -> None:
    identity = identity_of(child)
    child.kill()
    child.wait()
    process = WorkerProcess.find(identity)
    assert process is not None
    assert await ends(process, within=0)


async def test_another_process_with_its_pid_is_not_taken_for_it(
    child: subprocess.Popen[str],
) -> None:
    identity = identity_of(child)
    earlier = replace(identity, start_ticks=identity.start_ticks - 1)
    process = WorkerProcess.find(earlier)
    assert process is not None
    assert await ends(process, within=0)
    process.kill()
    assert child.poll() is None


@pytest.mark.parametrize("elsewhere", ["boot_id", "pid_namespace"])
async def test_a_process_on_another_machine_cannot_be_observed(elsewhere: str) -> None:
    identity = ProcessIdentity.of(os.getpid())
    changes: dict[str, Any] = {elsewhere: "other"}
    assert WorkerProcess.find(replace(identity, **changes)) is None


def test_neither_the_command_nor_a_worker_that_says_who_it_is_has_imported_torch():
    """A supervisor asks a new process that first, and a test's obedient worker needs no torch."""
    modules = "kvrelay.deploy.nodes.worker_host, kvrelay.deploy.deployment"
    code = f"import sys, {modules}; print({{'torch', 'numba'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("set()\n", "")


_STUCK = """
import logging, threading, time
from kvrelay.deploy.nodes.worker_host import WorkerHost
from kvrelay.engine.config import WorkerConfig
from kvrelay.wire.worker_info import WorkerRole
from pathlib import Path

config = WorkerConfig("decode-0", WorkerRole.DECODE, Path("none"), "none", worker_lease=1)
host = WorkerHost(config, None, logging.WARNING)
logging.getLogger().handlers[0].acquire()  # by a thread that waits for who reads standard error
threading.Thread(target=host._end_without_lease, daemon=True).start()
time.sleep(20)
"""


def test_a_worker_without_a_lease_ends_though_it_cannot_log():
    done = subprocess.run([sys.executable, "-c", _STUCK], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (72, b"")
