"""CPU time of processes by thread, and the stacks of their threads.

The times are the kernel's own, to the nanosecond, and cost nothing. Names of Python's threads and
stacks come from py-spy, which may look at another process only as root or its parent.
"""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

SAMPLES_A_SECOND = 100
NATIVE = ", native"
"""Behind a name that a thread has from the kernel alone."""


class ProfilerError(RuntimeError):
    """py-spy is missing or may not look."""


@dataclass(frozen=True)
class Thread:
    """A thread of a process."""

    pid: int
    tid: int
    name: str
    """Python's, or the kernel's and `NATIVE` where Python does not know the thread."""


def cpu_seconds(pids: Iterable[int]) -> dict[tuple[int, int], float]:
    """CPU seconds until now of each thread that runs, by process and thread."""
    seconds = {}
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").glob("*"):
            try:
                seconds[pid, int(task.name)] = int(_read(task / "schedstat").split()[0]) / 1e9
            except OSError:  # it has just ended
                continue
    return seconds


def threads_of(pid: int, *, python: bool) -> list[Thread]:
    """The threads that a process has; `python`: with the names that Python gave them."""
    names = _python_names(pid) if python else {}
    threads = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            tid = int(task.name)
            name = names.get(tid) or _read(task / "comm").strip() + NATIVE
            threads.append(Thread(pid, tid, name))
        except OSError:
            continue
    return threads


def _read(path: Path) -> str:
    return path.read_text()


def _python_names(pid: int) -> dict[int, str]:
    try:
        dumped = subprocess.run(  # noqa: S603 (our own command)
            [_py_spy(), "dump", "--json", "--pid", str(pid)],
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise ProfilerError(f"py-spy cannot look at process {pid}: {error}") from error
    return {one["os_thread_id"]: one["thread_name"] for one in json.loads(dumped.stdout)}


def _py_spy() -> str:
    """The program's path."""
    try:
        files = metadata.files("py-spy") or ()
    except metadata.PackageNotFoundError:
        raise ProfilerError("the package py-spy is missing") from None
    return str(next(file.locate() for file in files if file.name == "py-spy"))


Stacks = Counter[tuple[str, ...]]
"""How often each stack was seen, the thread's name first and the innermost frame last."""


def sampled(pids: Iterable[int], seconds: float) -> dict[int, Stacks]:
    """Sample the stacks of the threads that run, of each process, for a while. Blocks.

    Processes go on while they are looked at, so some stacks cannot be read, and are left out.

    Raises:
        ProfilerError: py-spy is missing, or cannot be run.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = {pid: Path(folder) / str(pid) for pid in pids}
        recorders = [_record(pid, seconds, path) for pid, path in paths.items()]
        for recorder in recorders:
            recorder.wait()
        return {pid: _parse(path) for pid, path in paths.items()}


def _record(pid: int, seconds: float, path: Path) -> subprocess.Popen[bytes]:
    options = ["--threads", "--nonblocking", "--full-filenames", "--format", "raw"]
    rate = ["--rate", str(SAMPLES_A_SECOND), "--duration", str(math.ceil(seconds))]
    try:
        return subprocess.Popen(  # noqa: S603 (our own command)
            [_py_spy(), "record", *options, *rate, "--pid", str(pid), "--output", str(path)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        raise ProfilerError(f"py-spy cannot be run: {error}") from error


def _parse(path: Path) -> Stacks:
    stacks: Stacks = Counter()
    for line in path.read_text().splitlines() if path.exists() else ():
        stack, _, count = line.rpartition(" ")
        stacks[tuple(stack.split(";"))] += int(count)
    return stacks
