"""An interface for moving bytes between memory and files, used by stores on disks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A run of bytes, in memory and in a file."""

    address: int
    offset: int
    """The position in the file."""
    nbytes: int


class FileTransfer(Protocol):
    """An interface to bytes that move until a poll reports their end."""

    def poll(self) -> bool | None:
        """Make progress. Returns None while bytes move; then, once, whether all have moved."""
        ...


class FileIO(Protocol):
    """An interface that moves bytes between memory and open files.

    One thread calls it; no method blocks for long.
    """

    def add_memory(self, address: int, nbytes: int) -> None:
        """Let transfers use this memory from now on. It must stay until `close`."""
        ...

    def add_file(self, file: int, nbytes: int) -> None:
        """Let transfers use the first `nbytes` of a descriptor, which stays open."""
        ...

    def remove_file(self, file: int) -> None:
        """Undo `add_file`, before the descriptor is closed. No transfer may use it."""
        ...

    def read(self, file: int, pieces: Sequence[FilePiece]) -> FileTransfer:
        """Begin to copy from a file to memory."""
        ...

    def write(self, file: int, pieces: Sequence[FilePiece]) -> FileTransfer:
        """Begin to copy from memory to a file."""
        ...

    def close(self) -> None:
        """Close it. Every transfer must have ended."""
        ...
