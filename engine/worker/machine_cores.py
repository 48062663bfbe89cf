"""The workers of this machine that compute at present, so that others may use idle cores.

Each worker process has a file in its user's directory in shared memory. It records the process's
threads, the cores that it may run on, and whether it computes. Only that process writes it. It
holds a lock on the file, which the kernel releases when the process ends, however it ends. Any
worker that finds a file without a lock removes it. So no worker waits for another, or asks another.

The directory belongs to the user and not to a cluster, since two clusters on one machine share its
cores, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import secrets
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108
_MAGIC: Final = b"KRC1"
_RECORD: Final = struct.Struct("<?3x4sI128s")
"""A record: whether it computes, `_MAGIC`, its threads, a bit for each core that it may run on."""
_BUSY: Final = 0
"""The place of the first field."""
_MOST_CORES: Final = 8 * 128
_CLOSED: Final = -1


def directory_of_user() -> Path:
    """The directory in which the workers of this user have their files."""
    return _SHARED_MEMORY / f"kvrelay-cores-{os.geteuid()}"


class MachineCores:
    """A worker's entry among those of its machine: shows that it computes, and sees who else does.

    `busy` is for the engine thread; the methods about other workers are for the forward thread.

    Args:
        threads: the number that the worker computes with.
        directory: of this user alone; made if it is not there.

    Raises:
        OSError: the directory cannot be made, or others may write there.
    """

    def __init__(self, threads: int, directory: Path) -> None:
        cores = os.sched_getaffinity(0)
        self.num_cores = len(cores)
        """The number of cores that this process may run on."""
        self._cores = sum(1 << core for core in cores if core < _MOST_CORES)
        self._directory = directory
        _make_private(directory)
        bits = self._cores.to_bytes(_MOST_CORES // 8, "little")
        record = _RECORD.pack(False, _MAGIC, threads, bits)
        self._path, self._file, self._memory = _create(directory, record)
        self._others: dict[str, _Other] = {}

    @classmethod
    def join(cls, threads: int) -> MachineCores | None:
        """Join the machine's workers. Returns None if that fails; a line in the log says why.

        Files of workers that died are removed.
        """
        try:
            cores = cls(threads, directory_of_user())
        except OSError as error:
            logger.warning("no cores are shared with other workers (--prompt-threads): %s", error)
            return None
        cores.find()
        return cores

    @property
    def busy(self) -> bool:
        """Whether this worker computes, as the others see it."""
        return bool(self._memory[_BUSY])

    @busy.setter
    def busy(self, busy: bool) -> None:
        self._memory[_BUSY] = busy

    def find(self) -> None:
        """Find which workers have come and gone; removes the files of those that died."""
        try:
            names = {path.name for path in self._directory.iterdir()} - {self._path.name}
        except OSError:  # the directory was removed
            names = set()
        for name in self._others.keys() - names:
            self._others.pop(name).close()
        for name in names:
            other = self._others.get(name) or _Other.open(self._directory / name, self._cores)
            if other is None:
                continue
            self._others[name] = other
            if not other.lives():
                # While the lock is held here, in case it has only begun to live: see `_create`.
                with contextlib.suppress(OSError):
                    (self._directory / name).unlink()
                self._others.pop(name).close()

    def count_threads(self) -> tuple[int, int]:
        """Count threads of other workers on this one's cores: of computing and of idle ones.

        Counts the workers that `find` has found.
        """
        busy = idle = 0
        for other in self._others.values():
            if other.memory[_BUSY]:
                busy += other.threads
            else:
                idle += other.threads
        return busy, idle

    def close(self) -> None:
        """Leave. Further calls do nothing. Forwards have ended.

        The memory stays mapped, so that the engine may still write `busy`, to no effect.
        """
        file, self._file = self._file, _CLOSED
        if file == _CLOSED:
            return
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(file)
        for other in self._others.values():
            other.close()
        self._others.clear()


@dataclass(frozen=True, slots=True)
class _Other:
    """Another worker's file, open for reading."""

    file: int
    memory: mmap.mmap
    threads: int
    """Its threads that compete for this worker's cores."""

    @classmethod
    def open(cls, path: Path, own_cores: int) -> _Other | None:
        """Open another worker's file. Returns None if it is gone, or is no such file."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            memory = mmap.mmap(file, _RECORD.size, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # it is not written yet
            os.close(file)
            return None
        _, magic, threads, cores = _RECORD.unpack(memory[:])
        shared = (int.from_bytes(cores, "little") & own_cores).bit_count()
        other = cls(file, memory, min(threads, shared))
        if magic == _MAGIC:
            return other
        other.close()
        return None

    def lives(self) -> bool:
        """Whether its process holds the lock. If not, this process holds it until `close`."""
        try:
            fcntl.flock(self.file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # most often because its process has the lock
            return True
        return False

    def close(self) -> None:
        """Close it, and release its lock if this process holds it."""
        self.memory.close()
        os.close(self.file)


def _make_private(directory: Path) -> None:
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not is_own or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{directory} is not a directory of this user alone")


def _create(directory: Path, content: bytes) -> tuple[Path, int, mmap.mmap]:
    """Create a locked file with `content`. Returns its path, descriptor and memory."""
    while True:
        path = directory / f"{os.getpid()}-{secrets.token_hex(4)}"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, content)
            fcntl.flock(file, fcntl.LOCK_EX)
            memory = mmap.mmap(file, len(content))
        except OSError:
            path.unlink(missing_ok=True)
            os.close(file)
            raise
        if os.fstat(file).st_nlink:
            return path, file, memory
        memory.close()
        os.close(file)  # another worker saw it before it was locked, and removed it as a dead one's
