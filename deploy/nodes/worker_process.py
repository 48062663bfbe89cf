"""Proof that a worker's process has ended, from the operating system.

Others release memory when they hear of a death, so it must be proven. Ray's report on a process, a
broken connection or silence is no proof. Linux has one: a pidfd refers to one process for ever, and
becomes readable when the last thread of that process has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_START_FIELD = 19
"""The index of the start time in /proc/PID/stat, counted from the field after the process's name.
"""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """The identity of one process, distinct from every other one on every machine."""

    boot_id: str
    """The id of the machine's present boot."""
    pid_namespace: str
    """The namespace in which `pid` means this process."""
    pid: int
    start_ticks: int
    """The time of its start, since the boot: another process may get the same pid later."""

    @classmethod
    def of_this_process(cls) -> Self | None:
        """Return the caller's own identity; None where /proc does not tell it."""
        try:
            return cls.of(os.getpid())
        except OSError:
            return None

    @classmethod
    def of(cls, pid: int) -> Self:
        """Return the identity of the process that has a pid now.

        The pid is that of this process's namespace. Raises OSError where /proc does not tell it.
        """
        return cls(_boot_id(), _pid_namespace(), pid, _start_ticks(pid))


class WorkerProcess:
    """A process on this machine. Belongs to the event loop that it is made on.

    Args:
        pidfd: refers to the process, and is closed here; None: it has ended already.
    """

    def __init__(self, pidfd: int | None) -> None:
        self._pidfd = pidfd
        self._ended = asyncio.Event()
        if pidfd is None:
            self._ended.set()
        else:
            asyncio.get_running_loop().add_reader(pidfd, self._notice_end)

    @classmethod
    def find(cls, identity: ProcessIdentity) -> Self | None:
        """Find the process, which may have ended; None if it cannot be observed from here."""
        try:
            if (identity.boot_id, identity.pid_namespace) != (_boot_id(), _pid_namespace()):
                return None
            pidfd = os.pidfd_open(identity.pid)
        except ProcessLookupError:
            return cls(None)
        except (OSError, AttributeError):  # /proc or pidfd_open is not there
            return None
        # The pidfd comes first: what then still began at the same time is what it refers to.
        if _is_running_since(identity.start_ticks, identity.pid):
            return cls(pidfd)
        os.close(pidfd)
        return cls(None)

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended: none of its threads will run again."""
        return self._ended.is_set()

    async def ended(self) -> None:
        """Wait until the process has ended: none of its threads will run again.

        A process that is stopped (SIGSTOP) has not ended.
        """
        await self._ended.wait()

    def kill(self) -> None:
        """Kill the process at once, even if it is stopped; do nothing if it has ended."""
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):  # ended, and not noticed yet
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def end(self, seconds: float) -> None:
        """Kill the process, and wait at most `seconds` for its end; then stop observing it."""
        self.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.ended()
        self.close()

    def close(self) -> None:
        """Stop observing the process. A task that waits for its end then waits for ever."""
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _notice_end(self) -> None:
        self.close()
        self._ended.set()


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


def _start_ticks(pid: int) -> int:
    _, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    return int(fields.split()[_START_FIELD])


def _is_running_since(start_ticks: int, pid: int) -> bool:
    try:
        return _start_ticks(pid) == start_ticks
    except OSError:
        return False
