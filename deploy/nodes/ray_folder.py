"""The temporary folder of one local Ray; the folder of a killed process is removed later."""

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
"""The longest temporary path: Ray's unix sockets add some 60 characters, and the limit is 107."""


class RayFolder:
    """A new temporary folder that this process owns until it removes or keeps it.

    The owner holds a lock on a file in the folder. The system drops the lock when the owner dies,
    so a folder whose file is not locked is left over. A folder without that file was kept for the
    user, or is not one of these folders.
    """

    def __init__(self) -> None:
        parent = _short_temp()
        _remove_left_over(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = self._locked()

    def remove(self) -> None:
        """Delete the folder and everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def keep(self) -> None:
        """Leave the folder to the user: it is never removed."""
        (self.path / _LOCK).unlink(missing_ok=True)
        self._lock.close()

    def _locked(self) -> TextIO:
        """Make the lock's file; it is locked before it has its name, so never found unlocked."""
        unnamed = self.path / "owner.new"
        file = unnamed.open("w")
        fcntl.flock(file, fcntl.LOCK_EX)
        unnamed.rename(self.path / _LOCK)
        return file


def _remove_left_over(parent: Path) -> None:
    """Delete the folders whose owners are dead, except other users'."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            _remove_if_left_over(folder)


def _remove_if_left_over(folder: Path) -> None:
    """Delete a folder that is left over.

    Raises OSError if that cannot be determined, above all while its owner lives.
    """
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
