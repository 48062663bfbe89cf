"""A `FileIO` of plain reads and writes, which a test can end in the middle of any byte."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvrelay.mem_cache.storage import storage_index
from kvrelay.mem_cache.storage.file_io import FilePiece


class Killed(BaseException):
    """The process ends here: no handler of errors sees it."""


@dataclass
class Budget:
    """Bytes that may still be written, to whatever file, before the process is killed."""

    left: int | None = None

    def spend(self, nbytes: int) -> int:
        """How many of these bytes reach the file."""
        if self.left is None:
            return nbytes
        granted = min(nbytes, self.left)
        self.left -= granted
        return granted


@dataclass(eq=False)
class PlainTransfer:
    """Moves one piece with each poll."""

    files: PlainFiles
    file: int
    pieces: list[FilePiece]
    is_write: bool
    ended: bool = False

    def poll(self) -> bool | None:
        assert not self.ended, "polled after its end"
        if self.pieces and self._move(self.pieces.pop(0)) and self.pieces:
            return None
        self.ended = True
        self.files.running.remove(self)
        return not self.files.failed.pop(self, False)

    def _move(self, piece: FilePiece) -> bool:
        """False: an error ends the transfer."""
        memory = (ctypes.c_char * piece.nbytes).from_address(piece.address)
        if self.is_write:
            if self.files.write_fails:
                self.files.failed[self] = True
                return False
            granted = self.files.budget.spend(piece.nbytes)
            os.pwrite(self.file, memoryview(memory)[:granted], piece.offset)
            if granted < piece.nbytes:
                raise Killed
            return True
        view: Any = memoryview(memory).cast("B")
        if not self.files.read_fails and os.preadv(self.file, [view], piece.offset) == piece.nbytes:
            return True
        self.files.failed[self] = True
        return False


@dataclass(eq=False)
class PlainFiles:
    """See `FileIO`; checks that transfers use what was added, and nothing that was removed."""

    budget: Budget = field(default_factory=Budget)
    write_fails: bool = False
    read_fails: bool = False
    memory: list[tuple[int, int]] = field(default_factory=list)
    files: dict[int, int] = field(default_factory=dict)
    running: list[PlainTransfer] = field(default_factory=list)
    failed: dict[PlainTransfer, bool] = field(default_factory=dict)

    def add_memory(self, address: int, nbytes: int) -> None:
        self.memory.append((address, nbytes))

    def add_file(self, file: int, nbytes: int) -> None:
        assert file not in self.files
        self.files[file] = nbytes

    def remove_file(self, file: int) -> None:
        assert not any(one.file == file for one in self.running), "a transfer uses it"
        del self.files[file]

    def read(self, file: int, pieces: Sequence[FilePiece]) -> PlainTransfer:
        return self._start(file, pieces, is_write=False)

    def write(self, file: int, pieces: Sequence[FilePiece]) -> PlainTransfer:
        return self._start(file, pieces, is_write=True)

    def close(self) -> None:
        assert not self.running
        assert not self.files

    def _start(self, file: int, pieces: Sequence[FilePiece], *, is_write: bool) -> PlainTransfer:
        for piece in pieces:
            assert piece.offset + piece.nbytes <= self.files[file]
            assert any(
                start <= piece.address and piece.address + piece.nbytes <= start + nbytes
                for start, nbytes in self.memory
            ), "memory that was not added"
        transfer = PlainTransfer(self, file, list(pieces), is_write)
        self.running.append(transfer)
        return transfer


def kill_index_writes(patch: pytest.MonkeyPatch, budget: Budget) -> None:
    """Let the bytes of the index count, too."""

    def write(file: int, packed: bytes, offset: int) -> None:
        granted = budget.spend(len(packed))
        os.pwrite(file, packed[:granted], offset)
        if granted < len(packed):
            raise Killed

    patch.setattr(storage_index, "_write", write)
