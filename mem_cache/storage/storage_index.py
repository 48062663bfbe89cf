"""The index of one folder of slots: a file that its writer appends to, and that others follow.

A record is written after the bytes that it describes are safe. So every whole record that is read
is true of its slot, or was until the slot was reused. A broken record between others is left out: a
reader of a slot sees which page it has.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from kvrelay.mem_cache.storage.storage_format import RECORD_BYTES, IndexRecord, StorageFormat
from kvrelay.mem_cache.storage.storage_slots import StoredPage

logger = logging.getLogger(__name__)

INDEX: Final = "index"
_READ_BYTES: Final = RECORD_BYTES << 14
_MOST_TRIES: Final = 20
"""How often a broken record is read before it is skipped, as it may just be being written."""
_SPARE_RECORDS: Final = 4096
"""The index is rewritten when it has this many records more than twice the pages."""


class FoundPages:
    """The page of each slot by the records read, the one that was put longest ago first."""

    def __init__(self) -> None:
        self.by_key: dict[bytes, IndexRecord] = {}
        self._by_slot: dict[int, bytes] = {}

    def take(self, record: IndexRecord) -> None:
        """Apply one more record."""
        self.forget(self._by_slot.get(record.slot))
        if record.is_there:
            self.forget(record.key)
            self.by_key[record.key] = record
            self._by_slot[record.slot] = record.key

    def forget(self, key: bytes | None) -> None:
        """Remove this page from its slot, if it has one."""
        record = None if key is None else self.by_key.pop(key, None)
        if record is not None:
            del self._by_slot[record.slot]


class IndexReader:
    """A reader that follows the index of a folder, which another process may write.

    Args:
        folder: may not have an index yet.
        layout: of the slots; an index of another one is treated as empty.
        most_tries: how often a broken record is read before it is skipped.
    """

    def __init__(self, folder: Path, layout: StorageFormat, most_tries: int = _MOST_TRIES) -> None:
        self._path = folder / INDEX
        self._format = layout
        self._file: int | None = None
        self._read_to = 0
        self._most_tries = most_tries
        self._tries = 0
        self.broken = 0
        """The number of records that were skipped."""
        self.pages = FoundPages()
        """The pages of the index, as far as it was read."""
        self.times_opened = 0
        """A number that rises when the folder may have been made anew."""

    def refresh(self) -> None:
        """Read new records. Raises OSError."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            self.close()
            return
        if self._file is None or (status.st_dev, status.st_ino) != self._inode_of(self._file):
            self._open()
        elif status.st_size < self._read_to:
            self._open()  # its end was cut off, or it is another one at the same place
        if status.st_size != self._read_to:
            self._read()

    def close(self) -> None:
        """Close the file, and forget its records."""
        if self._file is not None:
            os.close(self._file)
        self._file, self._read_to, self.pages = None, 0, FoundPages()
        self._tries = 0

    def _inode_of(self, file: int) -> tuple[int, int]:
        status = os.fstat(file)
        return status.st_dev, status.st_ino

    def _open(self) -> None:
        self.close()
        self.times_opened += 1
        self._file = os.open(self._path, os.O_RDONLY)

    def _read(self) -> None:
        assert self._file is not None
        header = self._format.file_header
        if not self._read_to:
            if os.pread(self._file, len(header), 0) != header:
                return
            self._read_to = len(header)
        while packed := os.pread(self._file, _READ_BYTES, self._read_to):
            records = _unpack(packed)
            for record in records:
                self.pages.take(record)
            self._read_to += len(records) * RECORD_BYTES
            if records:
                self._tries = 0  # a record that was broken here was being written
            elif not self._skip_broken(packed):
                break

    def _skip_broken(self, packed: bytes) -> bool:
        """Skip records that are broken for good, if whole ones follow."""
        broken = _count_broken(packed)
        self._tries += bool(broken)
        if not broken or self._tries < self._most_tries:
            return False
        logger.warning("%d records of %s are broken", broken, self._path)
        self._tries = 0
        self.broken += broken
        self._read_to += broken * RECORD_BYTES
        return True

    @property
    def is_right(self) -> bool:
        """Whether there is an index of this layout."""
        return bool(self._read_to)

    @property
    def read_to(self) -> int:
        """The position up to which the file was read, after the last whole record."""
        return self._read_to


class IndexWriter:
    """A writer that appends to the index of this process's folder.

    Args:
        folder: only this process writes there.
        layout: of the slots.
    """

    def __init__(self, folder: Path, layout: StorageFormat) -> None:
        self._path = folder / INDEX
        self._format = layout
        self._file = -1
        self._length = 0
        """The length of the file, up to the last whole record."""
        self.broken = 0
        """The number of broken records between others when it was read."""

    def recover(self) -> FoundPages | None:
        """Read the records written before, and cut off an end that was not written whole.

        Raises OSError.

        Returns:
            The pages of the index; None: there is no index of this layout.
        """
        reader = IndexReader(self._path.parent, self._format, most_tries=1)
        reader.refresh()
        self.broken = reader.broken
        pages, length, is_right = reader.pages, reader.read_to, reader.is_right
        reader.close()
        if not is_right:
            return None
        self._file = os.open(self._path, os.O_WRONLY)
        os.ftruncate(self._file, length)
        self._length = length
        return pages

    def rewrite(self, pages: Iterable[StoredPage]) -> None:
        """Replace the index by one with these pages only. Raises OSError."""
        fresh = self._path.with_suffix(".new")
        file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            packed = b"".join(IndexRecord(p.slot, p.key, p.before).pack() for p in pages)
            whole = self._format.file_header + packed
            _write(file, whole, 0)
            os.fsync(file)
            fresh.replace(self._path)
        except OSError:
            os.close(file)
            raise
        self.close()
        self._file, self._length = file, len(whole)
        _sync_folder(self._path.parent)

    def append(self, records: Iterable[IndexRecord]) -> None:
        """Append records. The bytes that they describe are safe already.

        Raises:
            OSError: none of them was written.
        """
        packed = b"".join(record.pack() for record in records)
        try:
            _write(self._file, packed, self._length)
        except OSError:
            with contextlib.suppress(OSError):  # what is left is no whole record, or true
                os.ftruncate(self._file, self._length)
            raise
        self._length += len(packed)

    def is_long(self, pages: int) -> bool:
        """Whether it has far more records than `pages` pages need."""
        return self._length > RECORD_BYTES * (2 * pages + _SPARE_RECORDS)

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def _unpack(packed: bytes) -> list[IndexRecord]:
    """Unpack the whole records, up to the first that is broken."""
    records = []
    for at in range(0, len(packed) - RECORD_BYTES + 1, RECORD_BYTES):
        record = IndexRecord.unpack(packed[at : at + RECORD_BYTES])
        if record is None:
            break
        records.append(record)
    return records


def _count_broken(packed: bytes) -> int:
    """Count the broken records before the first whole one; 0: none is whole."""
    for at in range(RECORD_BYTES, len(packed) - RECORD_BYTES + 1, RECORD_BYTES):
        if IndexRecord.unpack(packed[at : at + RECORD_BYTES]) is not None:
            return at // RECORD_BYTES
    return 0


def _write(file: int, packed: bytes, offset: int) -> None:
    """Write all of it. Raises OSError: then a part may have been written."""
    view = memoryview(packed)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
