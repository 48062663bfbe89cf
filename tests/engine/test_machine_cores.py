"""Workers of one machine see who of them computes, whatever becomes of whom."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from kvrelay.engine.worker import machine_cores
from kvrelay.engine.worker.machine_cores import MachineCores

NEIGHBOUR = """
import os, sys
from pathlib import Path
from kvrelay.engine.worker.machine_cores import MachineCores

if sys.argv[3]:
    os.sched_setaffinity(0, {int(sys.argv[3])})
cores = MachineCores(int(sys.argv[2]), Path(sys.argv[1]))
print("joined", flush=True)
for line in sys.stdin:
    if line == "leave\\n":
        cores.close()
    else:
        cores.busy = line == "busy\\n"
    print("done", flush=True)
"""
THREADS = 1
CORES = sorted(os.sched_getaffinity(0))


class Neighbour:
    """Another process that has joined."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert self._answer() == "joined\n"

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def do(self, what: str) -> None:
        """Say that it is ``busy`` or ``idle``, or ``leave``."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        assert self._answer() == "done\n"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def neighbour(directory: Path, threads: int = THREADS, core: str = "") -> Iterator[Neighbour]:
    command = [sys.executable, "-c", NEIGHBOUR, str(directory), str(threads), core]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Neighbour(process)
        finally:
            process.kill()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cores"


@pytest.fixture
def cores(directory: Path) -> Iterator[MachineCores]:
    with closing(MachineCores(THREADS, directory)) as cores:
        yield cores


def found(cores: MachineCores) -> tuple[int, int]:
    cores.find()
    return cores.count_threads()


def test_a_worker_alone_has_no_neighbours(cores: MachineCores) -> None:
    cores.busy = True
    assert found(cores) == (0, 0)
    assert cores.num_cores == len(CORES)


def test_others_are_seen_to_compute_at_once(cores: MachineCores, directory: Path) -> None:
    with neighbour(directory) as other:
        assert found(cores) == (0, 1)
        other.do("busy")
        assert cores.count_threads() == (1, 0)
        other.do("idle")
        assert cores.count_threads() == (0, 1)
        other.do("leave")
        assert found(cores) == (0, 0)


def test_to_leave_twice_closes_nothing_of_others(directory: Path) -> None:
    cores = MachineCores(THREADS, directory)
    cores.close()
    with (directory / "other").open("w") as other:
        cores.close()
        other.write("open")
    cores.busy = True


def test_two_workers_of_one_process_are_two(cores: MachineCores, directory: Path) -> None:
    with closing(MachineCores(THREADS, directory)) as other:
        other.busy = True
        assert found(cores) == (1, 0)
        assert found(other) == (0, 1)
    assert found(cores) == (0, 0)


def test_a_killed_worker_does_not_compute_and_its_file_goes(
    cores: MachineCores, directory: Path
) -> None:
    with neighbour(directory) as other:
        other.do("busy")
        assert found(cores) == (1, 0)
        other.kill()
        assert len(list(directory.iterdir())) == 2
        assert found(cores) == (0, 0)
        assert len(list(directory.iterdir())) == 1


def test_a_dead_workers_file_that_was_never_seen_goes_too(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with neighbour(directory) as other:
        other.do("busy")
        other.kill()
    monkeypatch.setattr(machine_cores, "directory_of_user", lambda: directory)
    joined = MachineCores.join(THREADS)
    assert joined is not None
    with closing(joined) as cores:
        assert cores.count_threads() == (0, 0)
        assert len(list(directory.iterdir())) == 1
    assert not list(directory.iterdir())


def test_a_file_that_is_taken_for_a_dead_workers_is_made_again(
    cores: MachineCores, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody sees it after it was made and before it has its lock."""
    lock, seen = fcntl.flock, list[int]()

    def flock(file: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX and not seen:
            seen.append(file)
            cores.find()
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with closing(MachineCores(THREADS, directory)) as other:
        assert seen
        other.busy = True
        assert found(cores) == (1, 0)


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_threads_count_where_they_may_run(cores: MachineCores, directory: Path) -> None:
    with neighbour(directory, threads=2, core=str(CORES[0])):
        assert found(cores) == (0, 1)  # two threads on one core take one core
    with neighbour(directory, threads=2):
        assert found(cores) == (0, 2)


def test_what_is_no_workers_file_counts_for_nothing(cores: MachineCores, directory: Path) -> None:
    (directory / "short").write_bytes(b"x")
    (directory / "other").write_bytes(bytes(4096))
    (directory / "link").symlink_to("/etc/passwd")
    assert found(cores) == (0, 0)


def test_a_directory_that_is_gone_costs_nothing_but_the_neighbours(
    cores: MachineCores, directory: Path
) -> None:
    with neighbour(directory):
        assert found(cores) == (0, 1)
        directory.rename(directory.with_name("away"))
        assert found(cores) == (0, 0)
        cores.busy = True


def count_open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize(("module", "name"), [(fcntl, "flock"), (mmap, "mmap"), (os, "write")])
def test_a_place_that_cannot_be_had_leaves_nothing(
    module: ModuleType, name: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    open_before = count_open_files()
    with monkeypatch.context() as patch:
        patch.setattr(module, name, full)
        with pytest.raises(OSError, match="No space"):
            MachineCores(THREADS, directory)
    assert not list(directory.iterdir())
    assert count_open_files() == open_before


def test_the_directory_is_of_the_user_alone(directory: Path, cores: MachineCores) -> None:
    assert directory.stat().st_mode & 0o777 == 0o700


def of_others(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(directory, 12345, -1)
    else:
        pytest.skip("only root can give a directory away")


def open_to_others(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o770)


def elsewhere(directory: Path) -> None:
    directory.with_name("real").mkdir(mode=0o700)
    directory.symlink_to(directory.with_name("real"))


def no_directory(directory: Path) -> None:
    directory.write_text("")


def nowhere(directory: Path) -> None:
    directory.parent.rmdir()


@pytest.mark.parametrize("make", [of_others, open_to_others, elsewhere, no_directory, nowhere])
def test_without_a_directory_of_its_own_a_worker_shares_nothing(
    make: Callable[[Path], None],
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make(directory)
    monkeypatch.setattr(machine_cores, "directory_of_user", lambda: directory)
    assert MachineCores.join(THREADS) is None
    (line,) = [one.message for one in caplog.records if one.name == machine_cores.__name__]
    assert "--prompt-threads" in line
    assert str(directory) in line
