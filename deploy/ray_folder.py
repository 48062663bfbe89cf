"""The folder of one local Ray: made for it, and removed even after a kill, at the next start."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final, TextIO

_PREFIX: Final = "kvrelay-"
_LOCK: Final = "owner.lock"
_LONGEST_TEMP: Final = 40
"""Ray's unix sockets lie some 60 characters deeper, and the system's limit is 107."""


class RayFolder:
    """A fresh temporary folder that this process owns until it removes or keeps it.

    The owner holds a lock on a file in it, which the system drops when the
    owner dies, however that comes: a folder whose file nobody has locked is
    left over. One without that file is kept, or is not a RayFolder.
    """

    def __init__(self) -> None:
        parent = _short_temp()
        _remove_left_over(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = self._locked()

    def remove(self) -> None:
        """Delete it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def keep(self) -> None:
        """Leave it to the user."""
        (self.path / _LOCK).unlink(missing_ok=True)
        self._lock.close()

    def _locked(self) -> TextIO:
        """Make the lock's file, which has its name only once it is locked."""
        unnamed = self.path / "owner.new"
        file = unnamed.open("w")
        fcntl.flock(file, fcntl.LOCK_EX)
        unnamed.rename(self.path / _LOCK)
        return file


def _remove_left_over(parent: Path) -> None:
    """Delete the folders whose owners are dead; other users' and anything unclear stay."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            _remove_if_left_over(folder)


def _remove_if_left_over(folder: Path) -> None:
    """Raises OSError where that is not for us to say, above all while the owner lives."""
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        return
    lock = folder / _LOCK
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its owner may have decided to keep it after it was opened here.
        if lock.exists():
            shutil.rmtree(folder, ignore_errors=True)


def _short_temp() -> Path:
    temp = tempfile.gettempdir()
    return Path(temp if len(temp) <= _LONGEST_TEMP else "/tmp")  # noqa: S108 (mkdtemp is private)
