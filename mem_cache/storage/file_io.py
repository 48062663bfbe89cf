"""Bytes between memory and files, away from the caller: what stores on disks are built on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class FilePiece:
    """Neighbouring bytes, in memory and in a file."""

    address: int
    offset: int
    """In the file."""
    nbytes: int


class FileTransfer(Protocol):
    """Bytes that move until a poll says that they have ended."""

    def poll(self) -> bool | None:
        """Make progress. None: bytes still move; else, once, whether all have moved."""
        ...


class FileIO(Protocol):
    """Moves bytes between memory and open files. One thread calls it; no method blocks for long."""

    def add_memory(self, address: int, nbytes: int) -> None:
        """Let transfers use this memory from now on. It stays as it is until `close`."""
        ...

    def add_file(self, file: int, nbytes: int) -> None:
        """Let transfers use the first so many bytes of a descriptor, which stays open."""
        ...

    def remove_file(self, file: int) -> None:
        """End `add_file`, before the descriptor is closed. No transfer uses it."""
        ...

    def read(self, file: int, pieces: Sequence[FilePiece]) -> FileTransfer:
        """Begin to copy from a file to memory."""
        ...

    def write(self, file: int, pieces: Sequence[FilePiece]) -> FileTransfer:
        """Begin to copy from memory to a file."""
        ...

    def close(self) -> None:
        """End. Every transfer has ended."""
        ...
